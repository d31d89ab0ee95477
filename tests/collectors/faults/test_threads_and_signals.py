"""Collectors that are used by several threads at once, by signal handlers, and interrupted at any instruction."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from common import STEP, WAIT_S, buffer, net, steps_of, until
from fault_tools import LONG, within
from interrupting import LOCKS, Tick, at_every_instruction, at_instruction, handled, raise_tick
from kinds import ALL, AS_READY, ASYNC, FREE, HERE, SINGLE, SPREAD, STARTED, SYNC, SYNC_HERE, Kind, Make, over
from tensordict.nn import TensorDictModule
from torch import nn

from swath.errors import ClosedError
from swath.keys import TRAJ_IDS
from swath.testing import CountingEnv, counted

SECONDS = 10.0 if LONG else 0.7
ENDLESS = {"total_frames": -1}
CALLS: dict[str, Callable[[Any], Any]] = {
    "weights": lambda collector: collector.update_policy_weights_(),
    "state": lambda collector: collector.state_dict(),
    "stats": lambda collector: collector.stats("both"),
    "attribute": lambda collector: collector.get_distant_attr("env.batch_size"),
    "version": lambda collector: collector.increment_version(),
    "hook": lambda collector: collector.set_post_collect_hook(None),
    "seed": lambda collector: collector.set_seed(3),
    "reset": lambda collector: collector.reset(),
}


def whole(batches: list[Any]) -> int:
    """Each trajectory is there from its first step on, without a hole; how many there are."""
    steps: dict[int, list[int]] = {}
    for batch in batches:
        for name, step in zip(batch[TRAJ_IDS].reshape(-1).tolist(), counted(batch)[..., STEP].reshape(-1), strict=True):
            steps.setdefault(name, []).append(int(step))
    assert all(found == list(range(len(found))) for found in steps.values()), steps
    return len(steps)


@over(ALL)
def test_one_thread_iterates_and_others_ask(kind: Kind, make: Make) -> None:
    collector = make(policy=net(), **ENDLESS)
    over_at = time.monotonic() + SECONDS

    def ask(call: Callable[[Any], Any]) -> int:
        count = 0
        while not count or time.monotonic() < over_at:
            call(collector)
            count += 1
        return count

    with ThreadPoolExecutor(len(CALLS)) as pool:
        asking = [pool.submit(ask, call) for call in CALLS.values()]
        batches = 0
        while time.monotonic() < over_at or batches < 2:
            batch = next(iter(collector))
            assert batch["collector", "traj_ids"].numel() == batch.numel()
            batches += 1
        assert all(one.result(WAIT_S) for one in asking)


@over(ALL)
def test_threads_that_iterate_share_the_batches(kind: Kind, make: Make) -> None:
    collector = make(batches=12)
    total = collector.config.total_frames

    def take(how: str) -> int:
        batches = iter(collector.next, None) if how == "next" else iter(collector)
        return sum(batch.numel() for batch in batches)

    with ThreadPoolExecutor(4) as pool:
        taken = [pool.submit(take, how) for how in ("next", "for", "next", "for")]
        assert sum(one.result(WAIT_S) for one in taken) == total


@over((SYNC_HERE, *SPREAD))
def test_new_seeds_of_threads_leave_no_hole(kind: Kind, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the worst of moments: when one worker has its order and the other does not, and when new work is finished."""
    collector = make(lengths=10**6, steps=3, **ENDLESS)
    pool, delivery, seeding, batches = collector._pool, collector._delivery, [], [collector.next().clone()]
    issue, discard = pool.issue, delivery.discard

    def issue_and_seed(work: Any) -> None:
        issue(work)
        if len(seeding) < 4 and work.index == 0:
            seeding.append(threads.submit(collector.set_seed, 3))
            wait(seeding, timeout=0.1)

    def discard_late(*given: Any) -> None:
        with suppress(AssertionError):
            until(lambda: pool.finished, 0.1)
        discard(*given)

    monkeypatch.setattr(pool, "issue", issue_and_seed)
    monkeypatch.setattr(delivery, "discard", discard_late)
    with ThreadPoolExecutor(1) as threads:
        while len(batches) < 12 or not all(one.done() for one in seeding):
            batches.append(collector.next().clone())
    assert whole(batches) > 2


