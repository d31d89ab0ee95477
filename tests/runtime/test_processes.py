"""ProcessCarrier: processes that are started, waited for, die, hang and are stopped."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from children import is_gone
from jobs import Doing, hear, server, sleep, sleep_deaf, until

from swath.runtime import Failure, MemoryBlock
from swath.runtime.board import Board
from swath.runtime.carrier import (
    Answer,
    Ended,
    Failed,
    Finished,
    Link,
    Order,
    Packed,
    Question,
    Started,
    Stop,
    Warned,
)
from swath.runtime.columns import Columns, Leaf, Place
from swath.runtime.process import start
from swath.runtime.processes import ProcessCarrier

pytestmark = pytest.mark.timeout(60)
Start = Callable[..., ProcessCarrier]


def ready(carrier: ProcessCarrier) -> ProcessCarrier:
    """The carrier, when all its workers have said that they are ready."""
    assert all(isinstance(news, Started) for _, news in hear(carrier, len(carrier.workers)))
    return carrier


def ask(carrier: ProcessCarrier, request: Any) -> Any:
    """What worker 0 answers."""
    carrier.send(0, Question(1, request))
    ((_, answer),) = hear(carrier, 1)
    assert isinstance(answer, Answer)
    assert isinstance(answer.value, Packed), answer
    return pickle.loads(answer.value.data)


# -- messages and ends -----------------------------------------------------------------------------------------------


def test_waiting_has_an_end(start_workers: Start) -> None:
    carrier = ready(start_workers(Doing()))
    begun = time.monotonic()
    assert not carrier.wait(0.1)
    assert carrier.receive() == []
    assert 0.09 < time.monotonic() - begun < 2


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (lambda job: os._exit(3), 3),
        (lambda job: sys.exit(4), 4),
        (lambda job: sys.exit("why"), 1),
        (lambda job: os.kill(os.getpid(), signal.SIGKILL), -9),
        (lambda job: os.kill(os.getpid(), signal.SIGSEGV), -11),
    ],
)
def test_ends_are_told(start_workers: Start, request_: Any, code: int) -> None:
    carrier = ready(start_workers(Doing()))
    carrier.send(0, Question(1, request_))
    assert hear(carrier, 1) == [(0, Ended(code))]
    assert carrier.alive() == []
    assert carrier.workers == [0], "it is there until it is stopped"
    carrier.send(0, Order(1, "to nobody"))
    assert not carrier.wait(0.05), "an end is told once"


def test_a_worker_that_is_asked_to_stop_ends_well(start_workers: Start) -> None:
    block = MemoryBlock(8)
    task = Doing()
    task.stop = lambda: block.array((1,), "int64").fill(1)  # type: ignore[method-assign]
    carrier = ready(start_workers(task))
    carrier.send(0, Stop())
    assert hear(carrier, 1) == [(0, Ended(0))]
    assert block.array((1,), "int64") == 1, "its job was stopped before"


@pytest.mark.parametrize(
    ("task", "doing"),
    [
        (Doing(begin=lambda link: 1 / 0), "being made"),
        (Doing(begin=lambda link: sys.exit(4)), "being made"),
        (Doing(work=lambda link, order: 1 / 0), "collecting"),
        (Doing(work=lambda link, order: sys.exit(4)), "collecting"),
    ],
)
def test_an_error_is_told_before_the_end(start_workers: Start, task: Doing, doing: str) -> None:
    carrier = start_workers(task)
    carrier.send(0, Order(1, "x"))
    *_, (_, failed), end = hear(carrier, 2 if doing == "being made" else 3)
    assert isinstance(failed, Failed)
    assert failed.doing == doing
    assert "ZeroDivisionError" in failed.failure.summary or "SystemExit" in failed.failure.summary
    assert end == (0, Ended(1))


def test_the_end_comes_after_everything_else(start_workers: Start) -> None:
    def talk(link: Link) -> None:
        for number in range(500):
            link.send(Finished(number, b"x" * 1000))
        os._exit(5)

    news = hear(start_workers(Doing(begin=talk)), 501)
    assert [message.ticket for _, message in news[:-1]] == list(range(500))  # type: ignore[union-attr]
    assert news[-1] == (0, Ended(5))


def test_the_server_is_stopped(start_workers: Start) -> None:
    """There is no process to tell how a worker ended; its end is told all the same."""
    carrier = start_workers(Doing(begin=sleep))
    hear(carrier, 1)
    process = server()
    process.suspend()
    try:
        carrier.kill(0)
        begun = time.monotonic()
        assert hear(carrier, 1) == [(0, Ended(None))]
        assert time.monotonic() - begun < 4
    finally:
        process.resume()


def test_a_server_that_is_killed_while_a_worker_is_started(start_workers: Start) -> None:
    """Another takes its place; it had seemed to be there when it was asked."""
    carrier, process = start_workers(workers=1), server()
    process.suspend()
    thread = threading.Thread(target=carrier.start, args=(0, Doing()))
    thread.start()
    time.sleep(0.3)
    process.kill()
    thread.join(30)
    assert hear(carrier, 1) == [(0, Started("ready"))]
    assert server().pid != process.pid


@pytest.mark.parametrize("begin", [sleep, sleep_deaf])
def test_workers_that_do_not_hear_are_ended(start_workers: Start, begin: Any) -> None:
    carrier = start_workers(Doing(begin=begin), Doing())
    hear(carrier, 2)
    begun = time.monotonic()
    carrier.shutdown(1.0)
    assert time.monotonic() - begun < 2
    assert carrier.workers == []
    carrier.shutdown()


def test_a_stopped_worker_is_ended_at_once(start_workers: Start) -> None:
    carrier = ready(start_workers(Doing()))
    assert not carrier.is_stopped(0)
    os.kill(carrier.pid(0), signal.SIGSTOP)
    until(lambda: carrier.is_stopped(0))
    begun = time.monotonic()
    carrier.shutdown()
    assert time.monotonic() - begun < 1


def test_a_new_worker_in_the_place_of_another(start_workers: Start) -> None:
    carrier = ready(start_workers(Doing(), Doing(), Doing()))
    former = carrier.pid(1)
    carrier.start(1, Doing(begin=lambda link: "new"))
    assert carrier.pid(1) != former
    assert carrier.workers == [0, 1, 2]  # in order
    assert hear(carrier, 1) == [(1, Started("new"))]
    assert is_gone(former)


def test_a_fork_of_this_process_leaves_the_workers_alone(start_workers: Start) -> None:
    carrier = ready(start_workers(Doing()))
    pid = os.fork()
    if not pid:
        carrier.shutdown()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert ask(carrier, lambda job: 1) == 1


class Unreadable:
    def __reduce__(self) -> Any:
        return (lambda: {}["missing"]), ()


@pytest.mark.parametrize("what", ["its task", "a message"])
def test_what_cannot_be_read(start_workers: Start, what: str) -> None:
    carrier = start_workers(Unreadable()) if what == "its task" else ready(start_workers(Doing()))
    carrier.send(0, Question(1, Unreadable()))
    (_, failed), end = hear(carrier, 2)
    assert isinstance(failed, Failed)
    assert failed.doing == f"reading {what}"
    assert isinstance(failed.failure.error(""), KeyError)
    assert end == (0, Ended(1))


def test_an_answer_that_cannot_be_sent(start_workers: Start) -> None:
    carrier = ready(start_workers(Doing()))
    carrier.send(0, Question(1, lambda job: job.link))
    ((_, answer),) = hear(carrier, 1)
    assert isinstance(answer, Answer)
    assert isinstance(answer.failure, Failure)
    assert ask(carrier, lambda job: "alive") == "alive"


def test_a_task_that_cannot_be_sent_starts_nothing(start_workers: Start) -> None:
    carrier = start_workers(workers=1)
    with pytest.raises(RuntimeError, match="is generator"):
        carrier.start(0, Doing(begin=(number for number in range(3))))  # type: ignore[arg-type]
    assert carrier.workers == []


@pytest.mark.parametrize("shows_all", [True, False])
def test_warnings_are_forwarded(start_workers: Start, shows_all: bool) -> None:
    """All of them, or those of this library."""

    def warn(link: Link) -> None:
        from swath.errors import StallWarning

        warnings.warn("not ours", UserWarning, stacklevel=1)
        warnings.warn("ours", StallWarning, stacklevel=1)

    *told, (_, started) = hear(start_workers(Doing(begin=warn), warns=shows_all), 3 if shows_all else 2)
    texts = [news.text for _, news in told if isinstance(news, Warned)]
    assert isinstance(started, Started)
    assert texts[-1] == "ours"
    assert [text.startswith("not ours (") for text in texts] == ([True, False] if shows_all else [False])


@pytest.mark.parametrize("is_known", [True, False])
def test_warnings_of_classes_that_cannot_be_imported(start_workers: Start, is_known: bool) -> None:
    """Those of the user's script come back as what they are, those that a worker has made as what they derive from."""
    MyWarning = type("MyWarning", (UserWarning,), {"__module__": "__main__"})

    def warn(link: Link) -> None:
        kind = MyWarning
        if not is_known:
            kind = type("Own", (MyWarning,), {"lock": threading.Lock(), "__module__": "__main__"})
        warnings.warn("mine", kind, stacklevel=1)

    (_, told), (_, started) = hear(start_workers(Doing(begin=warn), warns=True), 2)
    assert isinstance(started, Started), started
    assert isinstance(told, Warned)
    assert told.category is MyWarning
    assert told.text.startswith("mine" if is_known else "Own: mine")


