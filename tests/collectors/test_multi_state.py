"""The state of collectors with workers: to be had at any moment, and gone on with elsewhere."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from swath.collectors import MultiAsyncCollector, MultiSyncCollector, PolicyVersion
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.keys import TRAJ_IDS
from swath.testing import CountingEnv

KINDS = [MultiSyncCollector, MultiAsyncCollector]
WAIT_S = 60.0


def net(value: float = 0.0) -> TensorDictModule:
    linear = nn.Linear(3, 2)
    nn.init.zeros_(linear.weight)
    nn.init.constant_(linear.bias, value)
    return TensorDictModule(linear, in_keys=["observation"], out_keys=["action"])


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Any] = []

    def build(kind: Any, policy: Any = None, workers: int = 2, **options: Any) -> Any:
        options = {"frames_per_batch": 12, **options}
        made.append(kind([lambda: CountingEnv(lengths=5)] * workers, policy, **options))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown()


def saved(state: Any) -> Any:
    """As it comes back from a file that may hold nothing but data."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def buffer() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(5000), shared=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
def test_a_new_collector_goes_on(make: Any, kind: Any, debug: bool) -> None:
    first = make(kind, net(1.0), total_frames=120, debug=debug)
    for _ in range(3):
        first.next()
    first.update_policy_weights_(net(2.0))
    first.update_policy_weights_(net(3.0))
    state = saved(first.state_dict())
    assert state["frames"] == 36
    assert state["iter"] == 3
    assert state["policy_version"] == 2
    assert {"worker0", "worker1", "traj_pool", "undelivered_frames"} <= set(state)
    second = make(kind, net(0.0), total_frames=120, debug=debug, track_policy_version=PolicyVersion())
    second.load_state_dict(state)
    batches = list(second)
    assert sum(batch.numel() for batch in batches) == 84
    assert second.stats()["frames"] == 120
    assert second.stats()["batches"] == 10
    for batch in batches:
        assert (batch["action"] == 3.0).all()
        assert (batch["policy_version"] == 2).all()
    assert second.policy_version == 2


@pytest.mark.parametrize("kind", KINDS)
def test_weights_after_a_load(make: Any, kind: Any) -> None:
    first = make(kind, net(1.0), debug=True)
    for _ in range(5):
        first.update_policy_weights_(net(5.0))
    second = make(kind, net(2.0), debug=True, track_policy_version=PolicyVersion())
    for _ in range(9):
        second.update_policy_weights_(net(9.0))
    second.next()
    second.load_state_dict(first.state_dict())
    assert second.policy_version == 5
    batch = second.next()
    assert (batch["action"] == 5.0).all()
    assert (batch["policy_version"] == 5).all(), "an older version may be gone back to"
    second.update_policy_weights_(net(6.0))
    for _ in range(5):
        batch = second.next()
    assert (batch["action"] == 6.0).all()
    assert (batch["policy_version"] == 6).all()


def test_workers_with_weights_of_their_own(make: Any) -> None:
    first = make(MultiSyncCollector, net(1.0), debug=True)
    first.update_policy_weights_(net(2.0), worker_ids=1)
    second = make(MultiSyncCollector, net(0.0), debug=True)
    second.load_state_dict(saved(first.state_dict()))
    for _ in range(2):
        assert second.next()["action"][:, 0, 0].tolist() == [1.0, 2.0]


def test_a_random_policy_has_a_state_too(make: Any) -> None:
    first = make(MultiSyncCollector, total_frames=48)
    first.next()
    second = make(MultiSyncCollector, total_frames=48)
    second.load_state_dict(saved(first.state_dict()))
    assert sum(batch.numel() for batch in second) == 36


@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
def test_what_is_not_delivered_is_counted(make: Any, debug: bool) -> None:
    first = make(MultiAsyncCollector, total_frames=240, slots_per_worker=3, debug=debug)
    delivered = sum(first.next().numel() for _ in range(4))
    if not debug:
        deadline = time.monotonic() + WAIT_S
        while not first.stats()["waiting_batches"]:
            first._workers.attend(0.01)
            assert time.monotonic() < deadline
    state = first.state_dict()
    assert state["frames"] == delivered == 48
    assert state["undelivered_frames"] == 12 * first.stats()["waiting_batches"]
    assert state["undelivered_frames"] or debug
    rest = sum(batch.numel() for batch in first)
    assert rest == 240 - 48, "asking has cost nothing"
    second = make(MultiAsyncCollector, total_frames=240, debug=debug)
    second.load_state_dict(state)
    assert second.stats()["dropped_frames"] == state["undelivered_frames"]
    assert sum(batch.numel() for batch in second) == 240 - 48


