"""Workers behind sockets that fail are restarted or dropped as processes are: the same tests, with other deaths."""

import gc
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_sharer
from typing import Any

import pytest
import test_restarts
from common import until
from fault_tools import doing, within
from kinds import Kind, Make, joined, over
from socket_carrier import SocketCarrier
from socket_kinds import SOCKET_STARTED, SOCKET_SYNC, TWINS

from swath.errors import ChannelClosedError, StallWarning
from swath.runtime.memory import MemoryBlock

pytestmark = test_restarts.pytestmark


@pytest.fixture(scope="session", autouse=True)
def _server_of_descriptors() -> None:
    """Buffers that come in bytes bring their memory by way of a thread, which stays."""
    pickle.loads(pickle.dumps(MemoryBlock(1)))


@pytest.fixture(autouse=True)
def _deaths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """To kill a worker means that its connection ends: from here, or from within."""
    kill, exit_at_once, carriers = os.kill, os._exit, list[SocketCarrier]()
    init = SocketCarrier.__init__

    def keep(carrier: SocketCarrier, *args: Any) -> None:
        carriers.append(carrier)
        init(carrier, *args)

    def end(code: int = 1) -> None:
        if threading.current_thread() is threading.main_thread():
            exit_at_once(code)
        raise ChannelClosedError("This worker has died.")

    def signal_to(pid: int, number: int) -> None:
        workers = {carrier.pid(index): (carrier, index) for carrier in carriers for index in carrier.workers}
        if pid == os.getpid():
            end()
        elif pid in workers:
            assert number == signal.SIGKILL
            carrier, index = workers[pid]
            carrier.kill(index)
        else:
            kill(pid, number)

    monkeypatch.setattr(SocketCarrier, "__init__", keep)
    monkeypatch.setattr(os, "kill", signal_to)
    monkeypatch.setattr(os, "_exit", end)
    yield
    carriers.clear()


RELEASED = threading.Event()


def hang() -> None:
    """Until the test is over: a thread cannot be killed before it comes back."""
    assert RELEASED.wait(60)


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    RELEASED.clear()
    threads = threading.active_count()
    yield
    RELEASED.set()
    until(lambda: threading.active_count() <= threads, 5)
    gc.collect()  # what a thread that has hung held
    untaken = resource_sharer._resource_sharer._cache  # memory that was sent to a worker which died before it took it
    while untaken:
        _, close = untaken.popitem()[1]
        close()


@over([SOCKET_SYNC])
def test_a_worker_that_hangs_is_given_up_and_replaced(make: Make, tmp_path: Any) -> None:
    envs = doing(hang, once=str(tmp_path / "done"), at=15)
    collector = make(envs, on_worker_failure="restart", stall_warning_s=0.3, stall_timeout_s=1.0)
    diary = test_restarts.Diary()
    diary.add(collector.next())
    with pytest.warns(StallWarning, match="Worker 1"):
        diary.add(collector.next())
    diary.add(collector.next())
    diary.check([0], [1])
    assert collector.stats()["worker_restarts"] == 1


@over([SOCKET_SYNC, SOCKET_STARTED])
def test_shutdown_does_not_wait_for_a_worker_that_hangs(make: Make, kind: Kind) -> None:
    collector = make(doing(hang, at=15))
    if kind.starts:
        until(lambda: collector.stats("per_worker")["worker_0/frames"] > 0)
    else:
        collector.next()
    with within(3):
        collector.shutdown(timeout=1.0)


CANNOT = {
    "test_a_worker_that_hangs_is_killed_by_the_user_and_replaced": "a thread that sleeps for an hour cannot be ended",
}
"""Tests of processes, and why they are not for workers over sockets."""
globals().update(joined(test_restarts, TWINS, CANNOT))
