"""What `post_collect_hook` is given is its own to keep, and what was collected is delivered, wherever that was."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from kinds import ALL, HERE, SPREAD, Make, over
from tensordict import TensorDictBase

from swath.rollout.slots import Slot
from swath.testing import CountingEnv


class Keeper:
    """A hook that keeps every batch, and tells by the rewards whether all that it has kept is as it was."""

    def __init__(self) -> None:
        self.kept: list[tuple[TensorDictBase, TensorDictBase]] = []

    def __call__(self, batch: TensorDictBase) -> None:
        is_intact = all((batch == copy).all() for batch, copy in self.kept)
        batch["next", "reward"].fill_(1.0 if is_intact else 0.0)
        self.kept.append((batch, batch.clone()))


@over(ALL)
def test_a_hook_may_keep_its_batches(make: Make) -> None:
    for batch in make(lanes=2, batches=12, post_collect_hook=Keeper()):
        assert (batch["next", "reward"] == 1).all()


class Undertaker:
    """A hook that tells by the rewards how many dead references there are in its process: in every 20th batch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: TensorDictBase) -> None:
        self.calls += 1
        if self.calls % 20 == 0:
            dead = sum(type(one) is weakref.ref and one() is None for one in gc.get_objects())
            batch["next", "reward"].fill_(1000.0 + dead)


@over(ALL)
def test_a_hook_leaves_no_dead_references_behind(make: Make) -> None:
    batches = make(steps=2, batches=120, post_collect_hook=Undertaker())
    counts = [number for batch in batches if (number := float(batch["next", "reward"].max())) >= 1000]
    assert len(counts) >= 3
    assert max(counts) < counts[0] + 150, counts  # of the last few batches there are some


# -- on an accelerator ----------------------------------------------------------------------------------------------


class Elsewhere(str):
    """A device that is not the CPU for whoever asks, and where there is memory nevertheless."""

    type = "elsewhere"


class FarEnv(CountingEnv):
    """Steps on rows that no array lies over."""

    @property
    def rows_device(self) -> Any:
        return Elsewhere("cpu")


here = Slot.__init__


def far(self: Slot, memory: Any, batch_size: tuple[int, ...]) -> None:
    """A slot whose memory is not the CPU's."""
    here(self, memory, batch_size)
    self._is_on_cpu = False
    self.columns = dict(self.tensors)


def far_env() -> FarEnv:
    """An env on an accelerator, where it is made: in a worker, or here."""
    Slot.__init__ = far  # type: ignore[method-assign]
    return FarEnv((2,))


def double(batch: TensorDictBase) -> None:
    batch["next", "reward"].mul_(2)


@pytest.mark.parametrize("hook", [None, double], ids=["no hook", "hook"])
@over([kind for kind in (*HERE, *SPREAD) if not kind.many_envs])
def test_what_was_collected_on_an_accelerator_is_delivered(
    make: Make, hook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slot, "__init__", here)  # and back
    collector = make(far_env, lanes=2, batches=4, post_collect_hook=hook)
    kept = [(batch, batch.clone()) for batch in collector]
    for batch, copy in kept:
        assert (batch == copy).all(), "a batch that was kept was overwritten"
        assert torch.equal(batch["next", "reward"][..., 0], batch["next", "observation"][..., 2] * (2 if hook else 1))
        assert (batch["next", "reward"] > 0).all()
