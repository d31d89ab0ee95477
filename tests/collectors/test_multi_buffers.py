"""Workers that write to a replay buffer: while somebody iterates, and on their own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from swath.collectors import AsyncCollector, MultiAsyncCollector, MultiSyncCollector
from swath.data import LazyTensorStorage, PrioritizedSampler, RateLimiter, ReplayBuffer, SliceSampler
from swath.keys import TRAJ_IDS
from swath.rollout.trajectories import WORKER_BITS
from swath.testing import CountingEnv

KINDS = [MultiSyncCollector, MultiAsyncCollector]
WAIT_S = 60.0


def until(condition: Callable[[], bool], what: str = "it never came true") -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def buffer(size: int = 10_000, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(size), **{"shared": True, **options})


def net(value: float = 0.0) -> nn.Module:
    linear = nn.Linear(3, 2)
    nn.init.zeros_(linear.weight)
    nn.init.constant_(linear.bias, value)
    return TensorDictModule(linear, in_keys=["observation"], out_keys=["action"])


def env(lanes: int = 0, lengths: Any = (5, 3)) -> Callable[[], CountingEnv]:
    return lambda: CountingEnv((lanes,) if lanes else (), lengths=lengths)


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Any] = []

    def build(kind: Any, policy: Any = None, workers: int = 2, **options: Any) -> Any:
        options = {"frames_per_batch": 20, **options}
        makers = options.pop("env", env())
        made.append(kind(makers if kind is AsyncCollector else [makers] * workers, policy, **options))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown()


def assert_whole(data: TensorDictBase, length: Callable[[int], int] | None = None) -> None:
    """Frames of each trajectory are consecutive from 0; with `length`, each is complete and lies in a row."""
    names: dict[int, list[tuple[float, ...]]] = {}
    for number, frame in zip(data[TRAJ_IDS].tolist(), data["observation"].tolist(), strict=True):
        names.setdefault(number, []).append(tuple(frame))
    for frames in names.values():
        assert [frame[2] for frame in frames] == list(range(len(frames)))
        assert len({frame[:2] for frame in frames}) == 1
        if length is not None:
            assert len(frames) == length(int(frames[0][1]))
    if length is not None:
        ids = data[TRAJ_IDS]
        assert int((ids[1:] != ids[:-1]).sum()) + 1 == len(names), "an episode lies in pieces"


@pytest.mark.parametrize("kind", [*KINDS, AsyncCollector])
@pytest.mark.parametrize("lanes", [0, 3])
def test_iterating_fills_the_buffer(make: Any, kind: Any, lanes: int) -> None:
    store = buffer()
    collector = make(kind, replay_buffer=store, frames_per_batch=24, total_frames=120, env=env(lanes))
    assert list(collector) == [None] * 5
    assert len(store) == store.write_count == 120
    assert_whole(store[:])
    workers = 1 if kind is AsyncCollector else 2
    assert len((store[:][TRAJ_IDS] >> WORKER_BITS).unique()) == workers
    assert collector.stats()["frames"] == 120
    assert collector.closed
    assert collector.replay_buffer is store


def test_a_buffer_that_is_not_shared_becomes_so(make: Any) -> None:
    store = ReplayBuffer(storage=LazyTensorStorage(1000))
    assert not store.is_shared
    for _ in make(MultiSyncCollector, replay_buffer=store, total_frames=60):
        pass
    assert store.is_shared
    assert len(store) == 60


def test_frames_that_are_there_already_stay(make: Any) -> None:
    store = buffer()
    list(make(MultiSyncCollector, replay_buffer=store, total_frames=40))
    list(make(MultiSyncCollector, replay_buffer=store, total_frames=40))
    assert len(store) == 80
    assert_whole(store[:])


def test_a_sync_batch_is_there_when_it_is_told_of(make: Any) -> None:
    store = buffer()
    collector = make(MultiSyncCollector, replay_buffer=store)
    for number in range(1, 6):
        assert collector.next() is None
        assert len(store) == 20 * number


@pytest.mark.parametrize("kind", KINDS)
def test_postproc_and_hooks_run_in_the_workers(make: Any, kind: Any, tmp_path: Path) -> None:
    def postproc(batch: TensorDictBase) -> TensorDictBase:
        return batch.set("pid", torch.full((*batch.shape, 1), os.getpid()))

    def hook(batch: TensorDictBase) -> None:
        assert "pid" in batch
        (tmp_path / f"{os.getpid()}").touch()

    store = buffer()
    collector = make(kind, replay_buffer=store, total_frames=80, postproc=postproc, post_collect_hook=hook)
    pids = set(collector.worker_pids)
    list(collector)
    assert set(store[:]["pid"].unique().tolist()) == pids
    assert {int(path.name) for path in tmp_path.iterdir()} == pids


@pytest.mark.parametrize("kind", KINDS)
def test_single_steps(make: Any, kind: Any) -> None:
    store = buffer()
    list(make(kind, replay_buffer=store, total_frames=40, extend_buffer=False))
    assert len(store) == 40
    assert_whole(store[:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_write", [None, 2])
def test_complete_episodes_only(make: Any, kind: Any, per_write: int | None) -> None:
    store = buffer()
    collector = make(
        kind, replay_buffer=store, total_frames=400, trajs_per_batch=2, trajs_per_write=per_write, env=env(2, [3, 7])
    )
    list(collector)
    stats = collector.stats()
    assert_whole(store[:], lambda episode: [3, 7][episode % 2])
    assert len(store) + stats["dropped_frames"] == stats["frames"] == 400


def test_init_random_frames_are_counted_where_they_are_written(make: Any) -> None:
    store = buffer()
    collector = make(
        MultiAsyncCollector,
        net(50.0),
        replay_buffer=store,
        init_random_frames=100,
        total_frames=400,
        frames_per_batch=10,
    )
    list(collector)
    data = store[:]
    acted = (data["action"] == 50.0).all(-1).reshape(-1)
    assert not acted[:100].any()
    assert acted[-200:].all()
    assert 100 <= int((~acted).sum()) <= 100 + 2 * 2 * 10, "each worker may have had batches under way"


# -- on their own ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "lanes"), [(MultiAsyncCollector, 0), (MultiSyncCollector, 3)])
def test_start_honours_total_frames(make: Any, kind: Any, lanes: int) -> None:
    store = buffer()
    collector = make(kind, workers=3, replay_buffer=store, total_frames=300, frames_per_batch=24, env=env(lanes))
    collector.start()
    collector.start()  # it runs already
    until(lambda: not collector.is_running())
    assert len(store) == store.write_count == collector.stats()["frames"] == 300
    assert collector.stats()["completed"]
    assert_whole(store[:])
    collector.async_shutdown()
    assert collector.closed


@pytest.mark.parametrize(("total", "per_batch", "lanes"), [(100, 7, 0), (101, 50, 0), (10, 60, 2), (1, 1, 0)])
def test_start_is_exact(make: Any, total: int, per_batch: int, lanes: int) -> None:
    store = buffer()
    collector = make(
        MultiAsyncCollector,
        workers=3,
        replay_buffer=store,
        total_frames=total,
        frames_per_batch=per_batch,
        env=env(lanes),
    )
    collector.start()
    until(lambda: not collector.is_running())
    assert len(store) == -(-total // max(1, lanes)) * max(1, lanes)
    assert collector.stats()["frames"] == len(store)


def test_pause_and_go_on(make: Any) -> None:
    store = buffer(100_000)
    collector = make(MultiAsyncCollector, net(1.0), replay_buffer=store)
    with pytest.raises(RuntimeError, match="start"), collector.pause():
        pass
    collector.start()
    until(lambda: len(store) > 100)
    with collector.pause():
        count = store.write_count
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            assert store.write_count == count, "something was written"
        with collector.pause():  # also inside another
            assert store.write_count == count
        assert store.write_count == count
        collector.update_policy_weights_(net(2.0))
        assert collector.get_distant_attr("env.batch_size") == [torch.Size([])] * 2
    until(lambda: store.write_count > count + 100)
    collector.async_shutdown()
    count = store.write_count
    assert_whole(store[:])
    assert set(store[:]["action"].unique().tolist()) == {1.0, 2.0}
    assert store.write_count == count


def test_control_while_running(make: Any) -> None:
    store = buffer(100_000)
    collector = make(MultiAsyncCollector, net(1.0), replay_buffer=store)
    collector.start()
    until(lambda: len(store) > 50)
    assert len(collector.state_dict()) > 3
    assert collector.get_distant_attr("env.batch_size") == [torch.Size([])] * 2
    collector.set_seed(3)
    collector.reset()
    collector.reset([1])
    with pytest.raises(RuntimeError, match="background"):
        collector.next()
    with pytest.raises(RuntimeError, match="background"):
        collector.rollout()
    count = len(store)
    until(lambda: len(store) > count + 100)
    assert collector.is_running()
    assert collector.stats()["frames"] >= count
    collector.async_shutdown()
    assert_whole(store[:])


def test_async_shutdown_stops_at_once(make: Any) -> None:
    store = buffer()

    class Slow(CountingEnv):
        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            time.sleep(0.005)
            return super()._step(tensordict)

    collector = make(MultiAsyncCollector, replay_buffer=store, frames_per_batch=10_000, env=Slow)
    collector.start()
    until(lambda: collector._workers.board.row(0)["steps"] > 3)
    begin = time.monotonic()
    collector.async_shutdown()
    assert time.monotonic() - begin < 5.0
    assert not collector.is_running()


def test_iterating_first_and_then_on_their_own(make: Any) -> None:
    store = buffer()
    collector = make(MultiAsyncCollector, replay_buffer=store, total_frames=200)
    for _ in range(3):
        collector.next()
    collector.start()
    until(lambda: not collector.is_running())
    assert len(store) == collector.stats()["frames"] == 200
    assert_whole(store[:])


def test_slices_of_four_workers_lie_within_an_episode(make: Any) -> None:
    """The founding document's tip for training on trajectories."""
    store = buffer(20_000, sampler=SliceSampler(slice_len=4, end_key=("next", "done")), batch_size=64)
    collector = make(
        MultiAsyncCollector,
        workers=4,
        replay_buffer=store,
        trajs_per_batch=4,
        total_frames=-1,
        env=env(2, [5, 9, 4]),
    )
    collector.start()
    until(lambda: len(store) > 500)
    for _ in range(50):
        sample = store.sample().view(-1, 4)
        assert (sample[TRAJ_IDS] == sample[TRAJ_IDS][:, :1]).all()
        steps = sample["observation"][..., 2]
        assert torch.equal(steps[:, 1:], steps[:, :-1] + 1)
        assert (sample["observation"][..., :2] == sample["observation"][:, :1, :2]).all()
        assert not sample["next", "done"][:, :-1].any()
    collector.async_shutdown()
    assert len((store[:][TRAJ_IDS] >> WORKER_BITS).unique()) == 4
    assert_whole(store[:], lambda episode: [5, 9, 4][episode % 3])


