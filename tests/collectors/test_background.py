"""Collecting beside the trainer: starting, resting, stopping, failing, and keeping out of its way."""

import contextlib
import gc
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from common import (
    STEP,
    Pair,
    StopAfter,
    actor,
    assert_trajectories,
    bounded,
    buffer,
    net,
    saved,
    sizes_written,
    until,
)
from inside import PATIENCE, SWITCH_S, WORKER_BITS, resting, steps_made
from kinds import ASYNC, FREE, SINGLE, SPREAD, Kind, Make, over
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from swath.collectors import Collector, PolicyVersion
from swath.collectors.pausing import Pause
from swath.data import PrioritizedSampler, RateLimiter, SliceSampler
from swath.errors import ClosedError, NotANumberWarning
from swath.keys import MASK, TRAJ_IDS, TRUNCATED, after
from swath.modules import ExplorationType, exploration_type, set_exploration_type
from swath.testing import (
    CountingEnv,
    CountingGymEnv,
    FaultyError,
    FaultyGymEnv,
    assert_frames_belong,
    assert_whole_in_a_row,
    counted,
)

pytestmark = pytest.mark.timeout(60)
NO_END = 10_000_000
"""The length of an episode that does not end."""


def threads() -> list[threading.Thread]:
    """Those in which collectors run."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("swath-")]


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    interval, before = sys.getswitchinterval(), set(threads())
    yield
    until(lambda: set(threads()) <= before)
    assert sys.getswitchinterval() == interval


@pytest.fixture
def make(make: Make) -> Make:
    """Collectors with buffers and long episodes, by 10 steps."""
    return lambda *args, **options: make(*args, **{"lengths": NO_END, "replay_buffer": buffer(100_000), **options})


@pytest.fixture
def run(make: Make) -> Make:
    """Makes collectors that collect in the background already."""

    def begin(*args: Any, **options: Any) -> Any:
        collector = make(*args, **options)
        collector.start()
        return collector

    return begin


def kept(collector: Any) -> Any:
    return collector.replay_buffer


def finished(collector: Any) -> Any:
    """Wait until all is collected."""
    until(lambda: not collector.is_running())
    return collector


def grow(collector: Any, frames: int = 50) -> None:
    """Until so many more frames are in the buffer."""
    wanted = kept(collector).write_count + frames
    until(lambda: kept(collector).write_count >= wanted or not collector.is_running())


def newest(collector: Collector) -> TensorDictBase:
    """The last frame that was written."""
    with collector.pause():
        return kept(collector)[-1]


class GatedEnv(CountingGymEnv):
    """Waits in every step until its gate is open."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"lengths": 1_000_000, **options})
        self.gate, self.entered = threading.Event(), threading.Event()

    def step(self, action: Any) -> Any:
        self.entered.set()
        assert self.gate.wait(30)
        return super().step(action)


@pytest.fixture
def waiting(run: Make) -> Callable[..., tuple[Any, GatedEnv]]:
    """Makes collectors that run, and are in a step that does not end; with the env in which they wait."""

    def begin(**options: Any) -> tuple[Any, GatedEnv]:
        env = GatedEnv()
        collector = run(env, **options)
        assert env.entered.wait(20)
        return collector, env

    return begin


# -- starting -------------------------------------------------------------------------------------------------------


@over(FREE)
def test_the_buffer_grows_by_itself(make: Make, kind: Kind) -> None:
    collector = make()
    assert not collector.is_running()
    collector.start()
    assert collector.is_running()
    before = threads()
    collector.start()  # again, which changes nothing
    assert threads() == before
    assert len(kept(collector).sample(8)) == 8  # waits also for the first frame
    grow(collector, 300)
    collector.async_shutdown()
    assert not collector.is_running()
    frames = kept(collector)[:]
    assert_trajectories(frames)
    assert collector.stats()["frames"] == kept(collector).write_count == len(frames)
    assert len((frames[TRAJ_IDS] >> WORKER_BITS).unique()) == max(1, kind.workers)
    assert kind.workers or (collector.env.is_closed and len(before) == 1)


@pytest.mark.parametrize("options", [{"frames_per_batch": 1}, {"extend_buffer": False}, {"frames_per_batch": 100_000}])
def test_what_was_begun_is_written_when_it_stops(run: Make, options: dict[str, Any]) -> None:
    collector = run(**options)
    until(lambda: steps_made(collector.env) > 30)
    collector.async_shutdown()
    assert kept(collector)[:]["observation"][:, STEP].int().tolist() == list(range(steps_made(collector.env)))


@over(FREE)
def test_start_goes_on_where_iterating_ended(make: Make) -> None:
    collector = make(total_frames=200)
    collector.next()
    next(iter(collector))
    collector.start()
    until(lambda: not collector.is_running())
    assert len(kept(collector)) == collector.stats()["frames"] == 200
    assert_trajectories(kept(collector)[:])


@over(FREE)
def test_start_after_the_end_is_refused_and_pause_does_nothing(make: Make, run: Make) -> None:
    ended = finished(run(total_frames=20))
    with ended.pause():
        pass
    closed = make()
    closed.shutdown()
    for collector in (closed, ended):
        with pytest.raises(ClosedError):
            collector.start()


