"""What batches of several workers look like, and that every frame of every worker is where it belongs."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase

from swath.collectors import AsyncCollector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from swath.collectors.multi_sync import MultiSyncCollector as Sync
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import GymEnv
from swath.keys import MASK, TRAJ_IDS
from swath.rollout.trajectories import WORKER_BITS
from swath.testing import CountingEnv, CountingVectorEnv, assert_frames_belong, assert_whole_episodes, counted

Made = list[MultiCollector]


def env(lanes: int = 0, lengths: Any = 5, **options: Any) -> Callable[[], CountingEnv]:
    return lambda: CountingEnv((lanes,) if lanes else (), lengths=lengths, **options)


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes collectors of `workers` workers with `lanes` lanes (0: no batch dimension), in this process if not told."""
    made: Made = []

    def build(kind: Any, workers: int = 2, lanes: int = 0, lengths: Any = 5, **options: Any) -> Any:
        options = {"debug": True, **options}
        makers = env(lanes, lengths) if kind is AsyncCollector else [env(lanes, lengths)] * workers
        made.append(kind(makers, options.pop("policy", None), **options))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown()


def by_worker(batches: list[TensorDictBase]) -> dict[int, TensorDictBase]:
    """The frames `[..., T]` of each worker, one batch after the other; the batches are of single workers."""
    parts: dict[int, list[TensorDictBase]] = defaultdict(list)
    for batch in batches:
        numbers = (batch.get(TRAJ_IDS) >> WORKER_BITS).unique().tolist()
        assert len(numbers) == 1, "a batch of two workers"
        parts[numbers[0]].append(batch)
    return {number: torch.cat(own, own[0].ndim - 1) for number, own in parts.items()}


# -- shapes ----------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
@pytest.mark.parametrize(("how", "lanes", "shape"), SHAPES)
def test_shapes_of_sync_batches(make: Any, how: Any, lanes: int, shape: tuple[int, ...], debug: bool) -> None:
    if not debug and how not in (None, 0):
        pytest.skip("the same code as here")
    collector = make(Sync, 3, lanes, cat_results=how, frames_per_batch=24, total_frames=48, debug=debug)
    first, second = collector
    for batch in (first, second):
        assert batch.shape == shape
        assert batch.names == [*[None] * (len(shape) - 1), "time"]
        assert batch.get("observation").shape == (*shape, 3)
        assert batch.get(("next", "done")).shape == (*shape, 1)
        assert batch.get(TRAJ_IDS).shape == shape
    lane_major = shape[:-1] == (3,) or how == "stack" or (how == 0 and lanes)
    if lane_major:
        assert_frames_belong(first)
        assert_frames_belong(torch.cat([first, second], first.ndim - 1))
    else:  # workers one after the other in time
        for batch in (first, second):
            steps = 24 // 3 // max(1, lanes)
            for part in batch.split(steps, -1):
                assert_frames_belong(part)
            assert counted(batch)[..., 0].reshape(-1, 3 * steps)[0].tolist() == sorted(
                counted(batch)[..., 0].reshape(-1, 3 * steps)[0].tolist()
            )


@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
@pytest.mark.parametrize(("kind", "lanes", "shape"), [(MultiAsyncCollector, 0, (8,)), (MultiAsyncCollector, 2, (2, 4))])
def test_shapes_of_async_batches(make: Any, kind: Any, lanes: int, shape: tuple[int, ...], debug: bool) -> None:
    batches = list(make(kind, 3, lanes, frames_per_batch=8, total_frames=48, debug=debug))
    assert [batch.shape for batch in batches] == [shape] * 6
    assert {tuple(batch.names) for batch in batches} == {(*[None] * (len(shape) - 1), "time")}
    for own in by_worker(batches).values():
        assert_frames_belong(own)


