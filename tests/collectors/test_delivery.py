"""What batches of workers look like, and when they come: nothing is lost, nobody starves or runs ahead too far."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import pytest
import torch
from common import WAIT_S, buffer, by_lane, net, steps_of, until
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import worker_of
from kinds import ASYNC, ASYNC_HERE, ONE_ASYNC, SPREAD, SYNC, SYNC_HERE, Kind, Make, over
from tensordict import TensorDictBase

from swath.envs import GymEnv
from swath.keys import MASK, TRAJ_IDS
from swath.testing import (
    CountingEnv,
    CountingVectorEnv,
    assert_frames_belong,
    assert_whole_episodes,
    assert_whole_in_a_row,
    counted,
)

IS_LONG = bool(os.environ.get("SWATH_LONG"))
WORKERS_HERE = (SYNC_HERE, ASYNC_HERE)


class Paced(CountingEnv):
    """Worker `index` takes `index * pace` seconds for a step."""

    pace = 0.002

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        time.sleep(self.first_lane / self.num_lanes * self.pace)
        return super()._step(tensordict)


class Slower(Paced):
    pace = 0.005


def by_worker(batches: Any) -> dict[int, TensorDictBase]:
    """The frames `[..., T]` of each worker, one batch after the other; the batches are of single workers."""
    parts: dict[int, list[TensorDictBase]] = defaultdict(list)
    for batch in batches:
        parts[worker_of(batch)].append(batch)
    return {number: torch.cat(own, own[0].ndim - 1) for number, own in parts.items()}


# -- shapes ---------------------------------------------------------------------------------------------------------

SHAPES = [
    # cat_results, lanes, shape of 24 frames of 3 workers
    (None, 0, (3, 8)),
    ("stack", 0, (3, 8)),
    ("stack", 2, (3, 2, 4)),
    (0, 0, (24,)),
    (0, 2, (6, 4)),
    (-1, 0, (24,)),
    (-1, 2, (2, 12)),
    (1, 2, (2, 12)),
]


@pytest.mark.parametrize(
    ("kind", "how", "lanes", "shape"),
    [*((SYNC_HERE, *case) for case in SHAPES), *((SYNC, *case) for case in SHAPES if case[:2] in ((None, 0), (0, 2)))],
    ids=str,
)
def test_shapes_of_sync_batches(make: Make, how: Any, lanes: int, shape: tuple[int, ...]) -> None:
    first, second = make(workers=3, lanes=lanes, cat_results=how, frames_per_batch=24, batches=2)
    for batch in (first, second):
        assert batch.shape == shape
        assert batch.names == [*[None] * (len(shape) - 1), "time"]
        assert batch.get("observation").shape == (*shape, 3)
        assert batch.get(("next", "done")).shape == (*shape, 1)
        assert batch.get(TRAJ_IDS).shape == shape
    if shape[:-1] == (3,) or how == "stack" or (how == 0 and lanes):
        assert_frames_belong(first)
        assert_frames_belong(torch.cat([first, second], first.ndim - 1))
        return
    for batch in (first, second):  # workers one after the other in time
        steps = 24 // 3 // max(1, lanes)
        for part in batch.split(steps, -1):
            assert_frames_belong(part)
        numbers = counted(batch)[..., 0].reshape(-1, 3 * steps)[0].tolist()
        assert numbers == sorted(numbers)


@pytest.mark.parametrize(("lanes", "shape"), [(0, (8,)), (2, (2, 4))])
@over([ASYNC_HERE, ONE_ASYNC])
def test_shapes_of_async_batches(make: Make, kind: Kind, lanes: int, shape: tuple[int, ...]) -> None:
    workers = 1 if kind is ONE_ASYNC else 3
    batches = list(make(workers=workers, lanes=lanes, frames_per_batch=8, batches=6))
    assert [batch.shape for batch in batches] == [shape] * 6
    assert {tuple(batch.names) for batch in batches} == {(*[None] * (len(shape) - 1), "time")}
    for own in by_worker(batches).values():
        assert_frames_belong(own)


@over([SYNC_HERE])
def test_unequal_parts_are_stacked_without_padding(make: Make) -> None:
    collector = make(frames_per_batch=[6, 10], total_frames=32)
    assert collector.requested_frames_per_batch == 16
    assert [collector.frames_per_batch_worker(index) for index in (0, 1)] == [6, 10]
    batches = list(collector)
    for batch in batches:
        assert batch.batch_size == (2, -1)
        assert [part.shape for part in batch.unbind(0)] == [(6,), (10,)]
    for worker in (0, 1):
        assert_frames_belong(torch.cat([batch[worker] for batch in batches], 0))


@pytest.mark.parametrize(("how", "lanes", "shape"), [(0, 0, (16,)), (-1, 0, (16,)), (-1, 2, (2, 8))])
@over([SYNC_HERE])
def test_unequal_parts_one_after_the_other(make: Make, how: int, lanes: int, shape: tuple[int, ...]) -> None:
    for batch in make(lanes=lanes, frames_per_batch=[6, 10], total_frames=32, cat_results=how):
        assert batch.shape == shape
        assert batch.names[-1] == "time"
        for part in batch.split([6 // max(1, lanes), 10 // max(1, lanes)], -1):
            assert_frames_belong(part)


@over([SYNC_HERE])
def test_unequal_parts_cannot_lie_beside_each_other(make: Make) -> None:
    with pytest.raises(ValueError, match=r"cat_results=0 .* frames_per_batch=\[4, 8\] .* use -1"):
        make(lanes=2, frames_per_batch=[4, 8], total_frames=24, cat_results=0)


@over([SYNC_HERE])
def test_episodes_of_unequal_parts(make: Make) -> None:
    lengths, found = [3, 7], []
    for batch in make(lengths=lengths, frames_per_batch=[6, 10], total_frames=160, trajs_per_batch=2):
        found += assert_whole_episodes(batch, lambda lane, episode: lengths[episode % 2])
    assert len(found) == len(set(found)) >= 28


@over([ASYNC_HERE])
def test_async_workers_with_batches_of_their_own_sizes(make: Make) -> None:
    batches = list(make(frames_per_batch=[6, 10], total_frames=64))
    assert {batch.shape[0] for batch in batches[:-1]} <= {6, 10}
    for batch in batches[:-2]:
        assert batch.shape == ((6, 10)[worker_of(batch)],)
    assert sum(len(part) for part in by_worker(batches).values()) == 64


@pytest.mark.parametrize("options", [{}, {"cat_results": 0}, {"frames_per_batch": [10, 14]}, {"lanes": 3}], ids=str)
@over([SYNC_HERE])
def test_split_trajectories(make: Make, options: dict[str, Any]) -> None:
    batch = make(lengths=4, **{"frames_per_batch": 24, "split_trajs": True, **options}).next()
    mask, ids = batch.get(MASK), batch.get(TRAJ_IDS)
    assert int(mask.sum()) == 24
    assert batch.shape == ((7, 4) if "frames_per_batch" in options else (6, 4))
    assert (ids[~mask] == -1).all()
    assert len(ids[:, 0].unique()) == batch.shape[0]
    for row, real in zip(batch, mask, strict=True):
        assert counted(row)[real.numpy(), 2].tolist() == list(range(int(real.sum())))


@pytest.mark.parametrize("form", ["padded", "cat"])
@over([*WORKERS_HERE, *SPREAD])
def test_whole_episodes_of_all_workers(make: Make, kind: Kind, form: str) -> None:
    lengths, found = [3, 9, 4], []
    check = assert_whole_episodes if form == "padded" else assert_whole_in_a_row
    collector = make(
        lanes=2, lengths=lengths, frames_per_batch=8, total_frames=320, trajs_per_batch=4, traj_format=form
    )
    for batch in collector:
        episodes = check(batch, lambda lane, episode: lengths[episode % 3])
        assert len(episodes) == 4
        found += episodes
    assert len(found) == len(set(found))
    lanes = {lane for lane, _ in found}
    # Where a batch is of whoever is first, one worker may be so much quicker that there are no others.
    assert lanes == {0, 1, 2, 3} or (not kind.joins and lanes in ({0, 1}, {2, 3}))
    stats = collector.stats()
    assert sum(lengths[episode % 3] for _, episode in found) + stats["dropped_frames"] == stats["frames"] == 320


@over([SYNC_HERE])
def test_workers_whose_envs_idle(make: Make) -> None:
    collector = make(lambda: GymEnv(CountingVectorEnv(2, lengths=[3, 4])), lanes=2, batches=2)
    batches = list(collector)
    assert sum(int(batch.get(MASK).sum()) for batch in batches) == collector.stats()["frames"] >= 80
    whole = torch.cat(batches, 2)
    for worker in (0, 1):
        assert_frames_belong(whole[worker])


@over([SYNC])
def test_rows_are_in_the_order_of_workers_whoever_is_first(make: Make) -> None:
    class Slow(CountingEnv):
        """The first worker's env takes its time."""

        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            time.sleep(0.01 if self.first_lane == 0 else 0.0)
            return super()._step(tensordict)

    for batch in make(Slow, workers=3, steps=5, batches=3):
        assert (batch.get("observation")[..., 0] == torch.arange(3)[:, None]).all()


