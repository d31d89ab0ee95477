"""`shutdown()` takes at most 5 s whatever the workers do, in whatever process and thread it is called."""

import gc
import os
import signal
import threading
import time
import traceback
import weakref
from typing import Any

import psutil
import pytest
from children import is_gone
from common import buffer, net, steps_of, until
from fault_tools import (
    LONG,
    advance,
    advance_quietly,
    advance_until_it_raises,
    build,
    doing,
    end,
    is_stopped,
    open_descriptors,
    sleep_deaf,
    sleep_long,
    within,
)
from inside import server_of_workers
from kinds import ALL_FALLIBLE, ASYNC, FALLIBLE, STARTED, SYNC, Kind, Make, over

from swath.data import RateLimiter
from swath.errors import ClosedError
from swath.testing import assert_follows, assert_frames_belong

pytestmark = pytest.mark.timeout(60)
CYCLES = 200 if LONG else 6
BATCHES = 5000 if LONG else 150


def assert_ends(collector: Any, seconds: float = 5.0) -> None:
    pids = collector.worker_pids
    with within(seconds):
        collector.shutdown(raise_on_error=False)
    until(lambda: all(map(is_gone, pids)), 1)
    for _ in range(2):
        with within(0.5):
            collector.shutdown()


def hung(collector: Any, worker: int = 1, steps: int = 2) -> None:
    """Let the workers collect, and wait until one of them hangs."""
    if collector.replay_buffer is None:
        threading.Thread(target=advance_quietly, args=(collector,), daemon=True).start()
    until(lambda: steps_of(collector, worker) >= steps)
    time.sleep(0.05)


@over(ALL_FALLIBLE, needs="state_ends")
def test_workers_that_do_what_they_should(make: Make, kind: Kind, tmp_path: Any) -> None:
    collector = make(doing((tmp_path / "closed").touch, at=1, where="close"))
    advance(collector)
    assert_ends(collector, 1.5)
    assert (tmp_path / "closed").exists(), "envs are closed when there is time"
    with pytest.raises(ClosedError):
        collector.state_dict()


@over(ALL_FALLIBLE, needs="report_steps")
def test_a_worker_that_hangs_in_a_step(make: Make, kind: Kind) -> None:
    collector = make(doing(sleep_long, at=3))
    hung(collector)
    assert_ends(collector)


@over(ALL_FALLIBLE)
def test_a_worker_that_is_stopped(make: Make, kind: Kind) -> None:
    collector = make()
    advance(collector)
    for pid in collector.worker_pids:
        os.kill(pid, signal.SIGSTOP)
        until(lambda pid=pid: is_stopped(pid))
    assert_ends(collector, 2.0)


@over(ALL_FALLIBLE, needs="report_steps")
def test_one_stopped_one_dead_one_hanging(make: Make, kind: Kind) -> None:
    collector = make(doing(sleep_deaf, at=3, workers=3, worker=2), frames_per_batch=30)
    hung(collector, 2)
    pids = collector.worker_pids
    os.kill(pids[0], signal.SIGSTOP)
    end(pids[1])
    assert_ends(collector)


@pytest.mark.parametrize(("deed", "seconds"), [(sleep_deaf, 5.0), (lambda: 1 / 0, 2.0)], ids=["hangs", "fails"])
@over([SYNC])
def test_a_worker_that_hangs_or_fails_while_it_closes_its_env(make: Make, deed: Any, seconds: float) -> None:
    collector = make(doing(deed, at=1, where="close"))
    advance(collector)
    assert_ends(collector, seconds)


@over([ASYNC])
def test_a_timeout_is_held(make: Make) -> None:
    collector = make(doing(sleep_deaf, at=3))
    hung(collector)
    with within(1.5):
        collector.shutdown(timeout=0.2)


@over([STARTED])
def test_during_a_rate_limited_wait(make: Make) -> None:
    collector = make(replay_buffer=buffer(batch_size=16, rate_limiter=RateLimiter(samples_per_insert=1.0)))
    advance(collector)
    assert_ends(collector, 1.5)


@over(ALL_FALLIBLE)
def test_a_collector_that_is_forgotten_ends_its_workers(kind: Kind) -> None:
    collector = build(kind)
    advance(collector)
    pids, ref = collector.worker_pids, weakref.ref(collector)
    with within(5):
        del collector
        gc.collect()
    assert ref() is None
    until(lambda: all(map(is_gone, pids)), 5)


@over(ALL_FALLIBLE, needs="report_steps")
def test_from_another_thread_while_a_batch_is_waited_for(make: Make, kind: Kind) -> None:
    collector = make(doing(sleep_long, at=3, worker=0, workers=1), frames_per_batch=50)
    outcome: list[Any] = []

    def wait() -> None:
        try:
            outcome.append(advance(collector))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    until(lambda: steps_of(collector, 0) >= 2)
    assert_ends(collector)
    thread.join(5)
    assert not thread.is_alive(), "the other thread waits for ever"
    assert isinstance(outcome[0], Exception)
    assert kind.starts or isinstance(outcome[0], ClosedError)