@pytest.mark.parametrize(("lanes", "shape"), [(0, (6,)), (3, (3, 2))])
def test_one_async_worker(make: Any, lanes: int, shape: tuple[int, ...]) -> None:
    batches = list(make(AsyncCollector, lanes=lanes, frames_per_batch=6, total_frames=24))
    assert [batch.shape for batch in batches] == [shape] * 4
    assert_frames_belong(torch.cat(batches, len(shape) - 1))


def test_unequal_parts_are_stacked_without_padding(make: Any) -> None:
    collector = make(Sync, 2, frames_per_batch=[6, 10], total_frames=32)
    assert collector.requested_frames_per_batch == 16
    assert [collector.frames_per_batch_worker(index) for index in (0, 1)] == [6, 10]
    batches = list(collector)
    for batch in batches:
        assert batch.batch_size == (2, -1)
        assert [part.shape for part in batch.unbind(0)] == [(6,), (10,)]
    for worker in (0, 1):
        assert_frames_belong(torch.cat([batch[worker] for batch in batches], 0))


@pytest.mark.parametrize(("how", "lanes", "shape"), [(0, 0, (16,)), (-1, 0, (16,)), (-1, 2, (2, 8))])
def test_unequal_parts_one_after_the_other(make: Any, how: int, lanes: int, shape: tuple[int, ...]) -> None:
    for batch in make(Sync, 2, lanes, frames_per_batch=[6, 10], total_frames=32, cat_results=how):
        assert batch.shape == shape
        assert batch.names[-1] == "time"
        for part in batch.split([6 // max(1, lanes), 10 // max(1, lanes)], -1):
            assert_frames_belong(part)


def test_unequal_parts_cannot_lie_beside_each_other(make: Any) -> None:
    with pytest.raises(ValueError, match=r"cat_results=0 .* frames_per_batch=\[4, 8\] .* use -1"):
        make(Sync, 2, 2, frames_per_batch=[4, 8], total_frames=24, cat_results=0)


def test_episodes_of_unequal_parts(make: Any) -> None:
    lengths = [3, 7]
    collector = make(Sync, 2, 0, lengths, frames_per_batch=[6, 10], total_frames=160, trajs_per_batch=2)
    found = []
    for batch in collector:
        found += assert_whole_episodes(batch, lambda lane, episode: lengths[episode % 2])
    assert len(found) == len(set(found)) >= 28


def test_async_workers_with_batches_of_their_own_sizes(make: Any) -> None:
    batches = list(make(MultiAsyncCollector, 2, frames_per_batch=[6, 10], total_frames=64))
    own = by_worker(batches)
    assert {batch.shape[0] for batch in batches[:-1]} <= {6, 10}
    for batch in batches[:-2]:
        number = int(batch.get(TRAJ_IDS)[0] >> WORKER_BITS)
        assert batch.shape == ((6, 10)[number],)
    assert sum(part.shape[0] for part in own.values()) == 64


@pytest.mark.parametrize("options", [{}, {"cat_results": 0}, {"frames_per_batch": [10, 14]}], ids=str)
def test_split_trajectories(make: Any, options: dict[str, Any]) -> None:
    batch = next(iter(make(Sync, 2, lengths=4, **{"frames_per_batch": 24, "split_trajs": True, **options})))
    mask, ids = batch.get(MASK), batch.get(TRAJ_IDS)
    assert int(mask.sum()) == 24
    assert batch.shape == ((6, 4) if "frames_per_batch" not in options else (7, 4))
    assert (ids[~mask] == -1).all()
    assert len(ids[:, 0].unique()) == batch.shape[0]
    for row, real in zip(batch, mask, strict=True):
        assert counted(row)[real.numpy(), 2].tolist() == list(range(int(real.sum())))


@pytest.mark.parametrize("kind", [Sync, MultiAsyncCollector])
def test_split_trajectories_of_lanes(make: Any, kind: Any) -> None:
    batch = next(iter(make(kind, 2, 3, lengths=4, frames_per_batch=24, split_trajs=True)))
    assert int(batch.get(MASK).sum()) == 24
    assert batch.shape == ((6, 4))


@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
@pytest.mark.parametrize("form", ["padded", "cat"])
@pytest.mark.parametrize("kind", [Sync, MultiAsyncCollector])
def test_whole_episodes_of_all_workers(make: Any, kind: Any, form: str, debug: bool) -> None:
    lengths = [3, 9, 4]
    collector = make(
        kind, 2, 2, lengths, frames_per_batch=8, total_frames=320, trajs_per_batch=4, traj_format=form, debug=debug
    )
    found = []
    for batch in collector:
        if form == "padded":
            assert batch.shape[0] == 4
            found += assert_whole_episodes(batch, lambda lane, episode: lengths[episode % 3])
        else:
            assert int(batch.get(("next", "done")).sum()) == 4
            assert batch.ndim == 1
            found += [
                tuple(numbers) for numbers in counted(batch)[batch.get(("next", "done"))[:, 0].numpy(), :2].tolist()
            ]
    assert len(found) == len(set(found))
    assert {lane for lane, _ in found} == {0, 1, 2, 3}
    stats = collector.stats()
    delivered = sum(lengths[episode % 3] for _, episode in found)
    assert delivered + stats["dropped_frames"] == stats["frames"] == 320


@pytest.mark.parametrize("kind", [Sync, MultiAsyncCollector])
def test_a_buffer_takes_the_frames_and_none_is_delivered(make: Any, kind: Any) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), shared=True)
    assert list(make(kind, 2, frames_per_batch=10, total_frames=40, replay_buffer=buffer)) == [None] * 4
    assert len(buffer) == 40


