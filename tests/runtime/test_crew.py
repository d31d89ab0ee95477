"""Crews: processes that are hired, waited for, die, hang and are ended."""

import contextlib
import multiprocessing
import os
import signal
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from swath.runtime import Channel, Crew, Died, Goodbye, MemoryBlock
from swath.runtime import process as process_module
from swath.runtime.process import start

pytestmark = pytest.mark.timeout(60)
Hire = Callable[..., Crew]


def echo(channel: Channel) -> None:
    """Answer each message with itself, until told to end."""
    while not isinstance(message := channel.receive(), Goodbye):
        channel.send((os.getpid(), message))


def sleep(channel: Channel) -> None:
    channel.send("asleep")
    time.sleep(3600)


def sleep_deaf(channel: Channel) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel.send("asleep")
    time.sleep(3600)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def hire() -> Iterator[Hire]:
    """Makes crews, whose processes and descriptors must be gone after the test."""
    made: list[Crew] = []
    pids: list[int] = []

    def crew_of(*targets: Any, **options: Any) -> Crew:
        crew = Crew(**options)
        made.append(crew)
        for index, target in enumerate(targets):
            pids.append(crew.hire(index, target).pid)
        return crew

    start(echo).channel.close()  # the server stays
    time.sleep(0.1)
    before = len(os.listdir("/proc/self/fd"))
    yield crew_of
    for crew in made:
        crew.shutdown()
    made.clear()
    deadline = time.monotonic() + 5
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before


def hear(crew: Crew, count: int, seconds: float = 20.0) -> list[tuple[int, Any]]:
    """The next `count` things that come."""
    deadline, news = time.monotonic() + seconds, []
    while len(news) < count:
        assert time.monotonic() < deadline, f"only {news} has come"
        news += crew.wait(1.0)
    return news


def test_workers_answer(hire: Hire) -> None:
    crew = hire(echo, echo)
    for index in (0, 1):
        crew.send(index, f"to {index}")
    pids = [process.pid for process in crew.processes.values()]
    assert sorted(hear(crew, 2)) == [(0, (pids[0], "to 0")), (1, (pids[1], "to 1"))]
    assert crew.alive() == [0, 1]
    assert len(crew) == 2


def test_waiting_has_an_end(hire: Hire) -> None:
    crew = hire(echo)
    begun = time.monotonic()
    assert crew.wait(0.1) == []
    assert 0.09 < time.monotonic() - begun < 2


@pytest.mark.parametrize(
    ("target", "code"),
    [
        (lambda channel: os._exit(3), 3),
        (lambda channel: sys.exit(4), 4),
        (lambda channel: sys.exit("why"), 1),
        (lambda channel: None, 0),
        (lambda channel: os.kill(os.getpid(), signal.SIGKILL), -9),
        (lambda channel: os.kill(os.getpid(), signal.SIGSEGV), -11),
        (lambda channel: 1 / 0, 1),
    ],
)
def test_ends_are_told(hire: Hire, target: Any, code: int) -> None:
    crew = hire(target)
    assert hear(crew, 1) == [(0, Died(code))]
    assert crew.alive() == []
    assert crew.processes[0].exitcode == code
    error = crew.death(0, Died(code), "testing")
    assert str(crew.processes[0].pid) in str(error)


def test_the_end_comes_after_everything_else(hire: Hire) -> None:
    def talk(channel: Channel) -> None:
        for number in range(500):
            channel.send((number, b"x" * 1000))
        os._exit(5)

    crew = hire(talk)
    news = hear(crew, 501)
    assert [message[0] for _, message in news[:-1]] == list(range(500))
    assert news[-1] == (0, Died(5))


def test_a_worker_that_closes_its_channel_is_ended(hire: Hire) -> None:
    def close(channel: Channel) -> None:
        channel.close()
        time.sleep(3600)

    crew = hire(close)
    assert hear(crew, 1) == [(0, Died(-9))]


def test_a_child_that_outlives_a_worker_keeps_nobody_waiting(hire: Hire) -> None:
    def leave_a_child(channel: Channel) -> None:
        channel.send("last")
        copy = os.dup(channel.fileno())
        if not os.fork():
            time.sleep(5)
            os._exit(copy)
        os._exit(6)

    crew = hire(leave_a_child)
    begun = time.monotonic()
    assert hear(crew, 2) == [(0, "last"), (0, Died(6))]
    assert time.monotonic() - begun < 4


def test_the_server_is_killed(hire: Hire) -> None:
    crew = hire(sleep)
    hear(crew, 1)
    server = process_module._servers["forkserver"]._popen
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    assert hear(crew, 1) == [(0, Died(None))]
    other = hire(echo)
    other.send(0, 1)
    assert hear(other, 1)[0][1][1] == 1


