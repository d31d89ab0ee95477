"""Workers that are killed, crash, exit or are stopped: whoever waits is told at once which, and how it ended."""

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from children import is_gone
from common import buffer, net, steps_of, until
from fault_tools import (
    DEATHS,
    advance,
    advance_until_it_raises,
    doing,
    end,
    is_stopped,
    signal_itself,
    sleep_long,
    within,
)
from inside import StallWarning, WorkerDiedError, server_of_workers
from kinds import ALL_FALLIBLE, ASYNC, FALLIBLE, SPREAD, STARTED, SYNC, Kind, Make, over

from swath.data import RateLimiter
from swath.errors import ClosedError
from swath.testing import assert_follows, assert_frames_belong

pytestmark = pytest.mark.timeout(60)


def assert_tells_of(error: BaseException, index: int, pid: int, words: str) -> None:
    assert isinstance(error, WorkerDiedError), repr(error)
    assert f"Worker {index} (pid {pid}) {words}" in str(error)
    assert (error.index, error.pid) == (index, pid)


@pytest.mark.parametrize("death", DEATHS)
@over(ALL_FALLIBLE, needs="run_there")
def test_a_death_while_collecting_is_told_within_2_s(make: Make, kind: Kind, death: str) -> None:
    deed, words = DEATHS[death]
    collector = make(doing(deed))
    pid = collector.worker_pids[1]
    error = advance_until_it_raises(collector)
    assert_tells_of(error, 1, pid, words)
    assert "while it was collecting" in str(error)
    with within(2), pytest.raises(WorkerDiedError):  # again, and at once
        collector.is_running() if kind.starts else advance(collector)


@over(SPREAD, needs="report_steps")
def test_a_death_in_the_middle_of_a_long_batch(make: Make, kind: Kind) -> None:
    collector = make(doing(sleep_long, at=5), frames_per_batch=40)
    pid = collector.worker_pids[1]
    killed: list[float] = []

    def kill_when_it_hangs() -> None:
        until(lambda: steps_of(collector, 1) >= 4)
        killed.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_when_it_hangs)
    killer.start()
    error = advance_until_it_raises(collector)
    assert time.monotonic() - killed[0] < 2
    killer.join()
    assert_tells_of(error, 1, pid, "was killed by SIGKILL")


CALLS: dict[str, Callable[[Any], Any]] = {
    "update_policy_weights_": lambda collector: collector.update_policy_weights_(),
    "state_dict": lambda collector: collector.state_dict(),
    "set_seed": lambda collector: collector.set_seed(1),
    "reset": lambda collector: collector.reset(),
    "getattr": lambda collector: collector.get_distant_attr("env.batch_size"),
    "is_running": lambda collector: collector.is_running(),
    "async_shutdown": lambda collector: collector.async_shutdown(),
}
OF_STARTED = ("is_running", "async_shutdown")
"""Those that tell of a death only where nobody iterates, who would be told by the next batch."""


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (kind, call)
        for kind in FALLIBLE
        for call in CALLS
        if (kind.starts or call not in OF_STARTED) and "told_at_once" not in kind.cannot
    ],
    ids=str,
)
def test_a_death_between_batches_is_told_by_what_is_called_next(make: Make, call: str) -> None:
    collector = make(policy=net())
    advance(collector)
    pid = collector.worker_pids[1]
    end(pid)
    until(lambda: not os.path.exists(f"/proc/{pid}"))  # now its server knows, who tells
    with within(2), pytest.raises(WorkerDiedError) as caught:
        CALLS[call](collector)
    assert_tells_of(caught.value, 1, pid, "was killed by SIGKILL (signal 9)")
    with within(5):
        collector.shutdown()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
@over(ALL_FALLIBLE, needs="state_ends")
def test_a_death_between_batches_is_told_by_the_next_batch(make: Make, kind: Kind, how: int) -> None:
    """A trainer that only samples is told too. The collector stays closed, and tells its numbers."""
    collector = make()
    advance(collector)
    pid = collector.worker_pids[0]
    end(pid, how)
    with within(1):
        frames = collector.stats("both")["frames"]
    assert kind.starts or frames == 20
    with within(2):
        error = advance_until_it_raises(collector)
    assert_tells_of(error, 0, pid, f"was killed by {signal.Signals(how).name} (signal {int(how)})")
    assert not collector.stats()["workers_alive"]
    for call in (collector.next, collector.rollout, collector.state_dict) if not kind.starts else ():
        with within(1), pytest.raises((WorkerDiedError, ClosedError)):
            call()


@over(ALL_FALLIBLE)
def test_shutdown_after_a_death(make: Make, kind: Kind) -> None:
    collector = make()
    advance(collector)
    pids = collector.worker_pids
    end(pids[0])
    until(lambda: not kind.starts or collector.stats()["workers_alive"] < len(pids))  # a node's end takes its time
    with within(2):
        if kind.starts:  # nobody was told of it yet
            with pytest.raises(WorkerDiedError):
                collector.shutdown()
        else:
            collector.shutdown()
    assert all(map(is_gone, pids))
    with within(1):
        collector.shutdown()
    assert collector.stats()["workers_alive"] == 0


@over(ALL_FALLIBLE)
def test_all_workers_die(make: Make, kind: Kind) -> None:
    collector = make()
    advance(collector)
    for pid in collector.worker_pids:
        end(pid)
    with within(2):
        assert isinstance(advance_until_it_raises(collector), WorkerDiedError)