def test_workers_whose_envs_idle(make: Any) -> None:
    collector = MultiSyncCollector(
        [lambda: GymEnv(CountingVectorEnv(2, lengths=[3, 4]))] * 2,
        None,
        frames_per_batch=40,
        total_frames=80,
        debug=True,
    )
    batches = list(collector)
    assert sum(int(batch.get(MASK).sum()) for batch in batches) == collector.stats()["frames"] >= 80
    whole = torch.cat(batches, 2)
    for worker in (0, 1):
        assert_frames_belong(whole[worker])


# -- exact budgets ---------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(data=st.data(), workers=st.integers(1, 4), lanes=st.integers(0, 3), is_sync=st.booleans())
def test_all_frames_are_delivered_and_no_more(data: Any, workers: int, lanes: int, is_sync: bool) -> None:
    width = max(1, lanes)
    per_batch = data.draw(st.integers(1, 30) | st.lists(st.integers(1, 12), min_size=workers, max_size=workers))
    total = data.draw(st.integers(1, 90))
    collector: Any = MultiCollector(
        [env(lanes, [3, 5, 1])] * workers,
        sync=is_sync,
        frames_per_batch=per_batch,
        total_frames=total,
        debug=True,
        slots_per_worker=data.draw(st.integers(1, 3)),
    )
    batches = list(collector)
    steps = {collector.frames_per_batch_worker(worker) // width for worker in range(workers)}
    unit = width * workers if is_sync and len(steps) == 1 else width
    wanted = -(-total // unit) * unit
    rows: list[TensorDictBase] = []
    for batch in batches:
        rows += batch.unbind(0) if is_sync else [batch]
    assert sum(row.numel() for row in rows) == collector.stats()["frames"] == wanted
    if isinstance(per_batch, int):
        assert len(batches) == len(collector) == -(-wanted // collector.requested_frames_per_batch)
        assert all(batch.numel() == collector.requested_frames_per_batch for batch in batches[:-1])
    for own in by_worker(rows).values():
        assert_frames_belong(own)
    assert collector.closed


@pytest.mark.parametrize("is_sync", [True, False])
@pytest.mark.parametrize(("workers", "lanes", "per_batch", "total"), [(3, 2, 25, 100), (2, 0, 7, 31), (4, 1, 10, 6)])
def test_all_frames_are_delivered_by_processes(
    make: Any, is_sync: bool, workers: int, lanes: int, per_batch: int, total: int
) -> None:
    kind = Sync if is_sync else MultiAsyncCollector
    collector = make(kind, workers, lanes, frames_per_batch=per_batch, total_frames=total, debug=False)
    unit = max(1, lanes) * (workers if is_sync else 1)
    rows: list[TensorDictBase] = []
    for batch in collector:
        rows += batch.unbind(0) if is_sync else [batch]
    assert sum(row.numel() for row in rows) == -(-total // unit) * unit
    for own in by_worker(rows).values():
        assert_frames_belong(own)


def test_what_is_rounded_is_told(make: Any) -> None:
    with pytest.warns(UserWarning, match=r"frames_per_batch=25 is rounded up to 30, whole steps of 2 lanes"):
        make(Sync, 3, 2, frames_per_batch=25)
    with pytest.warns(UserWarning, match=r"total_frames=25 is rounded up to whole steps of 6 lanes"):
        make(Sync, 3, 2, frames_per_batch=30, total_frames=25)
    with pytest.warns(UserWarning, match=r"total_frames=25 is rounded up to whole steps of 2 lanes"):
        make(MultiAsyncCollector, 3, 2, frames_per_batch=30, total_frames=25)


def test_the_last_sync_batch_is_as_short_as_the_budget_says(make: Any) -> None:
    shapes = [batch.shape for batch in make(Sync, 2, 2, frames_per_batch=16, total_frames=40)]
    assert shapes == [(2, 2, 4), (2, 2, 4), (2, 2, 2)]


# -- order and memory ------------------------------------------------------------------------------------------------


class Slow(CountingEnv):
    """The first worker's env takes its time."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        time.sleep(0.01 if self.first_lane == 0 else 0.0)
        return super()._step(tensordict)


def test_rows_are_in_the_order_of_workers_whoever_is_first(make: Any) -> None:
    with MultiSyncCollector([Slow] * 3, None, frames_per_batch=15, total_frames=45) as collector:
        for batch in collector:
            assert (batch.get("observation")[..., 0] == torch.arange(3)[:, None]).all()


@pytest.mark.parametrize("debug", [True, False], ids=["here", "processes"])
@pytest.mark.parametrize(("how", "lanes"), [("stack", 0), ("stack", 2), (0, 2), (0, 0), (-1, 0)])
def test_a_sync_batch_is_the_memory_that_workers_wrote_to(make: Any, how: Any, lanes: int, debug: bool) -> None:
    if not debug and lanes:
        pytest.skip("the same code as here")
    collector = make(Sync, 2, lanes, frames_per_batch=16, cat_results=how, debug=debug)
    batch = collector.next()
    (arena,) = collector._arenas.values()
    columns = arena._lent[-1].tensors
    for key, value in batch.items(True, True):
        assert value.data_ptr() == columns[key].data_ptr()
        assert value.is_contiguous()


@pytest.mark.parametrize("kind", [Sync, MultiAsyncCollector])
def test_slots_are_used_again(make: Any, kind: Any) -> None:
    collector = make(kind, 2, frames_per_batch=8)
    for _ in range(20):
        collector.next()
    allocated = [arena.allocated for arena in collector._arenas.values()]
    blocks = [len(arena.numbers) for arena in collector._arenas.values()]
    for _ in range(150):
        collector.next()
    assert [arena.allocated for arena in collector._arenas.values()] == allocated
    assert [len(arena.numbers) for arena in collector._arenas.values()] == blocks
    assert max(allocated) <= (2 if kind is Sync else 4)


def test_workers_forget_slots_that_are_gone(make: Any) -> None:
    """A consumer that keeps many batches and lets them go gives the memory back, here and in the workers."""
    collector = make(Sync, 2, frames_per_batch=8, debug=False)
    kept = [collector.next() for _ in range(30)]
    (arena,) = collector._arenas.values()
    assert len(arena.numbers) >= 30
    del kept
    gc.collect()
    for _ in range(30):
        collector.next()
    assert len(arena.numbers) <= 6
    held = collector._ask("env.batch_size")  # the workers still answer
    assert len(held) == 2
    assert all(len(known) <= 6 for known in collector._workers._known.values())


KEPT: dict[str, Callable[[TensorDictBase], Any]] = {
    "the batch": lambda batch: batch,
    "a slice of the batch": lambda batch: batch[..., 1:],
    "one worker": lambda batch: batch[0],
    "one frame": lambda batch: batch[..., -1],
    "selected entries": lambda batch: batch.select(("next", "reward")),
    "one entry": lambda batch: batch.get("observation"),
    "an entry of next": lambda batch: batch.get(("next", "observation")),
    "the ids": lambda batch: batch.get(("collector", "traj_ids")),
    "a slice of an entry": lambda batch: batch.get("observation")[..., 1:, 2],
    "a detached entry": lambda batch: batch.get("observation").detach(),
    "a numpy view": lambda batch: batch.get("observation").numpy(),
    "a memoryview": lambda batch: memoryview(batch.get("observation").numpy()),
    "a reshaped batch": lambda batch: batch.reshape(-1),
    "an unbound row": lambda batch: batch.unbind(-1)[1],
    "a strided view": lambda batch: torch.as_strided(batch.get("observation"), (3,), (1,), 2),
    "an array made by from_dlpack": lambda batch: np.from_dlpack(batch.get("observation")),
}


def held(kept: Any) -> Any:
    if isinstance(kept, TensorDictBase):
        return {key: value.clone() for key, value in kept.items(True, True)}
    return np.asarray(kept).copy()


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return all(torch.equal(first[key], second[key]) for key in first)
    return bool(np.array_equal(first, second))


@settings(max_examples=30, deadline=None)
@given(data=st.data(), is_sync=st.booleans(), how=st.sampled_from(["stack", 0, -1]), lanes=st.integers(0, 2))
def test_nothing_that_is_kept_ever_changes(data: Any, is_sync: bool, how: Any, lanes: int) -> None:
    options = {"cat_results": how} if is_sync else {"slots_per_worker": data.draw(st.integers(1, 3))}
    collector: Any = MultiCollector(
        [env(lanes, [3, 5])] * 2, sync=is_sync, frames_per_batch=8 * max(1, lanes), debug=True, **options
    )
    kept: list[tuple[str, Any, Any]] = []
    for _ in range(data.draw(st.integers(1, 10))):
        batch = collector.next()
        for name in data.draw(st.lists(st.sampled_from(sorted(KEPT)), max_size=2)):
            handle = KEPT[name](batch)
            kept.append((name, handle, held(handle)))
            del handle
        del batch
        for name, handle, copied in kept:
            assert same(held(handle), copied), f"{name} has changed"
        while kept and data.draw(st.booleans()):
            kept.pop(data.draw(st.integers(0, len(kept) - 1)))
    collector.shutdown()


@pytest.mark.parametrize("kind", [Sync, MultiAsyncCollector])
def test_what_is_kept_outlives_processes(make: Any, kind: Any) -> None:
    collector = make(kind, 2, lengths=[3, 5], frames_per_batch=8, total_frames=160, debug=False)
    kept = [
        (name, handle, held(handle)) for batch in collector for name, view in KEPT.items() for handle in [view(batch)]
    ]
    assert collector.closed
    for name, handle, copied in kept:
        assert same(held(handle), copied), f"{name} has changed"


def test_return_same_td(make: Any) -> None:
    for kind in (Sync, MultiAsyncCollector):
        batches, begins = [], []
        for batch in make(kind, 1, lengths=100, frames_per_batch=8, total_frames=24, return_same_td=True):
            batches.append(batch)
            begins.append(int(batch.get("observation").reshape(-1, 3)[0, 2]))
        assert batches[0] is batches[1] is batches[2]
        assert begins == [0, 8, 16]