def test_the_server_is_stopped(hire: Hire) -> None:
    """Nobody is there to tell how a worker ended; it is told of all the same."""
    crew = hire(sleep)
    hear(crew, 1)
    server = process_module._servers["forkserver"]._popen.pid
    os.kill(server, signal.SIGSTOP)
    try:
        os.kill(crew.processes[0].pid, signal.SIGKILL)
        begun = time.monotonic()
        assert hear(crew, 1) == [(0, Died(None))]
        assert time.monotonic() - begun < 4
    finally:
        os.kill(server, signal.SIGCONT)


@pytest.mark.parametrize("target", [sleep, sleep_deaf])
def test_workers_that_do_not_hear_are_ended(hire: Hire, target: Any) -> None:
    crew = hire(target, echo)
    hear(crew, 1)
    begun = time.monotonic()
    crew.shutdown(1.0)
    assert time.monotonic() - begun < 2
    crew.shutdown()


def test_a_stopped_worker_is_ended_at_once(hire: Hire) -> None:
    crew = hire(echo)
    os.kill(crew.processes[0].pid, signal.SIGSTOP)
    while not crew.processes[0].is_stopped:
        time.sleep(0.001)
    begun = time.monotonic()
    crew.shutdown()
    assert time.monotonic() - begun < 1


def test_a_new_worker_in_the_place_of_another(hire: Hire) -> None:
    crew = hire(echo, echo, echo)
    former = crew.processes[1].pid
    process = crew.hire(1, echo)
    assert process.pid != former
    assert list(crew.processes) == [0, 1, 2]  # in order
    crew.send(1, "x")
    assert hear(crew, 1) == [(1, (process.pid, "x"))]
    assert is_gone(former)


def test_what_was_put_back_comes_first(hire: Hire) -> None:
    crew = hire(echo)
    crew.unread([(0, "a"), (0, "b")])
    crew.send(0, "c")
    assert hear(crew, 3)[:2] == [(0, "a"), (0, "b")]


def test_a_warning_that_is_an_error_loses_nothing(hire: Hire) -> None:
    def warn(channel: Channel) -> None:
        channel.send("before")
        warnings.warn("beware", UserWarning, stacklevel=1)
        channel.send("after")
        echo(channel)

    crew = hire(warn, warns=True)
    got: list[Any] = []
    caught: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deadline = time.monotonic() + 20
        while len(got) < 2:
            assert time.monotonic() < deadline
            try:
                got += crew.wait(1.0)
            except UserWarning as warning:
                caught.append(str(warning))
    assert got == [(0, "before"), (0, "after")]
    assert [text.startswith("Worker 0: beware") for text in caught] == [True]


def test_a_task_that_cannot_be_read(hire: Hire) -> None:
    class Unreadable:
        def __call__(self, channel: Channel) -> None: ...

        def __reduce__(self) -> Any:
            return (lambda: {}["missing"]), ()

    crew = hire(Unreadable())
    with pytest.raises(KeyError, match="missing"):
        hear(crew, 1)


def test_memory_goes_along_with_the_task(hire: Hire) -> None:
    block = MemoryBlock(64)

    def write(channel: Channel) -> None:
        block.array((8,), "int64")[:] = 9
        channel.send("done")

    crew = hire(write)
    assert hear(crew, 1) == [(0, "done")]
    assert (block.array((8,), "int64") == 9).all()


@pytest.fixture
def manager() -> Iterator[Any]:
    with multiprocessing.get_context("fork").Manager() as manager:
        manager.dict()["connected"] = True  # from now on there is a connection, which stays
        start(echo, "spawn").channel.close()  # as does the server of processes that are spawned
        yield manager


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_a_worker_may_use_what_a_manager_of_the_parent_offers(manager: Any, hire: Hire, method: str) -> None:
    offered = manager.dict()

    def write(channel: Channel) -> None:
        offered["written by"] = os.getpid()
        channel.send("done")
        channel.receive()

    crew = hire(write, method=method)
    assert hear(crew, 1) == [(0, "done")]
    assert offered["written by"] == crew.processes[0].pid


def test_a_worker_has_no_sockets_of_others(hire: Hire) -> None:
    def look(channel: Channel) -> None:
        modes = []
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                modes.append(os.fstat(fd).st_mode)
        channel.send(sum(map(stat.S_ISSOCK, modes)))
        echo(channel)

    assert sorted(hear(hire(look, look, look), 3)) == [(0, 1), (1, 1), (2, 1)]


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(ValueError, match="one of"):
        start(echo, "thread")


def test_a_worker_draws_numbers_of_its_own(hire: Hire) -> None:
    def draw(channel: Channel) -> None:
        import random

        import numpy as np
        import torch

        channel.send((random.random(), np.random.rand(), float(torch.rand(()))))

    drawn = [numbers for _, numbers in hear(hire(draw, draw), 2) if not isinstance(numbers, Died)]
    assert len({number for numbers in drawn for number in numbers}) == 3 * len(drawn)