BUDGETS: list[dict[str, Any]] = [
    {"lanes": 3},
    {"extend_buffer": False},
    {"frames_per_batch": 7},
    {"frames_per_batch": 500},
]
OF_THREE_WORKERS: list[dict[str, Any]] = [
    {"workers": 3, "lanes": 2, "total_frames": 10, "frames_per_batch": 60},
    {"workers": 3, "total_frames": 1, "frames_per_batch": 1},
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((SINGLE, options) for options in BUDGETS),
        *((kind, options) for kind in SPREAD for options in (*BUDGETS[:2], *OF_THREE_WORKERS)),
    ],
    ids=str,
)
def test_total_frames_are_exact_and_the_end(run: Make, kind: Kind, options: dict[str, Any]) -> None:
    total = options.get("total_frames", 123)
    collector = finished(run(**{"total_frames": total, **options}))
    assert kept(collector).write_count == collector.stats()["frames"] == total
    assert collector.stats()["completed"]
    assert_trajectories(kept(collector)[:])
    if kind.workers:
        collector.async_shutdown()
    assert collector.closed
    assert list(collector) == []


def test_total_frames_are_exact_however_often_it_rests(run: Make) -> None:
    collector = run(total_frames=1003, frames_per_batch=50)
    while collector.is_running():
        with collector.pause():
            assert collector.stats()["frames"] == kept(collector).write_count
    assert kept(collector).write_count == 1003
    assert_frames_belong(kept(collector)[:])


def test_total_frames_that_are_collected_already_are_not_exceeded(make: Make) -> None:
    collector = make(total_frames=20)
    collector.rollout()
    collector.rollout()
    collector.start()
    until(lambda: not collector.is_running())
    assert kept(collector).write_count == 0
    assert collector.stats()["frames"] == 20


@over(FREE)
def test_whole_episodes_only(run: Make) -> None:
    collector = finished(run(lanes=2, lengths=[3, 4, 7], trajs_per_batch=1, trajs_per_write=3, total_frames=500))
    frames = kept(collector)[:]
    assert MASK not in frames.keys(True)
    assert_whole_in_a_row(frames, lambda lane, episode: [3, 4, 7][episode % 3])
    stats = collector.stats()
    assert stats["frames"] == 500 == kept(collector).write_count + stats["dropped_frames"]


def test_hooks_may_be_set_while_it_runs(run: Make) -> None:
    seen: list[Any] = []
    collector = run()
    grow(collector)
    collector.set_post_collect_hook(lambda batch: seen.append(batch.shape))
    until(lambda: len(seen) > 3)
    assert seen[0] == (10,)


def test_the_users_interruptor_still_counts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = make(interruptor=StopAfter(7), frames_per_batch=1000)
    sizes = sizes_written(kept(collector), monkeypatch)
    collector.start()
    until(lambda: len(sizes) > 5)
    collector.shutdown()
    assert set(sizes[:-1]) == {7}


def test_two_collectors_into_one_buffer(make: Make) -> None:
    shared = buffer(2000, sampler=SliceSampler(slice_len=4), batch_size=64)
    collectors = []
    for first in (0, 100):
        env = CountingEnv((2,), [7, 30, 100])
        env.first_lane = first
        collectors.append(make(env, replay_buffer=shared, frames_per_batch=40))
    for collector in collectors:
        collector.start()
    lanes: set[float] = set()
    deadline = time.monotonic() + 20
    while len(lanes) < 4 or shared.write_count < 6000:
        assert time.monotonic() < deadline
        batch = shared.sample()
        inside = ~batch.get(after(TRUNCATED)).numpy()[:-1, 0]
        numbers = counted(batch)
        np.testing.assert_array_equal(numbers[1:][inside], numbers[:-1][inside] + np.array([0, 0, 1]))
        lanes |= set(numbers[:, 0].tolist())
    for collector in collectors:
        collector.shutdown()
    assert sum(collector.stats()["frames"] for collector in collectors) == shared.write_count


# -- resting --------------------------------------------------------------------------------------------------------


def assert_frozen(collector: Any) -> None:
    before = kept(collector).write_count, collector.stats()["frames"]
    time.sleep(0.03)  # nothing must happen, and nothing can be waited for
    assert (kept(collector).write_count, collector.stats()["frames"]) == before


@over(FREE)
def test_pause_freezes_and_goes_on(run: Make) -> None:
    collector = run(None, net(1.0))
    for _ in range(3):
        grow(collector)
        with collector.pause():
            assert_frozen(collector)
            assert collector.is_running()
    with collector.pause():
        collector.update_policy_weights_(net(2.0))
        assert collector.getattr_env("num_lanes") == 1
    grow(collector, 100)
    collector.shutdown()
    frames = kept(collector)[:]
    assert_trajectories(frames)
    assert set(frames["action"].unique().tolist()) == {1.0, 2.0}


@over(FREE)
def test_pause_without_with_says_so(run: Make) -> None:
    collector = run()
    with pytest.warns(UserWarning, match=r"with collector\.pause\(\):"):
        collector.pause()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resting = collector.pause()
        with resting:
            pass
        del resting


def test_a_pause_that_is_interrupted_before_it_begins_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begun = Pause.__new__(Pause)
        begun.__del__()


