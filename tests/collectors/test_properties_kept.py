"""A batch of which anything is kept is never overwritten, and what is let go is used again."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from children import child, hear
from counting_layouts import LAYOUTS
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import slots_allocated, slots_of
from kinds import ALL, ASYNC_HERE, HERE, SPREAD, SYNC_HERE, Kind, Make, over
from tensordict import TensorDictBase
from torch import Tensor

STEPS = 4


def tokens(kept: Any) -> Any:
    """What `kept` holds now, in memory of its own."""
    if isinstance(kept, TensorDictBase):
        return {key: value.clone() for key, value in kept.items(True, True)}
    return np.asarray(kept).copy()


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    return bool(np.array_equal(first, second))


class Graph:
    """A loss of which only the graph holds the batch; its gradient tells what the batch held."""

    def __init__(self, batch: TensorDictBase) -> None:
        self.weight = torch.ones((), requires_grad=True)
        seen = batch.get(("next", "reward"))
        self.loss = (self.weight * seen).sum()

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        (gradient,) = torch.autograd.grad(self.loss, self.weight, retain_graph=True)
        return gradient.numpy()


KEPT: dict[str, Callable[[TensorDictBase], Any]] = {
    "the batch": lambda batch: batch,
    "a shallow copy": lambda batch: batch.copy(),
    "a slice of the batch": lambda batch: batch[..., 1:],
    "the first of it": lambda batch: batch[0],
    "one frame": lambda batch: batch[..., -1],
    "frames by index": lambda batch: batch.reshape(-1)[torch.tensor([0, 2])],
    "selected entries": lambda batch: batch.select(("next", "reward")),
    "one entry": lambda batch: batch.get("observation"),
    "an entry of next": lambda batch: batch.get(("next", "observation")),
    "the ids": lambda batch: batch.get(("collector", "traj_ids")),
    "a slice of an entry": lambda batch: batch.get("observation")[..., 1:, 2],
    "a single number": lambda batch: batch.get("observation").reshape(-1)[5:6],
    "a detached entry": lambda batch: batch.get("observation").detach(),
    "a numpy view": lambda batch: batch.get("observation").numpy(),
    "a slice of a numpy view": lambda batch: batch.get("observation").numpy()[..., 1],
    "a memoryview": lambda batch: memoryview(batch.get("observation").numpy()),
    "a view(-1)": lambda batch: batch.get("observation").view(-1),
    "a reshaped batch": lambda batch: batch.reshape(-1),
    "a transposed batch": lambda batch: batch.unsqueeze(0).transpose(0, -1),
    "an unbound row": lambda batch: batch.unbind(-1)[1],
    "a view of another dtype": lambda batch: batch.get("observation").view(torch.int32),
    "a strided view": lambda batch: torch.as_strided(batch.get("observation"), (3,), (1,), 2),
    "an array made by from_dlpack": lambda batch: np.from_dlpack(batch.get("observation")),
    "a graph": Graph,
}


@settings(max_examples=90, deadline=None)
@given(data=st.data(), lanes=st.integers(0, 3), kind=st.sampled_from(HERE))
def test_nothing_that_is_kept_ever_changes(data: Any, lanes: int, kind: Kind) -> None:
    options: dict[str, Any] = {}
    if kind is SYNC_HERE:
        options["cat_results"] = data.draw(st.sampled_from(["stack", 0, -1]))
    elif kind is ASYNC_HERE:
        options["slots_per_worker"] = data.draw(st.integers(1, 3))
    elif data.draw(st.booleans()):
        options["env"] = partial(LAYOUTS["SerialEnv"], max(1, lanes), lengths=[3, 5])
    collector = kind.build(lanes=lanes, lengths=[3, 5], steps=STEPS, **options)
    kept: list[tuple[str, Any, Any]] = []
    most = 0
    for _ in range(data.draw(st.integers(1, 12))):
        batch = collector.next()
        for name in data.draw(st.lists(st.sampled_from(sorted(KEPT)), max_size=2)):
            handle = KEPT[name](batch)
            kept.append((name, handle, tokens(handle)))
            del handle
        del batch
        most = max(most, len(kept))
        for name, handle, copied in kept:
            assert same(tokens(handle), copied), f"{name} has changed"
        while kept and data.draw(st.booleans()):
            kept.pop(data.draw(st.integers(0, len(kept) - 1)))
    assert kind.workers or collector.stats()["slots_allocated"] <= most + 2
    collector.shutdown()


@over(SPREAD)
def test_what_is_kept_outlives_processes(make: Make) -> None:
    collector = make(lengths=[3, 5], steps=STEPS, batches=20)
    kept = [
        (name, handle, tokens(handle)) for batch in collector for name, view in KEPT.items() for handle in [view(batch)]
    ]
    assert collector.closed
    for name, handle, copied in kept:
        assert same(tokens(handle), copied), f"{name} has changed"


def _hold(pipe: Any, held: dict[str, TensorDictBase]) -> None:
    """In a fork: tells whether what it holds is the same before and after the others go on."""
    before = tokens(held["batch"])
    pipe.send("ready")
    pipe.recv()
    pipe.send(same(before, tokens(held["batch"])))


@over(ALL)
def test_what_a_forked_child_keeps_never_changes(make: Make, kind: Kind) -> None:
    """As do the workers of a DataLoader over a batch that the trainer then lets go."""
    collector = make(lanes=2, steps=STEPS)
    for _ in range(3):  # as many as there are slots
        held = {"batch": collector.next()}
    with child(_hold, held) as (_, pipe):
        assert hear(pipe) == "ready"
        held.clear()
        for _ in range(5 * max(1, kind.workers)):
            collector.next()
        pipe.send("look")
        assert hear(pipe), "a batch was overwritten that a forked child holds"
    allocated = sum(slots_allocated(collector))
    for _ in range(10):
        collector.next()
    assert sum(slots_allocated(collector)) <= allocated + kind.ahead, "slots are used again as ever"


@pytest.mark.parametrize("name", sorted(KEPT))
def test_a_slot_comes_back_when_the_last_view_dies(make: Make, name: str) -> None:
    collector = make(lanes=2, steps=STEPS)
    kept = KEPT[name](collector.next())
    for _ in range(3):
        collector.next()
    while_kept = slots_allocated(collector)
    slots = slots_of(collector)
    assert all(slot.is_free for slot in slots) == (name == "frames by index"), (
        "what is kept must hold its slot, unless it is a copy"
    )
    del kept
    assert all(slot.is_free for slot in slots)
    for _ in range(3):
        collector.next()
    assert slots_allocated(collector) == while_kept


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickled": lambda batch: pickle.loads(pickle.dumps(batch)),
    "deep copied": copy.deepcopy,
    "cloned": lambda batch: batch.clone(),
    "saved and loaded": lambda batch: _saved(batch, weights_only=False),
    "saved as a dict and loaded safely": lambda batch: _saved(batch.to_dict(), weights_only=True),
}


def _saved(what: Any, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@pytest.mark.parametrize("name", sorted(COPIES))
def test_copies_are_whole_and_free_the_slot(make: Make, name: str) -> None:
    collector = make(lanes=2, lengths=3)
    batch = collector.next()
    copied = COPIES[name](batch)
    expected = {key: value.clone() for key, value in batch.items(True, True)}
    pointers = {value.data_ptr() for value in batch.values(True, True)}
    del batch
    for _ in range(3):
        again = collector.next()
        assert pointers == {value.data_ptr() for value in again.values(True, True)}, "the memory was not used again"
        del again
    for key, value in expected.items():
        found = copied
        for part in [key] if isinstance(key, str) else key:
            found = found[part]
        assert torch.equal(found, value)


@over(HERE)
def test_sharing_a_batch_moves_it_out_of_the_slot(make: Make) -> None:
    collector = make(lanes=2, lengths=3)
    batch = collector.next()
    expected = tokens(batch)
    shared = batch.share_memory_()
    assert all(value.is_shared() for value in shared.values(True, True))
    del batch
    for _ in range(3):
        collector.next()
    assert same(tokens(shared), expected)


@over(HERE)
def test_batches_can_be_trained_on(make: Make) -> None:
    layer = torch.nn.Linear(3, 1)
    batch = make(lanes=2, lengths=3).next()
    loss = (layer(batch.get("observation")) - batch.get(("next", "reward"))).square().mean()
    loss.backward()
    gradient = layer.weight.grad
    assert gradient is not None
    assert gradient.isfinite().all()
    observation = batch.get("observation").requires_grad_()  # saliency: a gradient for the data themselves
    layer(observation).sum().backward()
    assert torch.equal(observation.grad, layer.weight.detach().expand_as(observation))
    batch.set("advantage", torch.ones(*batch.shape, 1))
    batch.get("advantage").mul_(2)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_batches_are_contiguous_ordinary_tensors(make: Make, layout: str) -> None:
    env = LAYOUTS[layout](2, lengths=3)
    batch = make(env, frames_per_batch=5 * env.num_lanes).next()
    assert batch.is_contiguous()
    for value in batch.values(True, True):
        assert type(value) is Tensor
        assert value.is_contiguous()
        assert not value.is_inference()
        assert not value.requires_grad
        assert value.view(-1).shape == (value.numel(),)