def test_priorities_while_workers_run(make: Any) -> None:
    store = buffer(2000, sampler=PrioritizedSampler(2000, alpha=1.0, beta=1.0), batch_size=32)
    collector = make(MultiAsyncCollector, replay_buffer=store)
    collector.start()
    until(lambda: len(store) > 200)
    for _ in range(50):
        sample, info = store.sample(return_info=True)
        store.update_priority(info["index"], torch.rand(32) + 0.1)
        assert_whole_frames(sample)
    collector.async_shutdown()


def assert_whole_frames(sample: TensorDictBase) -> None:
    assert torch.equal(sample["next", "reward"][:, 0], sample["observation"][:, 2] + 1)
    assert torch.equal(sample["next", "observation"][:, 2], sample["observation"][:, 2] + 1)


@pytest.mark.parametrize("starts", [True, False], ids=["start", "iterate"])
def test_a_rate_limiter_holds_workers_back(make: Any, starts: bool) -> None:
    limiter = RateLimiter(samples_per_insert=1.0, min_size_to_sample=40, tolerance=64)
    store = buffer(10_000, rate_limiter=limiter, batch_size=16)
    collector = make(MultiAsyncCollector, replay_buffer=store, frames_per_batch=10)
    if not starts:
        for _ in range(4):
            collector.next()
        assert len(store.sample()) == 16
        assert store.write_count <= 40 + 64 + 40
        return
    collector.start()
    until(lambda: store.write_count >= 40)
    sampled = 0
    for _ in range(20):
        assert_whole_frames(store.sample())
        sampled += 16
        assert store.write_count <= 40 + sampled + 64 + 2 * 10
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        assert store.write_count <= 40 + sampled + 64 + 2 * 10
    assert store.write_count >= sampled - 64
    collector.async_shutdown()


def test_weights_that_are_published_meanwhile(make: Any) -> None:
    store = buffer(100_000)
    collector = make(MultiAsyncCollector, net(0.0), replay_buffer=store)
    collector.start()
    for number in range(1, 6):
        count = store.write_count
        until(lambda count=count: store.write_count > count + 40)
        collector.update_policy_weights_(net(float(number)))
    count = store.write_count
    until(lambda: store.write_count > count + 80)
    collector.async_shutdown()
    data = store[:]
    assert torch.equal(data["action"][:, 0].long(), data["policy_version"].reshape(-1))
    assert set(data["action"][-20:].unique().tolist()) == {5.0}


def test_a_trainer_that_waits_for_samples(make: Any) -> None:
    """`sample()` waits for workers that feed the buffer, also for the first frame."""
    store = buffer(1000, batch_size=8)
    collector = make(MultiAsyncCollector, replay_buffer=store)
    collector.start()
    assert len(store.sample()) == 8
    collector.async_shutdown()