@over(FREE)
def test_pause_inside_pause(run: Make) -> None:
    """It ends with an error inside, too."""
    collector = run()
    grow(collector)
    with collector.pause():
        with collector.pause():
            assert_frozen(collector)
        assert_frozen(collector)
        collector.state_dict()
        assert_frozen(collector)
    grow(collector)
    with pytest.raises(ZeroDivisionError), collector.pause():
        raise ZeroDivisionError
    grow(collector)


def test_pauses_of_several_threads_overlap(run: Make) -> None:
    collector = run()
    grow(collector)
    leave, inside = threading.Event(), threading.Event()

    def other() -> None:
        with collector.pause():
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(20)
    with collector.pause():
        assert_frozen(collector)
    assert_frozen(collector)  # the other still wants it
    leave.set()
    thread.join(20)
    grow(collector)


def test_pause_waits_for_a_long_step_no_longer_than_told(waiting: Any) -> None:
    collector, env = waiting()
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="not come to rest"), resting(collector, 0.2):
        pass
    assert time.monotonic() - begun < 5
    env.gate.set()
    grow(collector)


def test_pause_of_a_collector_that_fails_meanwhile(waiting: Any) -> None:
    collector, env = waiting(post_collect_hook=lambda batch: 1 / 0)
    threading.Timer(0.05, env.gate.set).start()
    with collector.pause():
        pass
    with pytest.raises(ZeroDivisionError):
        collector.is_running()


def test_hooks_may_ask_everything_of_their_own_collector(make: Make) -> None:
    states: list[Any] = []

    def hook(batch: TensorDictBase) -> None:
        with collector.pause():
            states.append(collector.state_dict()["frames"])

    collector = make(post_collect_hook=hook, total_frames=50)
    collector.start()
    finished(collector)
    assert states == [10, 20, 30, 40, 50]


def test_a_hook_may_shut_its_collector_down(make: Make) -> None:
    collector = make(post_collect_hook=lambda batch: collector.shutdown() if kept(collector).write_count > 50 else None)
    collector.start()
    finished(collector)
    assert collector.closed
    until(lambda: collector.env.is_closed)  # the hook's thread is at it
    until(lambda: kept(collector).write_count == 70)  # what it had collected is written


# -- iterating ------------------------------------------------------------------------------------------------------

USES: dict[str, Callable[[Collector], Any]] = {
    "next": lambda collector: collector.next(),
    "for": lambda collector: next(iter(collector)),
    "iterator": lambda collector: next(collector.iterator()),
    "rollout": lambda collector: collector.rollout(),
}


@pytest.mark.parametrize(
    ("kind", "use"),
    [*((SINGLE, use) for use in USES), *((kind, use) for kind in SPREAD for use in ("next", "rollout"))],
    ids=str,
)
def test_iterating_while_it_runs_is_refused(run: Make, use: str) -> None:
    collector = run()
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"pause|sample"):
            USES[use](collector)
    with collector.pause():
        pass
    with pytest.raises(RuntimeError, match=r"pause|sample"):
        USES[use](collector)
    grow(collector)
    collector.shutdown()
    assert_trajectories(kept(collector)[:])


@pytest.mark.parametrize("use", ["next", "for"])
def test_an_iterator_of_before_is_refused_too(make: Make, use: str) -> None:
    collector = make()
    stream = iter(collector)
    next(stream)
    collector.next()
    collector.start()
    with pytest.raises(RuntimeError, match="pause"):
        next(stream) if use == "for" else collector.next()


@pytest.mark.parametrize("use", USES)
def test_iterating_inside_pause_gives_whole_batches(run: Make, use: str) -> None:
    collector = run()
    grow(collector)
    with collector.pause():
        before = kept(collector).write_count
        batch = USES[use](collector)
        if use == "rollout":
            assert batch.shape == (10,)
            assert kept(collector).write_count == before
        else:
            assert kept(collector).write_count == before + 10
        assert collector.stats()["frames"] >= before + 10
    grow(collector)
    collector.shutdown()
    if use != "rollout":
        assert_frames_belong(kept(collector)[:])


def test_iterating_to_the_end_inside_pause(waiting: Any) -> None:
    collector, env = waiting(total_frames=100)
    threading.Timer(0.05, env.gate.set).start()
    with collector.pause():
        for _ in collector:
            pass
    assert not collector.is_running()
    assert kept(collector).write_count == 100
    assert collector.env.is_closed


# -- everything else while it runs ----------------------------------------------------------------------------------


@over(FREE)
def test_state_dict_is_of_one_moment(make: Make, run: Make) -> None:
    collector = run(None, net(1.0), lengths=[3, 50, 700])
    for _ in range(5):
        grow(collector, 20)
        assert saved(collector.state_dict())["frames"] >= 20
        assert collector.is_running()
        with collector.pause():
            state = collector.state_dict()
            assert state["frames"] == kept(collector).write_count == collector.stats()["frames"]
    grow(collector)
    collector.async_shutdown()
    twin = make(None, net(0.0), total_frames=state["frames"] + 50)
    twin.load_state_dict(state)
    twin.start()
    until(lambda: not twin.is_running())
    assert kept(twin).write_count == 50
    assert twin.stats()["frames"] == state["frames"] + 50
    assert (kept(twin)[:]["action"] == 1.0).all()
    old, new = (set(kept(one)[:].get(TRAJ_IDS).unique().tolist()) for one in (collector, twin))
    assert not {id for id in old if id < state["traj_pool"]} & new, "an id of the state is used again"