@over(ALL_FALLIBLE)
def test_from_several_threads_at_once(make: Make, kind: Kind) -> None:
    collector = make()
    advance(collector)
    threads = [threading.Thread(target=collector.shutdown) for _ in range(4)]
    with within(5):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert_ends(collector, 1.0)


def in_fork(deed: Any) -> int:
    """The exit code of a fork of this process that does something."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            deed()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@over(ALL_FALLIBLE, needs="state_ends")
def test_a_fork_of_the_parent_does_the_workers_no_harm(make: Make, kind: Kind) -> None:
    collector = make(workers=2, lengths=100, policy=net())
    before = advance(collector)

    def shut_down() -> None:
        collector.shutdown()
        collector.__del__()
        with pytest.raises(ClosedError):
            collector.state_dict()

    def use() -> None:
        with pytest.raises(ClosedError, match="fork"):
            collector.next() if not kind.starts else collector.state_dict()
        with pytest.raises(ClosedError, match="fork"):
            collector.update_policy_weights_()

    assert in_fork(shut_down) == 0
    assert in_fork(use) == 0
    if kind.starts:
        written = collector.replay_buffer.write_count
        until(lambda: collector.replay_buffer.write_count > written and collector.is_running())
    else:
        for _ in range(4):
            batch = collector.next()
            assert batch.shape[-1] == before.shape[-1]
            assert_frames_belong(batch)
    if kind.joins:
        assert_follows(batch, collector.next())
    assert collector.stats()["workers_alive"] == 2
    assert_ends(collector)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@over([SYNC])
def test_a_fork_may_have_a_collector_of_its_own(make: Make) -> None:
    collector = make()

    def collect() -> None:
        other = build(SYNC)
        assert_frames_belong(other.next())
        other.shutdown()

    assert in_fork(collect) == 0
    assert_frames_belong(collector.next())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(("kind", "method"), [(ASYNC, "spawn"), *((kind, "fork") for kind in FALLIBLE)], ids=str)
def test_other_ways_to_start_workers(make: Make, kind: Kind, method: str) -> None:
    collector = make(policy=net(1.0), mp_start_method=method)
    assert (advance(collector)["action"] == 1).all()
    if not kind.starts:
        assert_frames_belong(collector.next())
    pid = collector.worker_pids[1]
    os.kill(pid, signal.SIGKILL)
    with within(2):
        error = advance_until_it_raises(collector)
    assert f"Worker 1 (pid {pid}) was killed by SIGKILL (signal 9)" in str(error)
    assert_ends(collector)


# -- flatness ------------------------------------------------------------------------------------------------------


def figures() -> dict[str, float]:
    gc.collect()
    process = psutil.Process()
    server = psutil.Process(server_of_workers().pid)
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "rss": process.memory_info().rss / 1e6,
        "memfds": open_descriptors().get("/memfd", 0),
        "server descriptors": server.num_fds(),
        "server rss": server.memory_info().rss / 1e6,
        "server children": len(server.children()),
    }


def assert_flat(before: dict[str, float], now: dict[str, float], megabytes: float) -> None:
    print(f"\n{before}\n{now}")
    for name in ("descriptors", "threads", "memfds", "server descriptors", "server children"):
        assert now[name] <= before[name], f"{name}: {before} -> {now}"
    for name in ("rss", "server rss"):
        assert now[name] - before[name] < megabytes, f"{name}: {before} -> {now}"


@pytest.mark.timeout(900)
def test_nothing_grows_over_many_lives() -> None:
    def live(number: int) -> None:
        collector = build(FALLIBLE[number % 3], policy=net())
        advance(collector)
        collector.update_policy_weights_()
        advance(collector)
        if number % 7 == 3:
            os.kill(collector.worker_pids[0], signal.SIGKILL)
        collector.shutdown(raise_on_error=False)

    for number in range(3):
        live(number)
    before = figures()
    for number in range(CYCLES):
        live(number)
    assert_flat(before, figures(), 20.0)


@pytest.mark.timeout(900)
@over(ALL_FALLIBLE)
def test_nothing_grows_over_many_batches(make: Make, kind: Kind) -> None:
    collector = make(policy=net())
    for _ in range(50):
        advance(collector)
    before = figures()
    workers = [len(os.listdir(f"/proc/{pid}/fd")) for pid in collector.worker_pids]
    for number in range(BATCHES):
        advance(collector)
        if number % 10 == 0:
            collector.update_policy_weights_()
        if number % 100 == 0:
            collector.state_dict()
    assert_flat(before, figures(), 10.0)
    assert [len(os.listdir(f"/proc/{pid}/fd")) for pid in collector.worker_pids] <= workers