@over((SYNC_HERE, SYNC))
def test_a_batch_whose_parts_are_just_given_up_is_made_again(
    kind: Kind, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that gives up finished parts takes its time between one and what it notes of it."""
    collector = make(steps=3, **ENDLESS)
    main, take, shape = threading.get_ident(), collector._pool.take, collector.next().shape

    def take_slowly(work: Any) -> bool:
        is_taken = take(work)
        if threading.get_ident() != main:
            time.sleep(0.05)
        return is_taken

    monkeypatch.setattr(collector._pool, "take", take_slowly)
    with ThreadPoolExecutor(1) as pool:
        seeding = pool.submit(lambda: [collector.set_seed(3) for _ in range(20)])
        while not seeding.done():
            assert collector.next().shape == shape
        seeding.result()


@over(HERE)
def test_whole_episodes_may_be_given_up_and_saved_by_threads(kind: Kind, make: Make) -> None:
    collector = make(trajs_per_batch=1, traj_format="cat", lanes=30 if kind is AS_READY else 3, **ENDLESS)
    over_at, interval = time.monotonic() + SECONDS, sys.getswitchinterval()

    def ask(name: str) -> None:
        while time.monotonic() < over_at:
            CALLS[name](collector)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            asking = [pool.submit(ask, name) for name in ("state", "seed", "state")]
            while not all(one.done() for one in asking):
                assert collector.next()["next", "done"][-1]
    finally:
        sys.setswitchinterval(interval)
    assert not any(one.exception() for one in asking)


@over(SPREAD)
def test_a_new_seed_for_the_last_frames_ends_the_loop(kind: Kind, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written all the same counts, so that nothing is left to be waited for."""

    class Slow(CountingEnv):
        def step_into(self, action: Any, out: Any) -> bool:
            time.sleep(0.02)
            return super().step_into(action, out)

    collector = make(lambda: Slow(()), replay_buffer=buffer(), batches=1)
    attend = collector._pool.attend

    def attend_and_seed(*given: Any, **options: Any) -> None:
        monkeypatch.undo()
        until(lambda: steps_of(collector, 0))
        collector.set_seed(3)
        attend(*given, **options)

    monkeypatch.setattr(collector._pool, "attend", attend_and_seed)
    with within(WAIT_S):
        list(collector)
    assert len(collector.replay_buffer) == collector.stats()["frames"] >= collector.config.total_frames


@over(SPREAD)
def test_what_is_written_after_a_new_seed_is_not_ordered_again(kind: Kind, make: Make) -> None:
    """Its worker tells of it with the answer: until then nobody knows how much is left to collect."""

    class Slow(CountingEnv):
        def step_into(self, action: Any, out: Any) -> bool:
            time.sleep(0.01)
            return super().step_into(action, out)

    collector = make(lambda: Slow(()), replay_buffer=buffer(), steps=5, batches=3)
    with ThreadPoolExecutor(1) as pool, within(WAIT_S):
        loop = pool.submit(list, collector)
        while not loop.done():
            with suppress(ClosedError):  # when all is collected
                collector.set_seed(3)
            wait([loop], timeout=0.015)
        loop.result()
    assert len(collector.replay_buffer) == collector.stats()["frames"] == collector.config.total_frames


@over(SPREAD)
def test_a_state_between_two_batches_counts_what_is_in_the_buffer(kind: Kind, make: Make) -> None:
    class Slow(CountingEnv):
        def _step(self, tensordict: Any) -> Any:
            time.sleep(0.002)
            return super()._step(tensordict)

    collector = make(lambda: Slow(()), replay_buffer=buffer(), **ENDLESS)
    stream = iter(collector)
    for _ in range(3):
        next(stream)
        states = [CALLS["state"](collector) for _ in range(3)]
        assert {state["frames"] for state in states} == {len(collector.replay_buffer)}


@over(SPREAD)
def test_large_calls_of_several_threads_arrive_whole(kind: Kind, make: Make) -> None:
    class Taking(CountingEnv):
        def take(self, given: Any) -> int:
            return int(given.sum())

    collector = make(lambda: Taking(()), **ENDLESS)
    sizes = [1_500_000, 2_000_000, 2_500_000]

    def ask(size: int) -> list[Any]:
        given = np.ones(size, np.int8)
        return [collector.cascade_execute("env.take", given) for _ in range(10 if LONG else 3)]

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(ask, sizes))
    assert answers == [[[size] * 2] * len(answers[0]) for size in sizes]