@over(FREE)
def test_control_while_it_runs(run: Make, kind: Kind) -> None:
    collector = run(None, actor(), lengths=[300, 50, 700])
    calls: list[Callable[[], Any]] = [
        collector.reset,
        lambda: collector.set_seed(3),
        collector.state_dict,
        collector.stats,
        collector.update_policy_weights_,
        lambda: collector.get_distant_attr("env.batch_size"),
    ]
    if not kind.workers:
        calls.append(lambda: collector.load_state_dict(collector.state_dict()))
    for number in range(7 if kind.workers else 40):
        grow(collector, 7)
        calls[number % len(calls)]()
    grow(collector)
    assert collector.is_running()
    collector.async_shutdown()
    assert_trajectories(kept(collector)[:])


def test_set_seed_while_it_runs_decides_what_follows(make: Make) -> None:
    policy = actor()
    for weight in policy.parameters():  # the counting env's observations tell how many episodes there were
        weight.data.zero_()

    def following(runs: bool) -> Tensor:
        collector = make(CountingEnv(lengths=30), policy)
        if runs:
            collector.start()
            grow(collector, 25)
        with collector.pause() if runs else contextlib.nullcontext():
            collector.set_seed(3)
            begin = kept(collector).write_count
        if not runs:
            for _ in range(10):
                collector.next()
        until(lambda: kept(collector).write_count >= begin + 100)
        collector.shutdown()
        return kept(collector)[begin : begin + 100]["action"]

    wanted = following(False)
    assert torch.equal(following(True), wanted)
    assert torch.equal(following(True), wanted)


def test_stats_may_be_asked_at_any_moment(run: Make) -> None:
    collector = run(CountingEnv((8,), [1, 2, 3]), trajs_per_batch=1, trajs_per_write=20, frames_per_batch=80)
    deadline, before = time.monotonic() + 1.0, 0
    while time.monotonic() < deadline:
        stats = collector.stats()
        assert stats["frames"] >= before
        assert stats["pending_frames"] >= 0
        before = stats["frames"]
    assert before > 0


# -- stopping -------------------------------------------------------------------------------------------------------


@over(FREE)
def test_shutdown_twice_and_in_a_with_block(make: Make, run: Make) -> None:
    with run() as collector:
        grow(collector)
    assert not threads()
    assert collector.closed
    for stop in (collector.async_shutdown, collector.shutdown, collector.async_shutdown):
        stop()
    assert not collector.is_running()
    assert kept(collector).sample(4).shape == (4,)
    other = make()
    other.async_shutdown()  # which was not started
    assert other.closed


@over(FREE)
def test_async_shutdown_stops_at_once(run: Make) -> None:
    class Slow(CountingEnv):
        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            time.sleep(0.005)
            return super()._step(tensordict)

    collector = run(Slow, frames_per_batch=10_000)
    begin = time.monotonic()
    collector.async_shutdown()
    assert time.monotonic() - begin < 5.0
    assert not collector.is_running()


def test_the_env_may_be_left_open(run: Make) -> None:
    env = CountingEnv()
    collector = run(env)
    grow(collector)
    collector.async_shutdown(close_env=False)
    assert not env.is_closed
    assert env.rollout(3).shape == (3,)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_shutdown_while_it_rests(run: Make, elsewhere: bool) -> None:
    collector = run()
    grow(collector)
    with collector.pause():
        bounded(collector.shutdown) if elsewhere else collector.shutdown()
        assert not collector.is_running()
    assert collector.closed
    assert not threads()


def test_shutdown_during_a_long_step_is_bounded_and_told(waiting: Any) -> None:
    collector, env = waiting()
    begun = time.monotonic()
    with pytest.warns(UserWarning, match="did not end in time"):
        collector.async_shutdown(timeout=0.2)
    assert time.monotonic() - begun < 3
    assert collector.closed
    assert not env.is_closed, "it is still being stepped"
    env.gate.set()
    until(lambda: not threads())
    collector.shutdown()
    assert env.is_closed


@pytest.mark.parametrize("rests", [False, True])
def test_a_forgotten_collector_is_freed_and_its_thread_ends(rests: bool) -> None:
    collector = Collector(CountingEnv(), actor(), frames_per_batch=10, replay_buffer=buffer())
    collector.start()
    grow(collector)
    ref = weakref.ref(collector)
    gc.collect()
    gc.disable()
    try:
        with collector.pause() if rests else contextlib.nullcontext():
            del collector
        until(lambda: ref() is None)
        until(lambda: not threads())
    finally:
        gc.enable()


def test_fifty_lives_leave_nothing() -> None:
    process, shared = psutil.Process(), buffer(1000, batch_size=8)

    def live() -> None:
        collector = Collector(CountingEnv((2,)), actor(), frames_per_batch=10, replay_buffer=shared)
        collector.start()
        shared.sample()
        collector.shutdown()

    for _ in range(5):
        live()
    gc.collect()
    before = (threading.active_count(), process.num_fds(), process.memory_info().rss)
    for _ in range(50):
        live()
    gc.collect()
    assert threading.active_count() == before[0]
    assert process.num_fds() == before[1]
    assert process.memory_info().rss - before[2] < 20e6


