"""Processes are started from programs that fork, and on systems that lack something."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import platform
import resource
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from children import child, hear, importing_env, is_gone, until

from swath.runtime import MemoryBlock
from swath.runtime.channel import Channel
from swath.runtime.process import Process, start

pytestmark = pytest.mark.timeout(60)


def wait_long(channel: Channel) -> None:
    time.sleep(3600)


def end_of(process: Process) -> int | None:
    """How it has ended, when it was killed."""
    process.signal(9)
    assert process.wait(10)
    return process.exitcode


# -- forks -------------------------------------------------------------------------------------------------------------


SIGNAL_WITHIN_A_FORK = """
import os, signal, threading, time

is_forking = False
os.register_at_fork(after_in_parent=lambda: is_forking and os.kill(os.getpid(), signal.SIGUSR1))  # before ours

from swath.runtime.process import start

def work(channel):
    time.sleep(3600)

def handle(*_):
    thread = threading.Thread(target=lambda: print(start(work, "spawn").pid > 0), daemon=True)
    thread.start()
    thread.join(20.0)
    print("handled", flush=True)

if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, handle)
    is_forking = True
    if not os.fork():
        os._exit(0)
    is_forking = False
"""


def test_a_signal_handler_within_a_fork_waits_for_no_thread_that_waits_for_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SIGNAL_WITHIN_A_FORK)
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=importing_env(), capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.split() == ["True", "handled"], done


def test_a_fork_while_another_thread_starts_the_first_worker() -> None:
    """The child can start processes of its own, and holds nothing by which the server tells that its parent lives."""

    def live(pipe: Any) -> None:
        begun, popen, started = threading.Event(), subprocess.Popen, list[Process]()

        def slow(*args: Any, **options: Any) -> Any:
            begun.set()
            time.sleep(0.5)
            return popen(*args, **options)

        subprocess.Popen = slow  # type: ignore[assignment, misc]
        thread = threading.Thread(target=lambda: started.append(start(wait_long, "spawn")))
        thread.start()
        begun.wait()
        pid = os.fork()
        if not pid:
            pipe.send(start(wait_long, "spawn").pid)
            time.sleep(3600)
        thread.join()
        pipe.send((pid, started[0].pid))
        time.sleep(3600)

    with child(live) as (process, pipe):
        told = [hear(pipe), hear(pipe)]
        ((forked, of_parent),), (of_child,) = ([one for one in told if isinstance(one, kind)] for kind in (tuple, int))
        try:
            process.kill()
            until(lambda: is_gone(of_parent), 10)
            assert not is_gone(of_child)
        finally:
            os.kill(forked, 9)
        until(lambda: is_gone(of_child), 10)


def fork_after_openmp(pipe: Any) -> None:
    torch.set_num_threads(2)
    torch.rand(1_000_000).exp()

    def work(channel: Channel) -> None:
        torch.rand(1_000_000).exp()
        channel.send(torch.get_num_threads())

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        process = start(work, "fork", threads=2)
    pipe.send(["forkserver" in str(one.message) for one in told])
    with contextlib.suppress(TimeoutError):
        pipe.send(process.channel.receive(10))
    end_of(process)


def test_a_fork_with_several_threads_after_openmp_was_used() -> None:
    """It would wait for ever: it has one thread, and that is told."""
    with child(fork_after_openmp, context=multiprocessing.get_context("spawn")) as (_, pipe):
        assert hear(pipe) == [True]
        assert hear(pipe) == 1


# -- systems -----------------------------------------------------------------------------------------------------------


def without(*names: str) -> Callable[[], None]:
    """An interpreter that was built where there was no such thing."""
    return lambda: [delattr(os, name) for name in names] and None


def refuse() -> None:
    """A system that refuses memfd_create and pidfd_open to this process, and to all that stems from it (seccomp)."""
    memfd_create = {"x86_64": 319, "aarch64": 279}[platform.machine()]
    load, equal, result, allow, not_permitted = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050001
    steps = [(load, 0, 0, 0), (equal, 1, 0, memfd_create), (equal, 0, 1, 434)]
    steps += [(result, 0, 0, not_permitted), (result, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0, "no new privileges"
    assert libc.prctl(22, 2, ctypes.byref(program)) == 0, "a filter for system calls"
    with pytest.raises(OSError, match="not permitted"):
        os.pidfd_open(os.getpid())


@pytest.mark.parametrize("change", [without("memfd_create", "pidfd_open"), refuse], ids=["missing", "refused"])
def test_memory_and_processes_without_memfd_and_pidfd(change: Callable[[], None]) -> None:
    def live(pipe: Any) -> None:
        change()
        block = MemoryBlock(8)

        def write(channel: Channel) -> None:
            received = channel.receive()
            received.array((1,), "int64")[:] = 7
            channel.send("written")
            time.sleep(3600)

        process = start(write, "fork")
        process.channel.send(block)
        process.channel.receive(20)
        pipe.send((int(block.array((1,), "int64")[0]), process.wait(0.1), end_of(process)))

    if change is refuse and platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("the numbers of system calls are known for two machines")
    with child(live) as (_, pipe):
        assert hear(pipe) == (7, False, -9)


def test_more_descriptors_than_select_knows() -> None:
    def live(pipe: Any) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if 0 < hard < 4096 else 4096, hard))
        kept = [os.dup(0) for _ in range(1200)]
        pipe.send(end_of(start(wait_long, "spawn")))
        assert kept

    with child(live) as (_, pipe):
        assert hear(pipe) == -9


def test_a_working_directory_that_was_removed(tmp_path: Path) -> None:
    def live(pipe: Any) -> None:
        os.chdir(tmp_path)
        tmp_path.rmdir()
        process = start(lambda channel: channel.send(os.getpid()))
        pipe.send(process.channel.receive(20) == process.pid)

    with child(live) as (_, pipe):
        assert hear(pipe)
