"""What workers have started themselves ends with them, however they end, and what is to be done then is done."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import time
import weakref
from collections.abc import Callable
from multiprocessing import resource_tracker, shared_memory, util
from pathlib import Path
from typing import Any

import pytest
from children import is_gone
from jobs import Doing, hear, server, until

from swath.runtime.carrier import Link, Stop
from swath.runtime.process import start
from swath.runtime.processes import ProcessCarrier

pytestmark = pytest.mark.timeout(60)
Start = Callable[..., ProcessCarrier]
METHODS = ["forkserver", "spawn", "fork"]
SLEEP = ["sleep", "3600"]


@pytest.fixture(scope="module", autouse=True)
def _server() -> None:
    start(lambda channel: None, "spawn").channel.close()  # the server of processes that are spawned stays, too


def start_kin(link: Link) -> list[int]:
    """Processes as envs start them, one of which leaves the session, and one of which has a child."""
    made = [subprocess.Popen(SLEEP), subprocess.Popen(SLEEP, start_new_session=True)]
    shell = subprocess.Popen(["sh", "-c", "sleep 3600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
    other.start()
    resource_tracker.ensure_running()  # as shared memory of `multiprocessing` does
    link.kept = (made, shell, other)  # type: ignore[attr-defined]
    tracker = resource_tracker._resource_tracker._pid
    return [*(one.pid for one in made), shell.pid, int(shell.stdout.readline()), other.pid, tracker]  # type: ignore[list-item]


def kin_of(carrier: ProcessCarrier, index: int = 0) -> list[int]:
    """Whom the last worker that was started says that it has started."""
    ((told, started),) = hear(carrier, 1)
    assert told == index
    pids: list[int] = started.description  # type: ignore[union-attr, assignment]
    assert not any(map(is_gone, pids))
    return pids


def end_in_order(carrier: ProcessCarrier) -> None:
    carrier.send(0, Stop())


def kill(carrier: ProcessCarrier) -> None:
    os.kill(carrier.pid(0), signal.SIGKILL)


def kill_as_we_do(carrier: ProcessCarrier) -> None:
    carrier.kill(0)


ENDS = [end_in_order, ProcessCarrier.shutdown, kill, kill_as_we_do]


@pytest.mark.parametrize(
    ("method", "end"), [("spawn", kill), *((method, end) for end in ENDS for method in METHODS if method != "spawn")]
)
def test_what_a_worker_has_started_ends_with_it(start_workers: Start, method: str, end: Any) -> None:
    carrier = start_workers(Doing(begin=start_kin), method=method)
    pids = kin_of(carrier)
    if method == "fork" and end is kill:  # nobody can find one that has left its session, see NOTE [Kin]
        os.kill(pids.pop(1), signal.SIGKILL)
    if method == "fork":
        pids.pop()  # it may be that of this process
    end(carrier)
    if carrier.workers:
        hear(carrier, 1)
    until(lambda: all(map(is_gone, pids)), 5)


@pytest.mark.parametrize("end", [end_in_order, kill])
def test_shared_memory_of_an_env_is_removed(start_workers: Start, end: Any) -> None:
    """By what `multiprocessing` has started for that, in the worker: it is not killed before."""

    def begin(link: Link) -> str:
        link.kept = shared_memory.SharedMemory(create=True, size=8)  # type: ignore[attr-defined]
        return str(link.kept.name)  # type: ignore[attr-defined]

    carrier = start_workers(Doing(begin=begin))
    ((_, started),) = hear(carrier, 1)
    path = Path("/dev/shm") / started.description  # type: ignore[union-attr, operator]
    assert path.exists()
    end(carrier)
    hear(carrier, 1)
    until(lambda: not path.exists(), 5)


def test_a_server_that_is_killed_leaves_no_group(start_workers: Start) -> None:
    carrier = start_workers(Doing(begin=start_kin))
    pids = kin_of(carrier)
    server().kill()
    hear(carrier, 1)
    os.kill(pids.pop(1), signal.SIGKILL)
    until(lambda: all(map(is_gone, pids)), 5)


def test_what_belongs_to_another_worker_lives_on(start_workers: Start) -> None:
    """Even if its parent has ended, so that nobody can tell whose it is."""

    def daemonise(link: Link) -> list[int]:
        return [int(subprocess.check_output(["sh", "-c", "setsid sleep 3600 >/dev/null & echo $!"], text=True))]

    carrier = start_workers(Doing(begin=daemonise), workers=2)
    daemons = kin_of(carrier)
    until(lambda: server().pid == int(Path(f"/proc/{daemons[0]}/stat").read_text().rpartition(")")[2].split()[1]))
    time.sleep(1.1)  # the server looks once a second
    carrier.start(1, Doing(begin=start_kin))
    others = kin_of(carrier, 1)
    os.kill(carrier.pid(1), signal.SIGKILL)
    hear(carrier, 1)
    until(lambda: all(map(is_gone, others)), 5)
    assert not is_gone(daemons[0])
    carrier.shutdown()
    until(lambda: is_gone(daemons[0]), 5)


class Owner:
    """Something that is finalised."""


@pytest.mark.parametrize("method", METHODS)
def test_what_is_to_be_done_at_the_end_of_a_worker_is_done(start_workers: Start, method: str, tmp_path: Path) -> None:
    def note(name: str) -> None:
        (tmp_path / f"{name} {os.getpid()}").touch()

    def begin(link: Link) -> None:
        atexit.register(note, "atexit")
        owner = link.kept = Owner()  # type: ignore[attr-defined]
        weakref.finalize(owner, note, "weakref")
        util.Finalize(None, note, ("multiprocessing",), exitpriority=10)  # type: ignore[attr-defined]

    atexit.register(note, "of the parent")
    mine = Owner()
    finaliser = weakref.finalize(mine, note, "of the parent, too")
    try:
        carrier = start_workers(Doing(begin=begin), method=method)
        hear(carrier, 1)
        pid = carrier.pid(0)
        carrier.shutdown()
        found = sorted(path.name for path in tmp_path.iterdir())
        assert found == [f"{name} {pid}" for name in ("atexit", "multiprocessing", "weakref")]
    finally:
        atexit.unregister(note)
        finaliser.detach()


def test_the_end_of_a_worker_takes_no_longer_than_it_may(start_workers: Start) -> None:
    carrier = start_workers(Doing(begin=lambda link: atexit.register(time.sleep, 3600) and None))
    hear(carrier, 1)
    begun = time.monotonic()
    carrier.shutdown(1.0)
    assert time.monotonic() - begun < 3