# -- failing --------------------------------------------------------------------------------------------------------


class FailingPolicy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, observation: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 25:
            raise ZeroDivisionError("as it was told")
        return observation[..., :2]


def failing(where: str) -> tuple[Any, dict[str, Any], type[BaseException], str]:
    """An env, options, and the error to come with the name of the function in which it is raised."""
    count = iter(range(1000))

    def fail_later(*args: Any) -> Any:
        if next(count) == 2:
            raise ZeroDivisionError("as it was told")
        return args[0] if args else None

    def other_shape(batch: TensorDictBase) -> TensorDictBase:
        return batch.set("action", batch["action"][..., :1]) if next(count) == 2 else batch

    match where:
        case "env.step":
            return FaultyGymEnv(at=25, lengths=7), {}, FaultyError, "step"
        case "env.reset":
            return FaultyGymEnv(at=4, where="reset", lengths=7), {}, FaultyError, "reset"
        case "policy":
            policy = TensorDictModule(FailingPolicy(), ["observation"], ["action"])
            return CountingEnv(), {"policy": policy}, ZeroDivisionError, "forward"
        case "write":
            return CountingEnv(), {"postproc": other_shape}, ValueError, "check"
    return CountingEnv(), {where: fail_later}, ZeroDivisionError, "fail_later"


PLACES = ["env.step", "env.reset", "policy", "pre_collect_hook", "post_collect_hook", "postproc", "write"]
MESSAGES = {"write": r"'action'.*shape \(1,\)"}


def sampled(collector: Collector) -> None:
    until(lambda: kept(collector).sample(4) is None)


def asked(collector: Collector) -> None:
    until(lambda: not collector.is_running())


def stopped(collector: Collector) -> None:
    until(lambda: not threads())
    collector.async_shutdown()


def left(collector: Collector) -> None:
    with collector:
        until(lambda: not threads())


def sampled_in_a_with_block(collector: Collector) -> None:
    with collector:
        sampled(collector)


@pytest.mark.parametrize("told", [sampled, asked, stopped, left, sampled_in_a_with_block])
@pytest.mark.parametrize("where", PLACES)
def test_errors_reach_the_trainer(run: Make, where: str, told: Callable[[Collector], None]) -> None:
    env, options, kind, function = failing(where)
    collector = run(env, **options)
    with pytest.raises(kind, match=MESSAGES.get(where, "as it was told")) as caught:
        told(collector)
    notes = "\n".join(caught.value.__notes__)
    assert notes.count("collected in the background") == 1
    assert "Collector(" in notes
    assert function in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert kept(collector).write_count in (20, 30)
    assert not threads()
    collector.shutdown()  # it has been told, and is not told again
    collector.async_shutdown()
    assert collector.closed
    assert collector.env.is_closed


@pytest.mark.parametrize("where", ["env.step", "postproc"])
def test_an_error_that_was_caught_is_not_raised_at_the_end_of_the_block(run: Make, where: str) -> None:
    """Nor does it hide the one that has ended the block."""
    env, options, kind, _ = failing(where)
    with run(env, **options) as collector, pytest.raises(kind):
        sampled(collector)
    env, options, _, _ = failing(where)

    def train() -> None:
        with run(env, **options):
            until(lambda: not threads())
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()


@pytest.mark.parametrize("where", ["env.step", "postproc"])
def test_an_error_is_the_same_each_time_it_is_told_and_starting_again_is_no_silent_success(
    run: Make, where: str
) -> None:
    env, options, kind, _ = failing(where)
    collector = run(env, **options)
    until(lambda: not threads())
    lengths = []
    for _ in range(5):
        with pytest.raises(kind) as caught:
            collector.is_running()
        lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(set(lengths)) == 1, "the traceback grows"
    with pytest.raises((kind, ClosedError)):
        collector.start()


def test_an_error_before_the_first_frame_ends_the_wait_for_it(run: Make) -> None:
    env = FaultyGymEnv(at=1)
    collector = run(env)
    with pytest.raises(FaultyError):
        bounded(lambda: kept(collector).sample(4))


@pytest.mark.parametrize("is_error", [False, True])
def test_warnings_come_through_and_may_be_errors(make: Make, is_error: bool) -> None:
    collector = make(FaultyGymEnv("nan", at=15, lengths=1000))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error" if is_error else "always", NotANumberWarning)
        collector.start()
        if is_error:
            with pytest.raises(NotANumberWarning):
                asked(collector)
            return
        until(lambda: kept(collector).write_count >= 40)
    assert [warning.category for warning in caught] == [NotANumberWarning]
    assert "lane 0" in str(caught[0].message)
    assert collector.is_running()


# -- weights --------------------------------------------------------------------------------------------------------


