"""Our collectors with workers beside TorchRL's: the same envs and policy, the same batches."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from swath import collectors
from swath.keys import TRAJ_IDS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peer_collectors = pytest.importorskip("torchrl.collectors")
    mocks = pytest.importorskip("torchrl.testing.mocking_classes")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.torchrl]


@pytest.fixture(autouse=True)
def validation_is_off(distributions_are_validated: None) -> None:
    """As TorchRL sets it when it is imported: some of its distributions fail otherwise."""
    torch.distributions.Distribution.set_default_validate_args(False)


def make_env() -> Any:
    return mocks.CountingEnv(max_steps=5, batch_size=[3])


def make_policy() -> nn.Module:
    return TensorDictModule(lambda observation: torch.ones_like(observation), ["observation"], ["action"])


def layout(batch: TensorDictBase) -> dict[Any, Any]:
    return {key: (tuple(value.shape), value.dtype) for key, value in batch.items(True, True)}


def assert_same(ours: TensorDictBase, theirs: TensorDictBase) -> None:
    """Entries, names and values; beside theirs, ours always says whether an episode was truncated."""
    assert layout(ours.exclude("truncated", ("next", "truncated"))) == layout(theirs)
    assert ours.names == theirs.names
    for key, value in theirs.items(True, True):
        if key != TRAJ_IDS:
            assert torch.equal(ours.get(key), value), key


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["MultiSyncCollector", "MultiAsyncCollector"])
def test_batches_are_the_peers(kind: str) -> None:
    """Shapes, entries, names and values; the peer takes its time to start."""
    workers = 2 if kind == "MultiSyncCollector" else 1
    size = {"frames_per_batch": 21 * workers, "total_frames": 42 * workers}
    theirs = getattr(peer_collectors, kind)([make_env] * workers, make_policy(), **size)
    their_batches = [batch.clone() for batch in theirs]
    theirs.shutdown()
    ours = getattr(collectors, kind)([make_env] * workers, make_policy(), track_policy_version=False, **size)
    our_batches = list(ours)
    assert len(our_batches) == len(their_batches) == 2
    for our_batch, their_batch in zip(our_batches, their_batches, strict=True):
        assert_same(our_batch, their_batch)