# -- exact budgets --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(data=st.data(), workers=st.integers(1, 4), lanes=st.integers(0, 3), kind=st.sampled_from(WORKERS_HERE))
def test_all_frames_are_delivered_and_no_more(data: Any, workers: int, lanes: int, kind: Kind) -> None:
    width = max(1, lanes)
    per_batch = data.draw(st.integers(1, 30) | st.lists(st.integers(1, 12), min_size=workers, max_size=workers))
    total = data.draw(st.integers(1, 90))
    collector = kind.build(
        lanes=lanes,
        lengths=[3, 5, 1],
        workers=workers,
        frames_per_batch=per_batch,
        total_frames=total,
        slots_per_worker=data.draw(st.integers(1, 3)),
    )
    batches = list(collector)
    steps = {collector.frames_per_batch_worker(worker) // width for worker in range(workers)}
    unit = width * workers if kind.joins and len(steps) == 1 else width
    wanted = -(-total // unit) * unit
    parts = [part for batch in batches for part in (batch.unbind(0) if kind.joins else [batch])]
    assert sum(part.numel() for part in parts) == collector.stats()["frames"] == wanted
    if isinstance(per_batch, int):
        assert len(batches) == len(collector) == -(-wanted // collector.requested_frames_per_batch)
        assert all(batch.numel() == collector.requested_frames_per_batch for batch in batches[:-1])
    for own in by_worker(parts).values():
        assert_frames_belong(own)
    assert collector.closed


@pytest.mark.parametrize(("workers", "lanes", "per_batch", "total"), [(3, 2, 25, 100), (2, 0, 7, 31), (4, 1, 10, 6)])
@over(SPREAD)
def test_all_frames_are_delivered_by_processes(
    make: Make, kind: Kind, workers: int, lanes: int, per_batch: int, total: int
) -> None:
    collector = make(workers=workers, lanes=lanes, frames_per_batch=per_batch, total_frames=total)
    unit = max(1, lanes) * (workers if kind.joins else 1)
    found = by_lane(collector)
    assert sum(map(len, found.values())) == -(-total // unit) * unit
    for own in found.values():
        assert_frames_belong(own)


# -- order and pace -------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300 if IS_LONG else 120)
@pytest.mark.parametrize("slots", [1, 2])
@over([ASYNC])
def test_a_slow_consumer_loses_nothing(make: Make, slots: int) -> None:
    """Four workers, a trainer that takes long for each batch, and no hole anywhere."""
    pause_s = 3.0 if IS_LONG else 0.05
    collector = make(lengths=[7, 3, 11], workers=4, steps=8, batches=16, slots_per_worker=slots)
    batches = []
    for batch in collector:
        batches.append(batch)
        deadline = time.monotonic() + pause_s
        while time.monotonic() < deadline:  # busy, as a trainer is
            torch.ones(64, 64) @ torch.ones(64, 64)
    assert len(batches) == 16
    for own in by_worker(batches).values():
        assert_frames_belong(own)
        assert own["observation"][0, 1:].tolist() == [0, 0]
    assert collector.stats()["dropped_frames"] == collector.stats()["lost_frames"] == 0


@pytest.mark.parametrize("slots", [1, 2, 3])
@over([ASYNC])
def test_workers_stop_when_their_slots_are_full(make: Make, slots: int) -> None:
    collector = make(steps=4, slots_per_worker=slots)
    collector.next()
    wanted = 4 * (2 * slots + 1)  # one batch is delivered, and all rooms are filled again
    until(lambda: steps_of(collector, 0) + steps_of(collector, 1) >= wanted)
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        made = [steps_of(collector, index) for index in (0, 1)]
        assert sum(made) == wanted, "a worker has gone on"
        assert max(made) <= 4 * (slots + 1)
    assert collector.stats()["waiting_batches"] <= 2 * slots


@pytest.mark.parametrize("staleness", [0, 1, 2])
@over([ASYNC])
def test_a_batch_is_no_older_than_promised(make: Make, staleness: int) -> None:
    collector = make(Paced, net(), workers=3, steps=4, max_staleness=staleness, slots_per_worker=4)
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


@over([ASYNC])
def test_slow_workers_are_not_crowded_out(make: Make) -> None:
    """Each has its turn at its own pace; a fast one has more."""
    collector = make(Paced, workers=4, steps=5)
    batches: list[TensorDictBase] = []
    counts: Counter[int] = Counter()
    deadline = time.monotonic() + WAIT_S
    while min(counts[index] for index in range(4)) < 3 or counts[0] < counts[3]:  # which may have begun before
        assert time.monotonic() < deadline, f"somebody starves: {counts}"
        batches.append(collector.next())
        counts[worker_of(batches[-1])] += 1
    for own in by_worker(batches).values():
        assert_frames_belong(own)


@over([ASYNC_HERE])
def test_a_fast_worker_cannot_fill_the_line(make: Make) -> None:
    """However slow the consumer, between two batches of a worker there are at most those that the others had ready."""
    collector = make(workers=3, steps=4, slots_per_worker=2)
    order = [worker_of(collector.next()) for _ in range(60)]
    for index in range(3):
        places = [place for place, worker in enumerate(order) if worker == index]
        assert max(later - earlier for earlier, later in pairwise(places)) <= 6


@over([ONE_ASYNC])
def test_a_collector_collects_ahead_while_the_consumer_is_busy(make: Make) -> None:
    collector = make(slots_per_worker=3)
    collector.next()
    until(lambda: steps_of(collector, 0) >= 40)
    assert steps_of(collector, 0) == 40


@over([SYNC])
def test_sync_workers_wait_for_the_consumer(make: Make) -> None:
    """So that what is published between two batches counts for the whole of the next."""
    collector = make(None, net(), steps=5)
    collector.next()
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        assert [steps_of(collector, index) for index in (0, 1)] == [5, 5]


@over([ASYNC])
def test_workers_write_to_the_buffer_while_the_consumer_rests(make: Make) -> None:
    kept = buffer()
    collector = make(steps=8, batches=20, replay_buffer=kept)
    collector.next()
    until(lambda: len(kept) >= 8 * 5)  # one told of, two under way or waiting for each
    for _ in collector:
        pass
    assert len(kept) == collector.stats()["frames"] == 160


# -- control at any moment ------------------------------------------------------------------------------------------


@over(SPREAD)
def test_control_calls_cost_no_batch(make: Make) -> None:
    """TorchRL's iterator hangs after any of these."""
    collector = make(None, net(), lanes=2, lengths=[7, 3], workers=3, frames_per_batch=12, total_frames=480)
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
    batches = []
    for number, batch in enumerate(collector):
        batches.append(batch)
        calls[number % len(calls)]()
    for own in by_lane(batches).values():
        assert_frames_belong(own)
    assert sum(batch.numel() for batch in batches) == 480


# -- stopping early -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threshold", "how"), [(0.0, "stack"), (0.5, "stack"), (0.5, -1), (1.0, "stack")])
@over([SYNC])
def test_preemption(make: Make, threshold: float, how: Any) -> None:
    """Once enough workers are done, the others stop where they are; what they have not made is marked or left out."""
    collector = make(
        lambda: Slower(lengths=[7, 30]),
        workers=4,
        frames_per_batch=80,
        total_frames=200,
        preemptive_threshold=threshold,
        cat_results=how,
    )
    frames = 0
    streams: dict[int, list[TensorDictBase]] = defaultdict(list)
    for number, batch in enumerate(collector):
        if how == "stack":
            assert batch.shape[0] == 4
            mask = batch["collector", "mask"] if threshold < 1 else torch.ones(batch.shape, dtype=torch.bool)
            assert (batch["collector", "traj_ids"][~mask] == -1).all()
            assert mask[:, 0].all(), "every worker makes a step"
            parts = [row[own] for row, own in zip(batch, mask, strict=True)]
        else:
            assert "mask" not in batch["collector"]
            parts = [batch[batch["observation"][:, 0] == index] for index in range(4)]
        for index, part in enumerate(parts):
            streams[index].append(part)
        real = sum(map(len, parts))
        if number == 0 and threshold < 1:
            assert real < 80, "nobody has stopped early"
            if threshold == 0.5:
                assert sum(len(part) == 20 for part in parts) >= 2
        frames += real
    for own in streams.values():
        assert_frames_belong(torch.cat(own, 0))
    assert frames == collector.stats()["frames"]
    assert 200 <= frames < 204


@pytest.mark.parametrize("options", [{"split_trajs": True}, {"trajs_per_batch": 3}], ids=str)
@over([SYNC])
def test_preempted_batches_can_be_split_and_put_together(make: Make, options: dict[str, Any]) -> None:
    env = lambda: Slower(lengths=[7, 12])  # noqa: E731
    for batch in make(env, steps=15, batches=4, preemptive_threshold=0.5, **options):
        mask = batch["collector", "mask"]
        assert (batch["collector", "traj_ids"][~mask] == -1).all()
        for row, real in zip(batch, mask, strict=True):
            steps = row["observation"][real][:, 2].tolist()
            assert steps == list(range(int(steps[0]), int(steps[0]) + len(steps)))
