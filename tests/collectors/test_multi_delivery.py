"""Nothing is lost, nobody starves, nobody runs ahead further than promised."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from swath.collectors import AsyncCollector, MultiAsyncCollector, MultiSyncCollector
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.keys import TRAJ_IDS
from swath.rollout.trajectories import WORKER_BITS
from swath.testing import CountingEnv, assert_frames_belong

IS_LONG = bool(os.environ.get("SWATH_LONG"))
WAIT_S = 60.0


class Paced(CountingEnv):
    """Worker `index` takes `index * pace` seconds for a step."""

    pace = 0.002

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        time.sleep(self.first_lane / self.num_lanes * self.pace)
        return super()._step(tensordict)


def net() -> nn.Module:
    return TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])


def worker_of(batch: TensorDictBase) -> int:
    (number,) = (batch.get(TRAJ_IDS) >> WORKER_BITS).unique().tolist()
    return int(number)


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Any] = []

    def build(kind: Any, makers: Any, policy: Any = None, **options: Any) -> Any:
        made.append(kind(makers, policy, **options))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown()


@pytest.mark.timeout(300 if IS_LONG else 120)
@pytest.mark.parametrize("slots", [1, 2])
def test_a_slow_consumer_loses_nothing(make: Any, slots: int) -> None:
    """The founding document's line: four workers, a trainer that takes long for each batch, and no hole anywhere."""
    pause_s = 3.0 if IS_LONG else 0.1
    env = lambda: CountingEnv(lengths=[7, 3, 11])  # noqa: E731
    collector = make(MultiAsyncCollector, [env] * 4, frames_per_batch=8, total_frames=8 * 16, slots_per_worker=slots)
    parts: dict[int, list[TensorDictBase]] = {index: [] for index in range(4)}
    for batch in collector:
        parts[worker_of(batch)].append(batch)
        deadline = time.monotonic() + pause_s
        while time.monotonic() < deadline:  # busy, as a trainer is
            torch.ones(64, 64) @ torch.ones(64, 64)
    assert sum(len(own) for own in parts.values()) == 16
    for own in parts.values():
        assert_frames_belong(torch.cat(own, 0))
        assert int(own[0]["observation"][0, 2]) == int(own[0]["observation"][0, 1]) == 0
    assert collector.stats()["dropped_frames"] == collector.stats()["lost_frames"] == 0


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_workers_stop_when_their_slots_are_full(make: Any, slots: int) -> None:
    collector = make(MultiAsyncCollector, [CountingEnv] * 2, frames_per_batch=4, slots_per_worker=slots)
    collector.next()
    board = collector._workers.board
    wanted = 4 * (2 * slots + 1)  # one batch is delivered, and all rooms are filled again
    deadline = time.monotonic() + WAIT_S
    while sum(board.row(index)["frames"] for index in (0, 1)) < wanted:
        assert time.monotonic() < deadline
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        made = [board.row(index)["steps"] for index in (0, 1)]
        assert sum(made) == wanted, "a worker has gone on"
        assert max(made) <= 4 * (slots + 1)
    assert collector.stats()["waiting_batches"] <= 2 * slots


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_batch_is_no_older_than_promised(make: Any, staleness: int) -> None:
    policy = net()
    collector = make(
        MultiAsyncCollector, [Paced] * 3, policy, frames_per_batch=4, max_staleness=staleness, slots_per_worker=4
    )
    lags, workers = [], Counter[int]()
    for number in range(24):
        batch = collector.next()
        lags.append(number - int(batch["policy_version"].min()))
        assert collector.stats()["policy_lag"] == lags[-1]
        workers[worker_of(batch)] += 1
        collector.update_policy_weights_()
    assert max(lags) <= staleness
    assert collector.stats()["max_policy_lag"] == max(lags)
    assert set(workers) == {0, 1, 2}, "a worker was never asked"