@pytest.mark.parametrize("kind", KINDS)
def test_loading_gives_up_what_was_under_way(make: Any, kind: Any) -> None:
    first = make(kind, debug=True)
    for _ in range(3):
        first.next()
    state = first.state_dict()
    for _ in range(3):
        first.next()
    first.load_state_dict(state)
    assert first.stats()["frames"] == 36
    batch = first.next()
    assert (batch["observation"].reshape(-1, 12 if kind is MultiAsyncCollector else 6, 3)[:, 0, 2] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_unfinished_episodes_are_saved_and_given_up(make: Any, kind: Any) -> None:
    first = make(kind, frames_per_batch=8, trajs_per_batch=3, total_frames=160, debug=True)
    got = 0
    for number, batch in enumerate(first):
        got += int(batch["collector", "mask"].sum())
        if number == 2:
            break
    state = saved(first.state_dict())
    second = make(kind, frames_per_batch=8, trajs_per_batch=3, total_frames=160, debug=True)
    second.load_state_dict(state)
    for batch in second:
        mask = batch["collector", "mask"]
        assert mask.sum(1).tolist() == [5, 5, 5]
        got += int(mask.sum())
    stats = second.stats()
    undelivered = state["undelivered_frames"]
    assert stats["frames"] == 160
    assert got + stats["dropped_frames"] - undelivered == 160


def test_the_state_of_a_collector_that_runs_in_the_background(make: Any) -> None:
    store = buffer()
    collector = make(MultiAsyncCollector, net(1.0), replay_buffer=store, total_frames=-1)
    collector.start()
    deadline = time.monotonic() + WAIT_S
    while len(store) < 100:
        assert time.monotonic() < deadline
    state = saved(collector.state_dict())
    assert collector.is_running()
    assert state["frames"] >= 100
    with collector.pause():
        before, count = collector.state_dict(), len(store)
        again = collector.state_dict()
        assert before["frames"] == again["frames"] == count
    while len(store) < count + 50:
        assert time.monotonic() < deadline
    collector.async_shutdown()
    other = make(MultiAsyncCollector, net(0.0), replay_buffer=buffer(), total_frames=before["frames"] + 120)
    other.load_state_dict(before)
    other.start()
    while other.is_running():
        assert time.monotonic() < deadline
    assert len(other.replay_buffer) == 120
    assert other.stats()["frames"] == before["frames"] + 120
    assert (other.replay_buffer[:]["action"] == 1.0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_iterating_with_a_buffer(make: Any, kind: Any) -> None:
    first = make(kind, replay_buffer=buffer(), total_frames=120)
    for _ in range(4):
        first.next()
    state = saved(first.state_dict())
    assert state["frames"] == 48
    second = make(kind, replay_buffer=buffer(), total_frames=120)
    second.load_state_dict(state)
    assert list(second) == [None] * 6
    assert len(second.replay_buffer) == 72


def test_states_that_do_not_fit(make: Any) -> None:
    two, three = make(MultiSyncCollector, debug=True), make(MultiSyncCollector, workers=3, debug=True)
    with pytest.raises(KeyError, match="3 workers: it has 2"):
        three.load_state_dict(two.state_dict())
    with pytest.raises(KeyError, match="2 workers: it has 3"):
        two.load_state_dict(three.state_dict())
    with pytest.raises(KeyError, match="no state of a collector"):
        two.load_state_dict({})
    assert two.next().shape == (2, 6)


def test_weights_that_do_not_fit(make: Any) -> None:
    other = nn.Linear(3, 2, bias=False)
    first = make(MultiSyncCollector, other, debug=True)
    second = make(MultiSyncCollector, nn.Linear(3, 2), debug=True)
    with pytest.raises(RuntimeError, match="bias"):
        second.load_state_dict(first.state_dict())


def test_a_closed_collector_has_no_state(make: Any) -> None:
    collector = make(MultiSyncCollector, debug=True)
    collector.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        collector.state_dict()
    with pytest.raises(RuntimeError, match="shut down"):
        collector.load_state_dict({})


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_both_kinds_are_exchangeable(make: Any, kind: Any) -> None:
    other = MultiAsyncCollector if kind is MultiSyncCollector else MultiSyncCollector
    first = make(kind, net(4.0), total_frames=48, debug=True)
    ids = set(first.next()[TRAJ_IDS].unique().tolist())
    second = make(other, net(0.0), total_frames=48, debug=True)
    second.load_state_dict(first.state_dict())
    batches = list(second)
    assert sum(batch.numel() for batch in batches) == 36
    assert all((batch["action"] == 4).all() for batch in batches)
    assert not ids & {number for batch in batches for number in batch[TRAJ_IDS].unique().tolist()}