def test_another_descriptor_can_be_watched(start_workers: Start) -> None:
    carrier = ready(start_workers(Doing()))
    reading, writing = os.pipe()
    carrier.watch(reading)
    assert not carrier.wait(0.0)
    os.write(writing, b"x")
    assert carrier.wait(5.0)
    assert carrier.receive() == []
    os.close(reading)
    os.close(writing)


def test_what_is_written_on_a_board() -> None:
    board = Board(2, ("frames", "episodes"), private=True)
    row = board.row(0)
    row.report({"frames": 12.0, "unknown": 1.0})
    assert [row.beat(1), row.beat(1), row.is_interrupted(1)] == [False] * 3
    assert board.report(0) == {"steps": 2.0, "frames": 12.0, "episodes": 0.0}
    assert (board.heartbeat(0), board.unreported_steps(0)) == (4, 2), "all that it does is a sign of life"
    assert board.report(1) == {"steps": 0.0, "frames": 0.0, "episodes": 0.0}


# -- data and weights --------------------------------------------------------------------------------------------------


def write_ticket(link: Link, order: Order) -> tuple[int, int]:
    """Write the ticket to the order's place; the memory's identity, and how much of it the job knows of."""
    memory = link.memory(order.place)  # type: ignore[arg-type]
    memory.tensors["n"].fill_(order.ticket)
    return id(memory), len(os.listdir("/proc/self/fd"))