@over([STARTED])
def test_a_waiting_sample_is_told_of_a_death(make: Make) -> None:
    """No frame is there yet, and none will come."""
    collector = make(doing(signal_itself(signal.SIGKILL), worker=0, workers=1, at=3), frames_per_batch=1000)
    with within(10), pytest.raises(WorkerDiedError):
        collector.replay_buffer.sample()


# -- stopped -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def naming_a_stall(collector: Any, go_on: Callable[[], Any]) -> Iterator[list[warnings.WarningMessage]]:
    """Batches are asked for until a worker that makes no step is named, which is what lets it go on."""

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def let_go() -> None:
            until(lambda: caught)
            go_on()

        thread = threading.Thread(target=let_go)
        thread.start()
        yield caught
        until(lambda: caught or advance(collector) is None)
        thread.join()


@over(ALL_FALLIBLE)
def test_a_worker_that_is_stopped_for_a_while_is_named_and_then_goes_on(make: Make, kind: Kind) -> None:
    collector = make(stall_warning_s=0.5)
    before = advance(collector)
    pid = collector.worker_pids[1]
    os.kill(pid, signal.SIGSTOP)
    until(lambda: is_stopped(pid))
    with naming_a_stall(collector, lambda: os.kill(pid, signal.SIGCONT)) as caught:
        if kind.joins:
            assert_follows(before, advance(collector))
    stalls = [str(w.message) for w in caught if "it is stopped" in str(w.message)]
    assert len(stalls) == 1
    assert f"Worker 1 (pid {pid})" in stalls[0]
    seen: set[int] = set()
    deadline = time.monotonic() + 20
    while len(seen) < 2:  # both of them work
        assert time.monotonic() < deadline
        batch = advance(collector)
        seen |= set(batch["observation"][..., 0].flatten().int().tolist())
    assert not collector.stats()["lost_frames"]


@over([ASYNC])
def test_the_others_of_a_stopped_worker_go_on(make: Make) -> None:
    collector = make()
    advance(collector)
    pid = collector.worker_pids[1]
    os.kill(pid, signal.SIGSTOP)
    until(lambda: is_stopped(pid))
    for _ in range(20):
        with within(5):
            assert_frames_belong(collector.next())
    os.kill(pid, signal.SIGCONT)


@over(ALL_FALLIBLE, needs="run_there")
def test_a_step_that_takes_long_is_named(make: Make, kind: Kind, tmp_path: Path) -> None:
    collector = make(doing(lambda: until((tmp_path / "go on").exists), at=5), stall_warning_s=0.5)
    with naming_a_stall(collector, (tmp_path / "go on").touch) as caught:
        pass
    assert caught[0].category is StallWarning
    assert "Worker 1" in str(caught[0].message)
    assert "takes long" in str(caught[0].message)


@over(ALL_FALLIBLE)
def test_a_slow_consumer_is_no_stall(make: Make) -> None:
    collector = make(stall_warning_s=0.6)
    advance(collector)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        time.sleep(0.9)  # the trainer trains
        advance(collector)
        collector.state_dict()


@pytest.mark.parametrize("waits", ["pause", "rate limiter"])
@over([STARTED])
def test_a_worker_that_waits_for_others_is_no_stall(make: Make, waits: str) -> None:
    limiter = RateLimiter(samples_per_insert=1.0, min_size_to_sample=10) if waits == "rate limiter" else None
    collector = make(replay_buffer=buffer(batch_size=16, rate_limiter=limiter), stall_warning_s=0.6)
    advance(collector)
    with warnings.catch_warnings(), collector.pause() if waits == "pause" else contextlib.nullcontext():
        warnings.simplefilter("error")
        deadline = time.monotonic() + 1.2
        while time.monotonic() < deadline:
            assert collector.is_running()
            time.sleep(0.05)


@over([SYNC])
def test_a_worker_that_makes_no_step_for_too_long_is_a_failure(make: Make) -> None:
    collector = make(doing(sleep_long, at=3), stall_timeout_s=1.0, stall_warning_s=50.0)
    with pytest.raises(WorkerDiedError, match="no step for stall_timeout_s=1 s") as caught:
        collector.next()
    assert caught.value.index == 1
    assert "memory" not in repr(caught.value), "the usual cause of a SIGKILL is not this one's"


# -- the server that starts workers --------------------------------------------------------------------------------


@over(ALL_FALLIBLE)
def test_the_server_of_the_workers_is_killed(make: Make, kind: Kind) -> None:
    collector = make()
    advance(collector)
    pids = collector.worker_pids
    server = server_of_workers()
    os.kill(server.pid, signal.SIGKILL)
    server.wait(10)
    with within(4):
        error = advance_until_it_raises(collector)
    assert isinstance(error, WorkerDiedError)
    assert "how is not known" in str(error)
    assert "server" in str(error)
    until(lambda: all(map(is_gone, pids)), 5)
    collector.shutdown(raise_on_error=False)
    assert advance(make()) is not None  # with a new server


@over([SYNC])
def test_the_server_is_killed_while_nobody_needs_it(make: Make) -> None:
    make().shutdown()
    server = server_of_workers()
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: is_gone(server.pid))
    assert_frames_belong(make().next())