def test_slow_workers_are_not_crowded_out(make: Any) -> None:
    """Each has its turn at its own pace; a fast one has more."""
    collector = make(MultiAsyncCollector, [Paced] * 4, frames_per_batch=5)
    counts: Counter[int] = Counter()
    parts: dict[int, list[TensorDictBase]] = {index: [] for index in range(4)}
    deadline = time.monotonic() + WAIT_S
    while min(counts.get(index, 0) for index in range(4)) < 3:
        assert time.monotonic() < deadline, f"somebody starves: {counts}"
        batch = collector.next()
        counts[worker_of(batch)] += 1
        parts[worker_of(batch)].append(batch)
    assert counts[0] >= counts[3]
    for own in parts.values():
        assert_frames_belong(torch.cat(own, 0))


def test_a_fast_worker_cannot_fill_the_line(make: Any) -> None:
    """However slow the consumer, between two batches of a worker there are at most those that the others had ready."""
    collector = make(MultiAsyncCollector, [CountingEnv] * 3, frames_per_batch=4, slots_per_worker=2, debug=True)
    order = [worker_of(collector.next()) for _ in range(60)]
    for index in range(3):
        places = [place for place, worker in enumerate(order) if worker == index]
        assert max(later - earlier for earlier, later in pairwise(places)) <= 6


def test_a_collector_collects_ahead_while_the_consumer_is_busy(make: Any) -> None:
    collector = make(AsyncCollector, CountingEnv, frames_per_batch=10, slots_per_worker=3)
    collector.next()
    deadline = time.monotonic() + WAIT_S
    while collector._workers.board.row(0)["frames"] < 40:
        assert time.monotonic() < deadline
    assert collector._workers.board.row(0)["frames"] == 40


def test_sync_workers_wait_for_the_consumer(make: Any) -> None:
    """So that what is published between two batches counts for the whole of the next."""
    collector = make(MultiSyncCollector, [CountingEnv] * 2, net(), frames_per_batch=10)
    collector.next()
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        assert [collector._workers.board.row(index)["steps"] for index in (0, 1)] == [5, 5]


# -- control at any moment ------------------------------------------------------------------------------------------


def test_control_calls_cost_no_batch(make: Any) -> None:
    """The peer's iterator hangs after any of these."""
    env = lambda: CountingEnv((2,), lengths=[7, 3])  # noqa: E731
    collector = make(MultiAsyncCollector, [env] * 3, net(), frames_per_batch=8, total_frames=480)
    parts: dict[int, list[TensorDictBase]] = {index: [] for index in range(3)}
    calls = [
        lambda: collector.state_dict(),
        lambda: collector.get_distant_attr("env.batch_size"),
        lambda: collector.getattr_policy("in_keys"),
        lambda: collector.cascade_execute("stats"),
        lambda: collector.map_fn("stats", [()] * 3),
        lambda: collector.stats(workers="both"),
        lambda: collector.update_policy_weights_(),
        lambda: collector.set_post_collect_hook(None),
    ]
    for number, batch in enumerate(collector):
        parts[worker_of(batch)].append(batch)
        calls[number % len(calls)]()
    for own in parts.values():
        assert_frames_belong(torch.cat(own, 1))
    assert sum(batch.numel() for own in parts.values() for batch in own) == 480


def test_going_on_after_a_break_loses_nothing(make: Any) -> None:
    collector = make(MultiAsyncCollector, [lambda: CountingEnv(lengths=9)] * 2, frames_per_batch=4, total_frames=160)
    parts: dict[int, list[TensorDictBase]] = {0: [], 1: []}
    while not collector.closed:
        for number, batch in enumerate(collector):
            parts[worker_of(batch)].append(batch)
            if number == 2:
                break
        if (batch := collector.next()) is not None:
            parts[worker_of(batch)].append(batch)
    for own in parts.values():
        assert_frames_belong(torch.cat(own, 0))
    assert sum(len(own) for own in parts.values()) == 40


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_a_rollout_is_a_batch_of_the_stream(make: Any, kind: Any) -> None:
    collector = make(kind, [CountingEnv], frames_per_batch=4, total_frames=12, debug=True)
    begins = [int(collector.rollout()["observation"].reshape(-1, 3)[:, 2].sum()) for _ in range(3)]
    assert begins == [0 + 1 + 2 + 3, 4 + 0 + 1 + 2, 3 + 4 + 0 + 1]
    with pytest.raises(Exception, match="make a new"):
        collector.rollout()