def test_memory_is_sent_once_and_forgotten_when_it_is_no_longer_used(start_workers: Start) -> None:
    carrier = ready(start_workers(Doing(work=write_ticket)))
    leaves = {"n": Leaf((), torch.int64)}

    def write(memory: Columns, ticket: int) -> tuple[int, int]:
        carrier.send(0, Order(ticket, None, Place(memory, 0, 2)))
        ((_, finished),) = hear(carrier, 1)
        assert (memory.tensors["n"] == ticket).all()
        return finished.receipt  # type: ignore[union-attr, return-value]

    kept = carrier.lease(leaves, (2, 3), None)
    same, descriptors = write(kept, 1)
    for ticket in range(2, 20):
        other = carrier.lease(leaves, (2, 3), None)
        write(other, ticket)
        assert write(kept, 100 + ticket) == (same, descriptors), "the same object, and nothing is left open"
        del other

    def mapped(job: Any) -> int:
        with open("/proc/self/maps") as maps:
            return sum("swath" in line or "memfd" in line for line in maps)

    assert ask(carrier, mapped) < 10


# -- their surroundings ------------------------------------------------------------------------------------------------


@pytest.fixture
def manager() -> Iterator[Any]:
    with multiprocessing.get_context("fork").Manager() as manager:
        manager.dict()["connected"] = True  # from now on there is a connection, which stays
        start(lambda channel: None, "spawn").channel.close()  # as does the server of processes that are spawned
        yield manager


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_a_worker_may_use_what_a_manager_of_the_parent_offers(manager: Any, start_workers: Start, method: str) -> None:
    offered = manager.dict()

    def write(link: Link) -> None:
        offered["written by"] = os.getpid()

    carrier = ready(start_workers(Doing(begin=write), method=method))
    assert offered["written by"] == carrier.pid(0)


def test_a_worker_has_no_sockets_of_others(start_workers: Start) -> None:
    def look(link: Link) -> int:
        modes = []
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                modes.append(os.fstat(fd).st_mode)
        return sum(map(stat.S_ISSOCK, modes))

    told = hear(start_workers(*(Doing(begin=look) for _ in range(3))), 3)
    assert sorted(told) == [(index, Started(1)) for index in range(3)]


@pytest.mark.parametrize("threads", [1, 2])
def test_torch_has_as_many_threads_as_it_was_given(start_workers: Start, threads: int) -> None:
    assert ask(ready(start_workers(Doing(), threads=threads)), lambda job: torch.get_num_threads()) == threads


def test_unknown_methods_are_refused(start_workers: Start) -> None:
    with pytest.raises(ValueError, match="one of"):
        start_workers(Doing(), method="thread")


def test_a_worker_draws_numbers_of_its_own(start_workers: Start) -> None:
    def draw(link: Link) -> tuple[float, ...]:
        import random

        import numpy as np
        import torch

        return random.random(), np.random.rand(), float(torch.rand(()))

    told = [news.description for _, news in hear(start_workers(Doing(begin=draw), Doing(begin=draw)), 2)]  # type: ignore[union-attr]
    assert len({number for numbers in told for number in numbers}) == 6  # type: ignore[attr-defined]