# -- weights -----------------------------------------------------------------------------------------------------------

SIZE = 400_000


class Wide(nn.Module):
    """Acts by its first and its last weight, which should be equal."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(SIZE))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.wide[[0, -1]].expand(*observation.shape[:-1], 2).clone()


class Rewarding(CountingEnv):
    """An env with a model of its own, whose weight is the reward."""

    def __init__(self) -> None:
        super().__init__(())
        self.module = nn.Linear(1, SIZE)
        nn.init.zeros_(self.module.bias)

    def step_into(self, action: Any, out: Any) -> bool:
        is_over = super().step_into(action, out)
        out.arrays["reward"][:] = float(self.module.bias[0].detach())
        return is_over


def wide_policy() -> TensorDictModule:
    return TensorDictModule(Wide(), in_keys=["observation"], out_keys=["action"])


@over(SPREAD)
def test_threads_that_publish_at_once_tear_nothing(kind: Kind, make: Make) -> None:
    collector = make(policy=wide_policy(), frames_per_batch=4, trust_policy=True, **ENDLESS)
    over_at = time.monotonic() + 2 * SECONDS

    def publish(first: int) -> int:
        count, weights = 0, torch.zeros(SIZE)
        while time.monotonic() < over_at:
            count += 1
            collector.update_policy_weights_({"module.wide": weights.fill_(first + 2 * count)})
        return count

    with ThreadPoolExecutor(2) as pool:
        publishing = [pool.submit(publish, first) for first in (0, 1)]
        while time.monotonic() < over_at:
            action = collector.next()["action"]
            assert torch.equal(action[..., 0], action[..., 1])
        assert sum(one.result(WAIT_S) for one in publishing) == collector.policy_version


@over(SPREAD)
def test_models_that_are_published_together_are_adopted_together(kind: Kind, make: Make) -> None:
    policy, other = wide_policy(), nn.Linear(1, SIZE)
    collector = make([Rewarding] * 2, policy, frames_per_batch=4, trust_policy=True, **ENDLESS)
    over_at, version = time.monotonic() + 3 * SECONDS, 0
    while time.monotonic() < over_at:
        batch = collector.next()
        assert torch.equal(batch["action"][..., :1], batch["next", "reward"])
        version += 1
        with torch.no_grad():
            policy.module.wide.fill_(version)
            other.bias.fill_(version)
        collector.update_policy_weights_(weights_dict={"policy": policy, "env.module": other})


# -- signal handlers ---------------------------------------------------------------------------------------------------


@over((SINGLE, SYNC_HERE, AS_READY, SYNC, ASYNC))
def test_a_signal_handler_may_call_it_at_any_moment(kind: Kind, make: Make) -> None:
    """It works, or is refused in words; and all goes on."""
    collector = make(policy=net(), **ENDLESS)
    stream, calls, count = iter(collector), itertools.cycle(CALLS.items()), 0

    def handler(number: int, frame: FrameType | None) -> None:
        name, call = next(calls)
        try:
            call(collector)
        except RuntimeError as error:
            if "signal handler" not in str(error) or name not in ("seed", "reset"):
                raise

    next(stream)
    with handled(handler):
        number, most, each = 1, *((100_000, 1) if LONG else (1000, 31))
        while number < most:
            if at_instruction(number, lambda: next(stream)):
                count, number = count + 1, number + each
            elif count > len(CALLS):
                break
            else:  # the batch was there already, so that there was little to do
                number = 1
    next(stream)


@over(HERE)
def test_a_call_that_is_refused_to_a_signal_handler_changes_nothing(kind: Kind, make: Make) -> None:
    collector = make(lengths=10**6, workers=min(1, kind.workers), **ENDLESS)
    stream, said = iter(collector), []
    batches = [next(stream).clone()]

    def handler(number: int, frame: FrameType | None) -> None:
        for name in ("seed", "reset"):
            try:
                CALLS[name](collector)
            except RuntimeError as error:
                said.append(str(error))

    with handled(handler):
        for number in range(7, 10_000 if LONG else 700, 1 if LONG else 73):
            at_instruction(number, lambda: batches.append(next(stream).clone()))
    assert said
    assert all("signal handler" in text for text in said), said
    batches.append(next(stream).clone())
    whole(batches)


@over(HERE)
def test_a_thread_is_answered_after_the_batch_that_a_signal_handler_has_come_into(kind: Kind, make: Make) -> None:
    collector = make(lengths=10**6, workers=min(1, kind.workers), **ENDLESS)
    stream, asking = iter(collector), []
    batches = [next(stream).clone()]

    def handler(number: int, frame: FrameType | None) -> None:
        asking.append(pool.submit(collector.set_seed, 3))
        until(lambda: collector._pool._asked or asking[-1].done())
        collector.get_distant_attr("env.batch_size")  # which sees to all questions that can be answered

    with ThreadPoolExecutor(1) as pool, handled(handler):
        for number in range(7, 10_000 if LONG else 700, 1 if LONG else 73):
            at_instruction(number, lambda: batches.append(next(stream).clone()))
        for one in asking:
            one.result(WAIT_S)
    batches.append(next(stream).clone())
    assert whole(batches) > 1


@over(FREE)
def test_who_keeps_others_from_writing_to_the_buffer_is_not_kept_waiting(kind: Kind, make: Make) -> None:
    """As a signal handler that comes into a long `dumps()`."""
    collector = make(policy=net(), replay_buffer=buffer(), **ENDLESS)
    kept = collector.replay_buffer
    collector.start()
    until(lambda: len(kept) > 10)
    with kept.episodes(), within(10.0):
        for name in ("state", "seed", "reset", "hook"):
            with pytest.raises(RuntimeError, match="signal handler"):
                CALLS[name](collector)
        with pytest.raises(RuntimeError, match="signal handler"), collector.pause():
            pass
        CALLS["weights"](collector)
        CALLS["stats"](collector)
    assert collector.state_dict()["frames"] > 10
    with collector.pause(), kept.episodes():
        CALLS["state"](collector)


@over((SINGLE, STARTED))
def test_a_handler_within_a_draw_does_not_wait_for_a_thread_that_saves(kind: Kind, make: Make, tmp_path: Path) -> None:
    collector = make(policy=net(), replay_buffer=buffer(), **ENDLESS)
    kept = collector.replay_buffer
    collector.start()
    until(lambda: len(kept) > 10)
    with ThreadPoolExecutor(1) as pool, within(10.0):
        with kept._drawer.lock:  # as in the middle of sample()
            saving = pool.submit(kept.dumps, tmp_path)
            wait([saving], timeout=0.2)
            CALLS["state"](collector)
        saving.result(WAIT_S)


@over((SINGLE, SYNC_HERE, SYNC, ASYNC))
def test_a_signal_handler_may_shut_it_down(kind: Kind, make: Make) -> None:
    for number in range(1, 10**6, 200 if LONG else 1500):
        collector = make(**ENDLESS)
        stream = iter(collector)
        next(stream)
        came = False

        def handler(number: int, frame: FrameType | None, collector: Any = collector) -> None:
            collector.shutdown()

        with handled(handler), within(10.0):
            try:
                came = at_instruction(number, lambda stream=stream: next(stream))
            except (ClosedError, StopIteration):
                came = True
        if not came:
            break
        with pytest.raises(ClosedError):
            collector.rollout()


@over(ALL)
def test_a_batch_within_a_batch_is_refused_in_words(kind: Kind, make: Make) -> None:
    collector = make(**ENDLESS)
    collector.next()
    said: list[str] = []

    def handler(number: int, frame: FrameType | None) -> None:
        for ask in (collector.next, lambda: next(iter(collector)), collector.rollout):
            try:
                ask()
            except RuntimeError as error:
                said.append(str(error))

    with handled(handler):
        at_instruction(60, collector.next)
    assert len(said) == 3
    assert all("between two batches" in text for text in said), said
    collector.next()


# -- interrupts --------------------------------------------------------------------------------------------------------


@over(SPREAD)
@pytest.mark.parametrize("call", ["attribute", "state", "weights"])
def test_an_interrupted_call_loses_nothing(kind: Kind, make: Make, call: str) -> None:
    collector = make(policy=net(), **ENDLESS)
    stream = iter(collector)
    next(stream)
    steps = {"attribute": 23, "state": 29, "weights": 37}
    assert at_every_instruction(lambda: CALLS[call](collector), lambda: next(stream), steps[call]) > 3


@over((SINGLE, AS_READY))
@pytest.mark.parametrize("call", ["reset", "seed"])
@pytest.mark.filterwarnings("ignore:.*a reset of it was interrupted")
def test_an_interrupted_reset_here_is_done_or_begun_anew(kind: Kind, make: Make, call: str) -> None:
    collector = make(**ENDLESS)
    batches: list[Any] = []
    at_every_instruction(lambda: CALLS[call](collector), lambda: batches.append(collector.next().clone()), 17)
    assert whole(batches) > 10


@over((SINGLE,))
def test_the_first_weights_may_be_interrupted(kind: Kind, make: Make) -> None:
    for number in range(1, 10_000, 1 if LONG else 5):
        collector = make(policy=net(), track_policy_version=True, **ENDLESS)
        with handled(raise_tick):
            if not at_instruction(number, partial(collector.update_policy_weights_, net(1.0))):
                break
        batch = collector.next()  # version and weights of the beginning, or those that came
        assert {*batch["action"].flatten().tolist()} == {*batch["policy_version"].flatten().tolist()}
        collector.update_policy_weights_(net(2.0))
        assert (collector.next()["action"] == 2.0).all()
        collector.shutdown()
    assert number > 100


@over(SPREAD)
def test_interrupts_at_any_time_lose_nothing(kind: Kind, make: Make) -> None:
    collector = make(policy=net(), **ENDLESS)
    stream = iter(collector)
    chance, count, over_at = np.random.default_rng(0), 0, time.monotonic() + SECONDS
    before = signal.signal(signal.SIGALRM, raise_tick)
    try:
        while time.monotonic() < over_at:
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(20e-6, 1.5e-3))
                collector.get_distant_attr("env.batch_size")
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Tick:
                count += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            next(stream)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert count > 3


@over(ALL)
def test_a_collector_that_an_interrupt_has_closed_says_so(kind: Kind, make: Make) -> None:
    collector = make(**ENDLESS)
    collector.next()
    with handled(raise_tick):
        stream = iter(collector)
        assert at_instruction(60, lambda: next(stream))
    assert collector.closed
    for ask in (lambda: list(collector), collector.next, lambda: list(collector.iterator())):
        with pytest.raises(ClosedError):
            ask()


@over(ALL)
def test_a_collector_that_is_done_is_just_empty(kind: Kind, make: Make) -> None:
    collector = make(batches=2)
    assert list(collector)
    assert list(collector) == []
    assert collector.next() is None


# -- resting -----------------------------------------------------------------------------------------------------------


@over((SINGLE, STARTED))
@pytest.mark.filterwarnings("ignore:.*a reset of it was interrupted")
def test_an_interrupt_while_it_is_to_rest_keeps_nobody_from_it(kind: Kind, make: Make) -> None:
    collector = make(replay_buffer=buffer(), **ENDLESS)
    collector.start()
    with ThreadPoolExecutor(1) as pool:
        assert at_every_instruction(collector.reset, lambda: pool.submit(collector.reset).result(WAIT_S), 2, LOCKS) > 5


@over((SINGLE, STARTED))
def test_whoever_pauses_finds_it_at_rest(kind: Kind, make: Make) -> None:
    collector = make(replay_buffer=buffer(), **ENDLESS)
    kept, over_at = collector.replay_buffer, time.monotonic() + SECONDS
    collector.start()

    def pause(step_s: float) -> int:
        pauses = 0
        while time.monotonic() < over_at:
            with collector.pause():
                count = kept.write_count
                time.sleep(step_s)
                assert kept.write_count == count
            pauses += 1
        return pauses

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(pause, (0.004, 0.001, 0.002), timeout=WAIT_S))