# -- stopping early --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stack", -1])
@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_preemption(make: Any, threshold: float, how: Any) -> None:
    """Once enough workers are done, the others stop where they are; what they have not made is marked or left out."""

    class Slower(Paced):
        pace = 0.01

    collector = make(
        MultiSyncCollector,
        [lambda: Slower(lengths=[7, 30])] * 4,
        frames_per_batch=80,
        total_frames=200,
        preemptive_threshold=threshold,
        cat_results=how,
    )
    frames = 0
    streams: dict[int, list[TensorDictBase]] = {index: [] for index in range(4)}
    for number, batch in enumerate(collector):
        if how == "stack":
            assert batch.shape[0] == 4
            mask = batch["collector", "mask"] if threshold < 1 else torch.ones(batch.shape, dtype=torch.bool)
            assert (batch["collector", "traj_ids"][~mask] == -1).all()
            assert mask[:, 0].all(), "every worker makes a step"
            rows = [row[own] for row, own in zip(batch, mask, strict=True)]
        else:
            numbers = batch["observation"][:, 0]
            rows = [batch[numbers == index] for index in range(4)]
            assert "mask" not in batch["collector"]
        for index, row in enumerate(rows):
            streams[index].append(row)
        real = sum(row.shape[0] for row in rows)
        if number == 0 and threshold < 1:
            assert real < 80, "nobody has stopped early"
            if threshold == 0.5:
                assert sum(row.shape[0] == 20 for row in rows) >= 2
        frames += real
    for own in streams.values():
        assert_frames_belong(torch.cat(own, 0))
    assert frames == collector.stats()["frames"]
    assert 200 <= frames < 204


def test_preempted_batches_can_be_split_and_put_together(make: Any) -> None:
    class Slower(Paced):
        pace = 0.005

    lengths = [7, 12]
    for options in ({"split_trajs": True}, {"trajs_per_batch": 3}):
        collector = make(
            MultiSyncCollector,
            [lambda: Slower(lengths=lengths)] * 2,
            frames_per_batch=30,
            total_frames=120,
            preemptive_threshold=0.5,
            **options,
        )
        for batch in collector:
            mask = batch["collector", "mask"]
            assert (batch["collector", "traj_ids"][~mask] == -1).all()
            for row, real in zip(batch, mask, strict=True):
                steps = row["observation"][real][:, 2].tolist()
                assert steps == list(range(int(steps[0]), int(steps[0]) + len(steps)))


class StopAfterThree:
    def __init__(self) -> None:
        self.asked = 0

    def collection_stopped(self) -> bool:
        self.asked += 1
        return self.asked % 3 == 0


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_an_interruptor_ends_batches_early(make: Any, kind: Any) -> None:
    collector = make(
        kind, [CountingEnv] * 2, frames_per_batch=16, total_frames=48, interruptor=StopAfterThree(), debug=False
    )
    batches = list(collector)
    if kind is MultiAsyncCollector:
        assert max(batch.shape[0] for batch in batches) == 3
        assert sum(batch.shape[0] for batch in batches) == 48
    else:
        for batch in batches:
            mask = batch["collector", "mask"]
            assert mask.sum(1).tolist() == [3, 3]
        assert len(batches) == 8
    assert collector.stats()["frames"] == 48


def test_workers_write_to_the_buffer_while_the_consumer_rests(make: Any) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), shared=True)
    collector = make(MultiAsyncCollector, [CountingEnv] * 2, frames_per_batch=8, total_frames=160, replay_buffer=buffer)
    collector.next()
    deadline = time.monotonic() + WAIT_S
    while len(buffer) < 8 * 5:  # one told of, two under way or waiting for each
        assert time.monotonic() < deadline
    for _ in collector:
        pass
    assert len(buffer) == 160
    assert collector.stats()["frames"] == 160