class Balance(nn.Linear):
    """A layer whose bias makes up for its weights where the first number seen is 1; the second output tells them."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.set(0)

    def set(self, value: float) -> None:
        with torch.no_grad():
            self.weight.zero_()
            self.weight[:, 0] = torch.tensor([value, value])
            self.bias.copy_(torch.tensor([-value, 0.0]))


def told(frames: TensorDictBase, known: bool) -> tuple[Tensor, Tensor]:
    """(what the weights were, what should be zero if all of them were of one version) in each frame."""
    action = frames["action"]
    return (action[:, 1], action[:, 0]) if known else (action[:, 1], action[:, 0] - action[:, 1])


def weighing(make: Make, known: bool, **options: Any) -> tuple[Collector, Any]:
    env = CountingEnv(lengths=100_000_000)
    env.first_lane = 1
    policy = Balance() if known else Pair()
    module = TensorDictModule(policy, in_keys=["observation"], out_keys=["action"])
    collector = make(env, module, track_policy_version=PolicyVersion(), **options)
    return collector, policy


@pytest.mark.parametrize("known", [True, False])
def test_weights_count_only_when_they_are_published(make: Make, known: bool) -> None:
    collector, policy = weighing(make, known)
    collector.start()
    policy.set(5)
    grow(collector, 200)
    with collector.pause():
        assert not told(kept(collector)[:], known)[0].any()
    collector.update_policy_weights_()
    policy.set(7)
    grow(collector, 200)
    collector.shutdown()
    frames = kept(collector)[:]
    values, rest = told(frames, known)
    assert not rest.any()
    assert set(values.tolist()) == {0, 5}
    assert values[-100:].eq(5).all()
    assert torch.equal(frames["policy_version"], (values == 5).long())
    assert collector.policy_version == 1


@pytest.mark.parametrize(
    ("known", "options"),
    [(True, {}), (False, {}), (True, {"extend_buffer": False}), (False, {"frames_per_batch": 1})],
    ids=str,
)
def test_weights_are_never_of_two_versions(make: Make, known: bool, options: dict[str, Any]) -> None:
    collector, policy = weighing(make, known, **options)
    collector.start()
    deadline, updates = time.monotonic() + 0.7, 0
    while time.monotonic() < deadline or kept(collector).write_count < 200:
        updates += 1
        policy.set(updates)
        collector.update_policy_weights_()
        policy.set(-1)
    grow(collector, 100)
    collector.shutdown()
    frames = kept(collector)[:]
    values, rest = told(frames, known)
    assert not rest.any(), "a frame has seen weights of two versions"
    assert torch.equal(frames["policy_version"], values.long())
    assert (values.diff() >= 0).all()
    assert len(values.unique()) > 5
    assert values[-1] == updates
    assert collector.policy_version == updates


def test_weights_in_all_forms(make: Make) -> None:
    collector, policy = weighing(make, False)
    collector.start()
    twin = Pair()
    module = TensorDictModule(twin, in_keys=["observation"], out_keys=["action"])
    forms: list[Callable[[], Any]] = [
        lambda: collector.update_policy_weights_(module),
        lambda: collector.update_policy_weights_(policy=twin),
        lambda: collector.update_policy_weights_(weights=dict(twin.state_dict())),
        lambda: collector.update_policy_weights_(weights_dict={"policy": module}),
        lambda: collector.update_policy_weights_({0: twin}),
    ]
    for value, form in enumerate(forms, 1):
        twin.set(value)
        form()
        until(lambda value=value: newest(collector)["action"].eq(value).all())
    assert policy.first == policy.second == 0, "the trainer's own policy is left alone"


def test_weights_of_a_policy_that_a_factory_made(run: Make) -> None:
    made: list[Pair] = []

    def factory() -> TensorDictModule:
        made.append(Pair())
        return TensorDictModule(made[-1], in_keys=["observation"], out_keys=["action"])

    collector = run(policy_factory=factory)
    made[0].set(3)
    grow(collector, 100)
    assert not kept(collector)[:]["action"].any()
    collector.update_policy_weights_()
    until(lambda: newest(collector)["action"].eq(3).all())
    assert len(made) == 1


def test_weights_that_do_not_fit_are_refused_at_once(make: Make) -> None:
    collector, _ = weighing(make, False)
    collector.start()
    with pytest.raises(ValueError, match="shape"):
        collector.update_policy_weights_(weights={"first": torch.zeros(2), "second": torch.zeros(2)})
    with pytest.raises(KeyError, match="no weight"):
        collector.update_policy_weights_(weights={"c": torch.zeros(1)})
    grow(collector)
    assert collector.policy_version == 0


def test_weights_published_while_it_rests_and_after_it_ended(make: Make) -> None:
    collector, policy = weighing(make, False, total_frames=300)
    collector.start()
    with collector.pause():
        policy.set(3)
        collector.update_policy_weights_()
        begin = kept(collector).write_count
        assert collector.state_dict()["policy_version"] == 1
    until(lambda: not collector.is_running())
    assert kept(collector)[begin:]["action"].eq(3).all()
    policy.set(4)
    collector.update_policy_weights_()
    assert collector.policy_version == 2
    assert collector.state_dict()["policy_state_dict"]["module.first"] == 4


# -- keeping out of the trainer's way -------------------------------------------------------------------------------


def test_the_trainers_exploration_type_is_its_own(make: Make) -> None:
    policy = actor()
    for kind, other in [(ExplorationType.RANDOM, ExplorationType.MODE), (ExplorationType.MODE, ExplorationType.RANDOM)]:
        collector = make(policy=policy, exploration_type=kind)
        default = exploration_type()
        collector.start()
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline or kept(collector).write_count < 200:
            assert exploration_type() is default
            with set_exploration_type(other):
                for _ in range(50):
                    assert exploration_type() is other
        collector.shutdown()
        frames = kept(collector)[:]
        likely = policy(frames.select("observation"))["logits"].argmax(-1) if kind is ExplorationType.MODE else None
        if likely is not None:
            assert torch.equal(frames["action"].argmax(-1), likely)
    collector = make(CountingEnv(lengths=1), policy, exploration_type=ExplorationType.RANDOM)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.zero_()
    with set_exploration_type(ExplorationType.MODE):
        collector.start()
        grow(collector, 200)
    collector.shutdown()
    assert len(kept(collector)[:]["action"].argmax(-1).unique()) == 2


@pytest.mark.parametrize("policy", [None, actor], ids=["random", "known"])
def test_the_trainers_random_numbers_are_its_own(run: Make, policy: Any) -> None:
    def draws() -> Tensor:
        torch.manual_seed(0)
        numbers = []
        deadline = time.monotonic() + 0.2
        while len(numbers) < 2000 or time.monotonic() < deadline:
            numbers.append(torch.rand(()))
        return torch.stack(numbers[:2000])

    wanted = draws()
    collector = run(policy=policy and policy(), init_random_frames=100)
    assert torch.equal(draws(), wanted)
    assert kept(collector).write_count > 0
    with collector.pause():
        assert torch.equal(draws(), wanted)


@pytest.mark.parametrize("policy", [None, actor], ids=["random", "known"])
def test_a_seed_decides_what_is_collected(make: Make, policy: Any) -> None:
    module = policy and policy()

    def actions(seed: int, background: bool) -> Tensor:
        collector = make(CountingEnv((2,)), module, total_frames=400)
        collector.set_seed(seed)
        if background:
            collector.start()
            while collector.is_running():
                torch.rand(3)
        else:
            list(collector)
        return kept(collector)[:]["action"]

    first = actions(1, True)
    assert torch.equal(actions(1, True), first)
    assert torch.equal(actions(1, False), first)
    assert not torch.equal(actions(2, True), first)


def test_torch_manual_seed_decides_what_an_unseeded_collector_collects(run: Make) -> None:
    def actions() -> Tensor:
        torch.manual_seed(4)
        collector = finished(run(total_frames=100))
        return kept(collector)[:]["action"]

    assert torch.equal(actions(), actions())


def test_threads_take_turns_more_often_while_any_collector_runs(make: Make) -> None:
    before = sys.getswitchinterval()
    first, second = make(), make(total_frames=200)
    first.start()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    second.start()
    until(lambda: not second.is_running())
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    first.shutdown()
    assert sys.getswitchinterval() == before


def test_gradients_of_the_trainer_are_its_own(run: Make) -> None:
    policy = net()
    collector = run(policy=policy)
    for _ in range(50):
        batch = kept(collector).sample(8)
        assert torch.is_grad_enabled()
        policy(batch)["action"].sum().backward()
    assert all(weight.grad is not None for weight in policy.parameters())
    assert all(weight.grad is None for weight in collector.policy.parameters())


# -- the buffer's side ----------------------------------------------------------------------------------------------


def test_sample_waits_for_the_first_frames(waiting: Any) -> None:
    collector, env = waiting()
    timer = threading.Timer(0.1, env.gate.set)
    timer.start()
    assert not env.gate.is_set()
    assert kept(collector).sample(4).shape == (4,)
    assert env.gate.is_set()
    timer.join()


def test_sample_of_what_never_comes_ends_with_the_collector_or_its_rest(run: Make) -> None:
    ended, resting = run(trajs_per_batch=1, total_frames=200), run(trajs_per_batch=1)
    with pytest.raises(RuntimeError, match="empty"):
        bounded(lambda: kept(ended).sample(4))

    def sample_at_rest() -> None:
        with resting.pause():
            kept(resting).sample(4)

    with pytest.raises(RuntimeError, match="empty"):
        bounded(sample_at_rest, 5)


def test_sample_does_not_wait_for_ever_for_slices_that_cannot_be(run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PATIENCE, 0.3)
    slices = buffer(200, sampler=SliceSampler(slice_len=50))
    run(CountingEnv(lengths=5), replay_buffer=slices)
    until(lambda: slices.write_count > 1000)
    with pytest.raises(RuntimeError, match="no trajectory as long as a slice"):
        bounded(lambda: slices.sample(100), 3)


def test_a_hook_that_samples_does_not_wait_for_itself(make: Make) -> None:
    collector = make(post_collect_hook=lambda batch: kept(collector).sample(4))
    collector.start()
    with pytest.raises(RuntimeError, match="empty"):
        until(lambda: not collector.is_running(), 5)


def test_the_rate_limiter_holds_collection_and_training_together(run: Make) -> None:
    limiter = RateLimiter(samples_per_insert=2.0, min_size_to_sample=20)
    limited = buffer(batch_size=32, rate_limiter=limiter)
    collector = run(replay_buffer=limited)
    for _ in range(60):
        limited.sample()
        stats = limited.stats()
        assert stats["sampled"] <= 2 * (limited.write_count - 19) + 32
    sampled = limited.stats()["sampled"]
    assert sampled == 60 * 32
    until(lambda: 2 * (limited.write_count + 10 - 19) - 32 > sampled)  # one more batch would be too much
    time.sleep(0.05)
    assert 2 * (limited.write_count - 19) - 32 <= sampled
    begun = time.monotonic()
    collector.shutdown()
    assert time.monotonic() - begun < 2
    assert limited.write_count == collector.stats()["frames"]
    assert_frames_belong(limited[:])


@pytest.mark.parametrize("fails", [True, False])
def test_the_rate_limiter_does_not_wait_for_a_collector_that_has_ended(run: Make, fails: bool) -> None:
    limited = buffer(batch_size=32, rate_limiter=RateLimiter(samples_per_insert=1.0))
    env = FaultyGymEnv(at=105, lengths=1000) if fails else None
    run(env, replay_buffer=limited, total_frames=200)

    def train() -> None:
        for _ in range(20):
            limited.sample()

    begun = time.monotonic()
    with pytest.raises(FaultyError) if fails else contextlib.nullcontext():
        bounded(train)
    assert time.monotonic() - begun < 5
    assert limited.write_count == (100 if fails else 200)


def test_the_rate_limiter_lets_pause_through(run: Make) -> None:
    limited = buffer(batch_size=32, rate_limiter=RateLimiter(samples_per_insert=2.0))
    collector = run(replay_buffer=limited)
    until(lambda: limited.write_count >= 10)
    begun = time.monotonic()
    with collector.pause():
        assert collector.stats()["frames"] == limited.write_count
        assert limited.sample().shape == (32,)
    assert time.monotonic() - begun < 2


def test_prefetching_waits_and_ends_too(run: Make) -> None:
    ahead = buffer(batch_size=16, prefetch=3)
    collector = run(FaultyGymEnv(at=200, lengths=1000), replay_buffer=ahead)
    with contextlib.suppress(FaultyError):
        for _ in range(20):
            assert ahead.sample().shape == (16,)
    with pytest.raises(FaultyError):
        sampled(collector)
    ahead.shutdown()


@over([ASYNC])
def test_slices_of_four_workers_lie_within_an_episode(run: Make) -> None:
    """The tip for training on trajectories."""
    lengths = [5, 9, 4]
    sampler = SliceSampler(slice_len=4, end_key=("next", "done"))
    store = buffer(20_000, sampler=sampler, batch_size=64)
    collector = run(lanes=2, lengths=lengths, workers=4, replay_buffer=store, trajs_per_batch=4)
    until(lambda: len(store) > 500)
    for _ in range(50):
        sample = store.sample().view(-1, 4)
        assert (sample[TRAJ_IDS] == sample[TRAJ_IDS][:, :1]).all()
        steps = sample["observation"][..., STEP]
        assert torch.equal(steps[:, 1:], steps[:, :-1] + 1)
        assert (sample["observation"][..., :STEP] == sample["observation"][:, :1, :STEP]).all()
        assert not sample["next", "done"][:, :-1].any()
    collector.async_shutdown()
    assert len((store[:][TRAJ_IDS] >> WORKER_BITS).unique()) == 4
    assert_whole_in_a_row(store[:], lambda lane, episode: lengths[episode % 3])


def assert_whole_frames(sample: TensorDictBase) -> None:
    assert torch.equal(sample["next", "reward"][:, 0], sample["observation"][:, STEP] + 1)
    assert torch.equal(sample["next", "observation"][:, STEP], sample["observation"][:, STEP] + 1)


@over([ASYNC])
def test_priorities_while_workers_run(run: Make) -> None:
    store = buffer(2000, sampler=PrioritizedSampler(2000, alpha=1.0, beta=1.0), batch_size=32)
    run(replay_buffer=store)
    until(lambda: len(store) > 200)
    for _ in range(50):
        sample, info = store.sample(return_info=True)
        store.update_priority(info["index"], torch.rand(32) + 0.1)
        assert_whole_frames(sample)


@pytest.mark.parametrize("starts", [True, False], ids=["start", "iterate"])
@over([ASYNC])
def test_a_rate_limiter_holds_workers_back(make: Make, starts: bool) -> None:
    limiter = RateLimiter(samples_per_insert=1.0, min_size_to_sample=40, tolerance=64)
    store = buffer(10_000, rate_limiter=limiter, batch_size=16)
    collector = make(replay_buffer=store)
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
    time.sleep(0.2)
    assert sampled - 64 <= store.write_count <= 40 + sampled + 64 + 2 * 10


@pytest.mark.torchrl
def test_a_buffer_of_torchrl_is_filled_too(run: Make) -> None:
    torchrl = pytest.importorskip("torchrl.data")
    theirs = torchrl.ReplayBuffer(storage=torchrl.LazyTensorStorage(1000), batch_size=16)
    finished(run(replay_buffer=theirs, total_frames=300))
    assert theirs.write_count == 300
    assert_frames_belong(theirs[:])
