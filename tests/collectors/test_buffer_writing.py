"""What a collector writes to its replay buffer: every frame once, where it belongs, and nothing else."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from common import LANE, STEP, assert_same, assert_trajectories, bounded, buffer, net
from counting_layouts import LAYOUTS
from counting_reference import CountingReference
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import WORKER_BITS
from kinds import ALL, ASYNC, MIXED, ONE_ASYNC, Kind, Make, over
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor

from swath.collectors import Collector
from swath.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RateLimiter,
    RateLimitError,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
)
from swath.envs import GymEnv
from swath.keys import DONE, MASK, TRAJ_IDS, TRUNCATED, after
from swath.testing import (
    CountingEnv,
    CountingVectorEnv,
    FaultyError,
    FaultyGymEnv,
    assert_frames_belong,
    assert_whole_in_a_row,
    counted,
)
from swath.testing.counting import length_of

LENGTHS = [3, 4, 1, 7]
OWN_LENGTHS = [[3, 4, 1, 7], [5], [2, 6], [9, 1], [3, 8], [4, 4, 2]]
"""For each lane: so that some lanes wait while others are reset."""


@pytest.fixture
def make(make: Make) -> Make:
    """Seeded collectors."""

    def build(*args: Any, **options: Any) -> Any:
        collector = make(*args, **{"lengths": LENGTHS, **options})
        collector.set_seed(5)
        return collector

    return build


def real(batch: TensorDictBase) -> TensorDictBase:
    """The frames of a batch, flat and without those in which a lane was idle."""
    flat = batch.reshape(-1)
    mask = flat.get(MASK, None)
    return flat if mask is None else flat[mask].exclude(MASK)


def acting(observation: Tensor) -> tuple[Tensor, Tensor]:
    """An action, and a mark that tells that the policy was asked."""
    return observation[..., :2], torch.ones_like(observation[..., :1])


def marker() -> TensorDictModule:
    return TensorDictModule(acting, ["observation"], ["action", "acted"])


# -- every kind -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [0, 3])
@over([*ALL, ONE_ASYNC])
def test_iterating_fills_the_buffer(make: Make, kind: Kind, lanes: int) -> None:
    kept = buffer()
    collector = make(lanes=lanes, replay_buffer=kept, frames_per_batch=24, total_frames=120)
    assert list(collector) == [None] * 5
    assert len(kept) == kept.write_count == collector.stats()["frames"] == 120
    assert_trajectories(kept[:])
    assert len((kept[:][TRAJ_IDS] >> WORKER_BITS).unique()) == max(1, kind.workers)
    assert collector.closed
    assert collector.replay_buffer is kept
    assert kept.is_shared == (kind.workers > 0)
    list(make(lanes=lanes, replay_buffer=kept, frames_per_batch=24, total_frames=48))
    assert len(kept) == 168, "frames that are there already stay"
    assert_trajectories(kept[:])


@over(ALL, needs="newest_weights")
def test_a_batch_is_there_when_it_is_told_of(make: Make) -> None:
    kept = buffer()
    collector = make(replay_buffer=kept)
    for number in range(1, 6):
        assert collector.next() is None
        assert len(kept) == collector.requested_frames_per_batch * number


@over(MIXED)
def test_single_steps(make: Make) -> None:
    kept = buffer()
    list(make(replay_buffer=kept, batches=2, extend_buffer=False))
    assert len(kept) in (20, 40)
    assert_trajectories(kept[:])


@pytest.mark.parametrize("per_write", [None, 2])
@over(MIXED)
def test_complete_episodes_only(make: Make, per_write: int | None) -> None:
    kept = buffer()
    options = {"trajs_per_batch": 2, "trajs_per_write": per_write, "total_frames": 400}
    collector = make(lanes=2, lengths=[3, 7], replay_buffer=kept, **options)
    list(collector)
    stats = collector.stats()
    assert_whole_in_a_row(kept[:], lambda lane, episode: [3, 7][episode % 2])
    assert len(kept) + stats["dropped_frames"] == stats["frames"] == 400


@over([ASYNC])
def test_init_random_frames_are_counted_where_they_are_written(make: Make) -> None:
    kept = buffer()
    list(make(None, net(50.0), replay_buffer=kept, init_random_frames=100, total_frames=400))
    acted = (kept[:]["action"] == 50.0).all(-1).reshape(-1)
    assert not acted[:100].any()
    assert 100 <= int((~acted).sum()) <= 100 + 2 * 2 * 10, "each worker may have had batches under way"


# -- frames ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["flat", "lanes"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_buffer_holds_what_would_be_delivered(make: Make, layout: str, storage: str) -> None:
    env, twin = (LAYOUTS[layout](3, lengths=OWN_LENGTHS) for _ in range(2))
    ndim = 1 if storage == "flat" else len(env.batch_size) + 1
    kept = buffer(ndim=ndim)
    options = {"frames_per_batch": 9 * env.num_lanes, "total_frames": 30 * env.num_lanes}
    wanted = list(make(twin, **options))
    collector = make(env, replay_buffer=kept, **options)
    idles = any(MASK in batch.keys(True) and not batch.get(MASK).all() for batch in wanted)
    if idles and ndim > 1:
        with pytest.raises(ValueError, match="idle"):
            list(collector)
        return
    assert list(collector) == [None] * len(wanted)
    if ndim == 1:
        assert_same(kept[:], torch.cat([real(batch) for batch in wanted]))
    else:
        everything = torch.cat(wanted, -1)
        assert_frames_belong(kept[:])
        assert_same(kept[:], everything.exclude(MASK))
    assert kept.write_count == len(kept) == sum(real(batch).numel() for batch in wanted)
    assert collector.stats()["frames"] == kept.write_count
    assert collector.closed
    assert env.is_closed


STORAGES: dict[str, Callable[[], ReplayBuffer]] = {
    "tensors": buffer,
    "file": lambda: ReplayBuffer(storage=LazyMemmapStorage(5_000)),
    "shared": lambda: buffer(shared=True),
    "list": lambda: ReplayBuffer(storage=ListStorage(5_000)),
}


@pytest.mark.parametrize(
    ("storage", "lanes", "sees"),
    [
        *((storage, lanes, "vector") for storage in STORAGES for lanes in ((), (3,), (2, 2))),
        *(("tensors", (2,), sees) for sees in ("dict", "pixels")),
    ],
    ids=str,
)
def test_any_storage_holds_the_same(make: Make, storage: str, lanes: tuple[int, ...], sees: str) -> None:
    kept = STORAGES[storage]()
    env, twin = (CountingEnv(lanes, LENGTHS, kind=sees) for _ in range(2))
    assert list(make(env, replay_buffer=kept, frames_per_batch=12, total_frames=60)) == [None] * 5
    wanted = torch.cat([real(batch) for batch in make(twin, frames_per_batch=12, total_frames=60)])
    assert_same(kept[:], wanted)
    assert kept.write_count == 60


@pytest.mark.torchrl
@pytest.mark.parametrize("options", [{}, {"trajs_per_batch": 1}, {"extend_buffer": False}], ids=str)
@pytest.mark.parametrize("lanes", [(), (3,)])
def test_a_buffer_of_torchrl(make: Make, lanes: tuple[int, ...], options: dict[str, Any]) -> None:
    torchrl = pytest.importorskip("torchrl.data")
    theirs = torchrl.ReplayBuffer(storage=torchrl.LazyTensorStorage(500), batch_size=16)
    ours = buffer()
    for kept in (theirs, ours):
        sizes = {"frames_per_batch": 15, "total_frames": 60}
        list(make(CountingEnv(lanes, LENGTHS), replay_buffer=kept, **sizes, **options))
    assert theirs.write_count == ours.write_count
    assert_same(theirs[:], ours[:])
    assert theirs.sample().shape == (16,)


def test_a_buffer_needs_only_extend_and_sample(make: Make) -> None:
    class Mine:
        def __init__(self) -> None:
            self.batches: list[TensorDictBase] = []

        def extend(self, batch: TensorDictBase) -> None:
            self.batches.append(batch.clone())

        def sample(self) -> None:
            pass

    mine = Mine()
    list(make(CountingEnv((2,), LENGTHS), replay_buffer=mine, total_frames=30))
    wanted = list(make(CountingEnv((2,), LENGTHS), total_frames=30))
    assert_same(torch.cat(mine.batches), torch.cat([real(batch) for batch in wanted]))


@pytest.mark.parametrize(
    ("total", "lanes", "frames"), [(25, (), 25), (7, (), 7), (40, (), 40), (25, (2,), 26), (1, (3,), 3)]
)
@pytest.mark.parametrize("extend", [True, False])
@pytest.mark.filterwarnings("ignore:total_frames")
def test_total_frames_are_exact(make: Make, total: int, lanes: tuple[int, ...], frames: int, extend: bool) -> None:
    kept = buffer()
    collector = make(CountingEnv(lanes), replay_buffer=kept, total_frames=total, extend_buffer=extend)
    assert len(collector) == len(list(collector)) == -(-frames // collector.requested_frames_per_batch)
    assert kept.write_count == collector.stats()["frames"] == frames
    assert collector.stats()["completed"]
    assert collector.next() is None
    assert kept.write_count == frames


@pytest.mark.parametrize("extend", [True, False])
def test_frames_in_which_a_lane_was_idle_are_never_written(make: Make, extend: bool) -> None:
    for kept in (buffer(), ReplayBuffer(storage=ListStorage(5_000))):
        env = GymEnv(CountingVectorEnv(3, OWN_LENGTHS))
        collector = make(env, replay_buffer=kept, extend_buffer=extend, frames_per_batch=30, total_frames=90)
        list(collector)
        frames = kept[:]
        assert collector.stats()["idle_frames"] > 0
        assert kept.write_count == collector.stats()["frames"] >= 90
        assert (frames.get(TRAJ_IDS) >= 0).all()
        assert MASK not in frames.keys(True)
        for lane in range(3):
            assert_frames_belong(frames[frames["observation"][:, LANE] == lane])


@pytest.mark.parametrize("per_batch", [10, 70])
def test_a_buffer_that_is_too_small_keeps_the_newest(make: Make, per_batch: int) -> None:
    """Even if it is smaller than a batch."""
    kept = buffer(25)
    list(make(CountingEnv(lengths=1000), replay_buffer=kept, frames_per_batch=per_batch, total_frames=70))
    assert kept.write_count == 70
    assert sorted(kept[:]["observation"][:, STEP].int().tolist()) == list(range(45, 70))


def test_what_is_in_the_buffer_does_not_change_with_the_next_batch(make: Make) -> None:
    for kept in (buffer(), ReplayBuffer(storage=ListStorage(5_000))):
        stream = iter(make(replay_buffer=kept))
        next(stream)
        first = kept[:10].clone()
        for _ in range(5):
            next(stream)
        assert_same(kept[:10], first)


def test_all_ways_of_iterating_give_none_and_go_on(make: Make) -> None:
    kept = buffer()
    collector = make(CountingEnv(lengths=1000), replay_buffer=kept, total_frames=40)
    assert collector.next() is None
    for batch in collector:
        assert batch is None
        break
    assert next(iter(collector)) is None
    assert next(collector.iterator()) is None
    assert kept[:]["observation"][:, STEP].int().tolist() == list(range(40))
    assert list(collector) == []


def test_an_error_shuts_down_and_keeps_what_was_written(make: Make) -> None:
    kept = buffer()
    collector = make(FaultyGymEnv(at=25), replay_buffer=kept)
    with pytest.raises(FaultyError):
        list(collector)
    assert collector.closed
    assert kept.write_count == 20


def test_frames_that_do_not_fit_are_refused(make: Make) -> None:
    kept, of_lanes = buffer(), buffer(ndim=2)
    list(make(replay_buffer=kept, total_frames=10))
    list(make(CountingEnv((2,)), replay_buffer=of_lanes, total_frames=10))
    for env, options, error, words in (
        (None, {"max_frames_per_traj": 5}, KeyError, "step_count"),
        (CountingEnv(kind="dict"), {}, KeyError, "count"),
        (CountingEnv(kind="pixels"), {}, ValueError, "shape"),
        (CountingEnv((5,)), {"replay_buffer": of_lanes}, ValueError, "lanes"),
    ):
        with pytest.raises(error, match=words):
            list(make(env, **{"replay_buffer": kept, "total_frames": 10, **options}))
    assert kept.write_count == of_lanes.write_count == 10


@pytest.mark.parametrize(
    ("lanes", "ndim", "options"), [((), 2, {}), ((2,), 3, {}), ((2, 3), 2, {}), ((2,), 2, {"trajs_per_batch": 1})]
)
def test_a_storage_of_other_dimensions_is_refused(lanes: tuple[int, ...], ndim: int, options: dict[str, Any]) -> None:
    """Whole episodes have no place in one with lanes."""
    with pytest.raises(ValueError, match=f"ndim={ndim}.*ndim=1|whole episodes.*use ndim=1"):
        Collector(CountingEnv(lanes), frames_per_batch=12, replay_buffer=buffer(ndim=ndim), **options)


def test_what_the_buffer_does_to_all_that_is_written_is_done(make: Make) -> None:
    class Doubling:
        def __call__(self, batch: TensorDictBase) -> TensorDictBase:
            return batch

        def inv(self, batch: TensorDictBase) -> TensorDictBase:
            return batch.set(after("reward"), batch.get(after("reward")) * 2)

    kept = buffer(transform=Doubling())
    list(make(CountingEnv((2,), 100), replay_buffer=kept, total_frames=10))
    assert kept[:].get(after("reward"))[:5, 0].tolist() == [2, 4, 6, 8, 10]


def test_priorities_that_are_written_count(make: Make) -> None:
    def postproc(batch: TensorDictBase) -> TensorDictBase:
        return batch.set("td_error", (batch["observation"][..., STEP] == 3).float())

    kept = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(100), batch_size=50)
    list(make(CountingEnv(lengths=100), replay_buffer=kept, total_frames=10, postproc=postproc))
    assert (kept.sample()["observation"][:, STEP] == 3).all()


def test_a_rate_limiter_that_nobody_satisfies_is_told_and_not_waited_for(make: Make) -> None:
    kept = buffer(batch_size=4, rate_limiter=RateLimiter(1.0, timeout_s=0.3))
    collector = make(replay_buffer=kept)
    with pytest.raises(RateLimitError, match=r"writing has waited"):
        bounded(lambda: [collector.next() for _ in range(10)])


# -- how much is random ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ndim", [1, 2])
def test_init_random_frames_counts_frames_and_not_rows(make: Make, ndim: int) -> None:
    kept = buffer(ndim=ndim)
    env = CountingEnv((3,))
    list(make(env, marker(), replay_buffer=kept, frames_per_batch=6, total_frames=36, init_random_frames=15))
    acted = kept[:]["acted"]
    assert acted.numel() == 36
    assert int((acted == 0).sum()) == 18
    if ndim == 1:
        assert acted[:, 0].tolist() == [0] * 18 + [1] * 18


def test_init_random_frames_are_those_in_the_buffer_whoever_wrote_them(make: Make) -> None:
    kept = buffer()
    for total, acted in [(10, 0), (10, 10)]:
        list(make(policy=marker(), replay_buffer=kept, total_frames=total, init_random_frames=10))
        assert kept[-10:]["acted"].sum() == acted


def test_init_random_frames_of_single_steps_are_exact(make: Make) -> None:
    kept = buffer()
    list(make(policy=marker(), replay_buffer=kept, extend_buffer=False, total_frames=20, init_random_frames=7))
    assert kept[:]["acted"][:, 0].tolist() == [0] * 7 + [1] * 13


# -- post-processing and hooks --------------------------------------------------------------------------------------


def test_postproc_comes_before_writing(make: Make) -> None:
    def postproc(batch: TensorDictBase) -> TensorDictBase:
        assert batch.shape == (2, 5)
        return batch.set("seen", batch["observation"][..., STEP:] * 2)

    for kept in (buffer(), buffer(ndim=2), ReplayBuffer(storage=ListStorage(100))):
        list(make(CountingEnv((2,), 100), replay_buffer=kept, total_frames=20, postproc=postproc))
        frames = kept[:].reshape(-1)
        assert torch.equal(frames["seen"], frames["observation"][..., STEP:] * 2)
        assert kept.write_count == 20


@pytest.mark.parametrize("lanes", [(), (2,)])
def test_postproc_may_leave_entries_and_frames_out(make: Make, lanes: tuple[int, ...]) -> None:
    def postproc(batch: TensorDictBase) -> TensorDictBase:
        return batch[batch["observation"][..., STEP] == 0].select("observation")

    kept = buffer()
    list(make(CountingEnv(lanes), replay_buffer=kept, total_frames=40, postproc=postproc))
    assert kept.write_count == 8
    assert (kept[:]["observation"][:, STEP] == 0).all()
    assert set(kept[:].keys(True, True)) == {"observation"}


@pytest.mark.parametrize("storage", [buffer, lambda: ReplayBuffer(storage=ListStorage(100))], ids=["tensors", "list"])
def test_postproc_may_leave_all_frames_out(make: Make, storage: Any) -> None:
    batches = iter(range(10))
    kept = storage()

    def postproc(batch: TensorDictBase) -> TensorDictBase:
        return batch[:0] if next(batches) % 2 else batch

    collector = make(CountingEnv(lengths=1000), replay_buffer=kept, total_frames=40, postproc=postproc)
    assert len(list(collector)) == 4
    assert kept[:]["observation"][:, STEP].int().tolist() == [*range(10), *range(20, 30)]


def test_post_collect_hook_may_keep_batches(make: Make) -> None:
    seen: list[TensorDictBase] = []
    copies: list[TensorDictBase] = []
    collector = make(replay_buffer=buffer(), total_frames=50)
    collector.set_post_collect_hook(lambda batch: (seen.append(batch), copies.append(batch.clone())))
    list(collector)
    for batch, copied in zip(seen, copies, strict=True):
        assert_same(batch, copied)


@pytest.mark.parametrize("lanes", [(), (2,), (3,)])
@pytest.mark.parametrize("storage", [buffer, lambda: ReplayBuffer(storage=ListStorage(500))], ids=["tensors", "list"])
def test_split_trajs_writes_the_frames_of_one_trajectory_after_the_other(
    make: Make, lanes: tuple[int, ...], storage: Any
) -> None:
    kept, seen = storage(), list[TensorDictBase]()
    options = {"frames_per_batch": 12, "total_frames": 48, "split_trajs": True}
    collector = make(
        CountingEnv(lanes, LENGTHS), replay_buffer=kept, postproc=lambda batch: seen.append(batch) or batch, **options
    )
    assert len(list(collector)) == 4
    assert all(MASK in batch.keys(True) for batch in seen)
    assert kept.write_count == 48
    assert_same(kept[:], torch.cat([batch[batch.get(MASK)].exclude(MASK) for batch in seen]))


# -- whole episodes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("at_a_time", [None, 1, 3])
def test_whole_episodes_in_the_order_in_which_they_end(make: Make, lanes: int, at_a_time: int | None) -> None:
    lengths = [3, 9, 1, 4]
    kept = buffer()
    env = CountingEnv((lanes,), lengths)
    options = {"trajs_per_batch": 2, "trajs_per_write": at_a_time, "frames_per_batch": 8 * lanes}
    collector = make(env, replay_buffer=kept, total_frames=100 * lanes, **options)
    assert len(list(collector)) == 13
    frames = kept[:]
    assert frames.ndim == 1
    assert MASK not in frames.keys(True)
    found = assert_whole_in_a_row(frames, lambda lane, episode: lengths[episode % 4])
    reference = CountingReference(lanes, lengths)
    reference.reset()  # as seeding does
    for steps in [8] * 12 + [4]:
        reference.collect(steps)
    ended = sorted((len(e), e[0].lane, e[0].episode) for e in reference.complete)
    assert sorted((lengths[episode % 4], lane, episode) for lane, episode in found) == ended
    for lane in range(lanes):
        mine = [episode for where, episode in found if where == lane]
        assert mine == sorted(mine)
    stats = collector.stats()
    assert stats["frames"] == 100 * lanes
    assert stats["dropped_frames"] == stats["frames"] - kept.write_count
    assert stats["pending_frames"] == 0


def test_episodes_are_written_as_soon_as_they_are_complete(make: Make) -> None:
    kept = buffer()
    stream = iter(make(CountingEnv(lengths=[3, 12]), replay_buffer=kept, trajs_per_batch=2, frames_per_batch=5))
    written = []
    for _ in range(6):
        assert next(stream) is None
        written.append(kept.write_count)
    assert written == [0, 0, 15, 15, 15, 30]


@pytest.mark.parametrize("storage", STORAGES)
def test_whole_episodes_in_any_storage(make: Make, storage: str) -> None:
    """Also of lanes that idle."""
    for env in (CountingEnv((3,), OWN_LENGTHS), GymEnv(CountingVectorEnv(3, OWN_LENGTHS))):
        kept = STORAGES[storage]()
        collector = make(env, replay_buffer=kept, trajs_per_batch=3, frames_per_batch=30, total_frames=90)
        list(collector)
        assert len(assert_whole_in_a_row(kept[:], lambda lane, episode: length_of(OWN_LENGTHS, lane, episode))) > 6
        stats = collector.stats()
        assert stats["frames"] - stats["dropped_frames"] == kept.write_count


def test_postproc_gets_whole_episodes_and_may_shorten_them(make: Make) -> None:
    shapes: list[Any] = []

    def every_other(batch: TensorDictBase) -> TensorDictBase:
        shapes.append(tuple(batch.shape))
        return batch[::2]

    kept = buffer(sampler=SliceSampler(slice_len=1), batch_size=20)
    options = {"trajs_per_batch": 1, "trajs_per_write": 2, "total_frames": 20}
    list(make(CountingEnv((2,), 5), replay_buffer=kept, postproc=every_other, **options))
    assert shapes == [(10,), (10,)]
    assert kept[:]["observation"][:, STEP].int().tolist() == [0, 2, 4, 1, 3] * 2
    assert kept.sample().shape == (20,)


def test_a_reset_gives_up_unfinished_episodes(make: Make) -> None:
    kept = buffer()
    collector = make(CountingEnv(lengths=7), replay_buffer=kept, trajs_per_batch=1, total_frames=20)
    collector.next()
    collector.reset()
    collector.next()
    collector.next()
    assert_whole_in_a_row(kept[:], lambda lane, episode: 7)
    assert kept.write_count == 14
    assert collector.stats()["dropped_frames"] == 6


# -- step by step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ndim", [1, 2])
def test_single_steps_are_the_same_frames_in_another_order(make: Make, ndim: int) -> None:
    kept = buffer(ndim=ndim)
    list(
        make(CountingEnv((3,), LENGTHS), replay_buffer=kept, extend_buffer=False, frames_per_batch=12, total_frames=60)
    )
    wanted = torch.cat(list(make(CountingEnv((3,), LENGTHS), frames_per_batch=12, total_frames=60)), -1)
    observations = kept[:]["observation"]
    if ndim == 1:  # lane by lane within each step
        observations = observations.view(20, 3, 3).transpose(0, 1)
    assert torch.equal(observations, wanted["observation"])


def test_single_steps_are_counted_as_batches_of_the_size_asked_for(make: Make) -> None:
    collector = make(replay_buffer=buffer(), extend_buffer=False, total_frames=30)
    assert len(list(collector)) == 3
    assert collector.stats()["batches"] == 3


def test_single_steps_keep_what_is_per_batch_per_batch(make: Make) -> None:
    """Resets at each batch and hooks before it do not come with each step."""
    calls: list[int] = []
    kept = buffer()
    collector = make(
        CountingEnv(lengths=100),
        replay_buffer=kept,
        extend_buffer=False,
        total_frames=30,
        reset_at_each_iter=True,
        pre_collect_hook=lambda: calls.append(kept.write_count),
    )
    list(collector)
    assert kept[:]["observation"][:, STEP].int().tolist() == [*range(10)] * 3
    assert calls == [0, 10, 20]


def test_single_steps_ask_the_interruptor(make: Make) -> None:
    class Stop:
        def collection_stopped(self) -> bool:
            return kept.write_count % 4 == 3

    kept = buffer()
    stream = iter(make(replay_buffer=kept, extend_buffer=False, interruptor=Stop()))
    next(stream)
    assert kept.write_count == 4


def test_waiting_is_the_consumers_time_only(make: Make) -> None:
    for extend in (True, False):
        collector = make(replay_buffer=buffer(), extend_buffer=extend, frames_per_batch=100, total_frames=300)
        begun = time.perf_counter()
        list(collector)
        assert collector.stats()["time/waiting"] < 0.5 * (time.perf_counter() - begun)


# -- slices ---------------------------------------------------------------------------------------------------------


def assert_slices_are_whole(batch: TensorDictBase, lengths: Callable[[int, int], int] | None = None) -> None:
    """Each slice is of one env and one episode, with consecutive steps; none goes on behind an end."""
    last = batch.get(after(TRUNCATED)).numpy()[:, 0]
    numbers = counted(batch)
    inside = ~last[:-1]
    np.testing.assert_array_equal(numbers[1:][inside], numbers[:-1][inside] + np.array([0, 0, 1]))
    ids = batch.get(TRAJ_IDS, None)
    if ids is not None:
        assert torch.equal(ids[1:][inside], ids[:-1][inside])
    if lengths is not None:
        ended = np.array([step + 1 == lengths(lane, episode) for lane, episode, step in numbers])
        assert (last | ~ended).all(), "a slice goes on behind the end of an episode"


BETWEEN: dict[str, Callable[[Collector], Any]] = {
    "": lambda collector: None,
    "a rollout": lambda collector: collector.rollout(),
    "a reset": lambda collector: collector.reset(),
    "a state": lambda collector: collector.load_state_dict(collector.state_dict()),
    "steps of others": lambda collector: collector.env.rollout(3),
}
"""What may come between two batches, and leaves no gap in a slice."""


@pytest.mark.filterwarnings("ignore:.*was used elsewhere")
@settings(max_examples=60, deadline=None)
@given(
    lanes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    ndim=st.sampled_from([1, 2]),
    steps=st.integers(1, 12),
    lengths=st.lists(st.integers(1, 15), min_size=1, max_size=4),
    capacity=st.integers(10, 300),
    turns=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(sorted(BETWEEN))), min_size=1, max_size=25),
    slice_len=st.integers(1, 6),
    ids=st.booleans(),
    extend=st.booleans(),
)
def test_slices_of_many_lanes_and_collectors_are_whole(
    lanes: list[int],
    ndim: int,
    steps: int,
    lengths: list[int],
    capacity: int,
    turns: list[tuple[int, str]],
    slice_len: int,
    ids: bool,
    extend: bool,
) -> None:
    if ndim == 2:
        lanes = [lanes[0]] * len(lanes)
    kept = buffer(capacity, ndim, sampler=SliceSampler(slice_len=slice_len, strict_length=False))
    collectors = []
    for number, count in enumerate(lanes):
        env = CountingEnv((count,), lengths)
        env.first_lane = 100 * number
        options = {"frames_per_batch": steps * count, "track_traj_ids": ids, "extend_buffer": extend}
        collectors.append(Collector(env, replay_buffer=kept, **options))
    for turn, between in turns:
        collector = collectors[turn % len(collectors)]
        collector.next()
        BETWEEN[between](collector)
        batch = kept.sample(8 * slice_len)
        assert_slices_are_whole(batch, lambda lane, episode: length_of(lengths, lane, episode))
    for collector in collectors:
        collector.shutdown()


@pytest.mark.parametrize(("lanes", "ndim"), [((), 1), ((1,), 1), ((3,), 2), ((2, 2), 3)])
def test_slices_go_on_over_batches_where_frames_lie_in_order(make: Make, lanes: tuple[int, ...], ndim: int) -> None:
    """The last frame of each is marked as done."""
    kept = buffer(ndim=ndim, sampler=SliceSampler(slice_len=50))
    list(make(CountingEnv(lanes, 1000), replay_buffer=kept, frames_per_batch=12, total_frames=240))
    batch = kept.sample(500)
    assert_slices_are_whole(batch)
    for ending in (TRUNCATED, DONE):
        assert batch.get(after(ending))[:, 0].nonzero()[:, 0].tolist() == list(range(49, 500, 50))


def test_slices_of_flattened_lanes_are_as_long_as_a_batch_at_most(make: Make) -> None:
    kept = buffer(sampler=SliceSampler(slice_len=4))
    list(make(CountingEnv((3,), 1000), replay_buffer=kept, frames_per_batch=12, total_frames=48))
    batch = kept.sample(400)
    assert (batch["observation"][::4, STEP] % 4 == 0).all()
    kept.set_sampler(SliceSampler(slice_len=5))
    with pytest.raises(RuntimeError, match="no trajectory as long as a slice"):
        kept.sample(10)


@pytest.mark.parametrize(
    ("storage", "options"),
    [
        ("tensors", {}),
        ("list", {}),
        ("tensors", {"postproc": lambda batch: batch.reshape(-1)}),
        ("tensors", {"split_trajs": True}),
    ],
    ids=["tensors", "list", "another shape", "split"],
)
def test_slices_of_two_collectors_that_give_the_same_ids(make: Make, storage: str, options: dict[str, Any]) -> None:
    kept = STORAGES[storage]()
    kept.set_sampler(SliceSampler(slice_len=3))
    collectors = []
    for first in (0, 100):
        env = CountingEnv((1,) if options else (), lengths=1000)
        env.first_lane = first
        collectors.append(make(env, replay_buffer=kept, **options))
    for turn in (0, 1, 1, 0, 0, 0, 1):
        collectors[turn].next()
    for _ in range(5):
        assert_slices_are_whole(kept.sample(150))


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize(
    ("env", "options", "lengths"),
    [
        (lambda: CountingEnv(lengths=1000), {"reset_at_each_iter": True}, 1000),
        (lambda: GymEnv(CountingVectorEnv(3, OWN_LENGTHS)), {"frames_per_batch": 30}, OWN_LENGTHS),
        (lambda: CountingEnv((3,), [2, 5, 9]), {"trajs_per_batch": 1, "frames_per_batch": 30}, [2, 5, 9]),
    ],
    ids=["each batch begins anew", "idling lanes", "whole episodes"],
)
def test_slices_are_whole_however_frames_came(make: Make, env: Any, options: Any, lengths: Any, ids: bool) -> None:
    kept = buffer(200, sampler=SliceSampler(slice_len=3))
    ids = ids or "trajs_per_batch" in options  # which needs them
    collector = make(env(), replay_buffer=kept, track_traj_ids=ids, **options)
    for _ in range(25):
        collector.next()
        assert_slices_are_whole(kept.sample(60), lambda lane, episode: length_of(lengths, lane, episode))


@over(MIXED)
def test_what_is_in_the_buffer_counts_whatever_is_given_up(make: Make) -> None:
    """A new seed makes void what was collected ahead, but not what was written."""
    collector = make(replay_buffer=buffer(), batches=20)
    for number, _ in enumerate(collector):
        if number % 3 == 0 and number < 10:
            collector.set_seed(number)
    stats = collector.stats()
    assert stats["frames"] == len(collector.replay_buffer) == collector.total_frames
    assert stats["dropped_frames"] == 0
