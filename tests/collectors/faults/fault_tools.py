"""What the tests of faults have in common: envs that do a deed, collectors that meet them, programs of their own."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from children import is_gone
from common import WAIT_S, buffer, net, steps_of, until
from kinds import ASYNC, FALLIBLE, SINGLE, STARTED, SYNC, Kind

from swath.testing import CountingGymEnv

__all__ = ["ASYNC", "FALLIBLE", "SINGLE", "STARTED", "SYNC", "buffer", "net", "steps_of", "until"]
"""Also what programs need, which import all that is here."""

LONG = bool(os.environ.get("SWATH_LONG"))
Deed = Callable[[], Any]


# -- time ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """A context that must not take longer. What may hang for ever is ended by the timeout of the test."""
    begun = time.monotonic()
    yield
    taken = time.monotonic() - begun
    assert taken < seconds, f"it took {taken:.2f} s instead of at most {seconds} s"


# -- processes -----------------------------------------------------------------------------------------------------


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def end(pid: int, how: int = signal.SIGKILL) -> None:
    """Send a signal, and wait until the process is gone."""
    os.kill(pid, how)
    until(lambda: is_gone(pid))


def descendants(pid: int | None = None) -> list[int]:
    """All processes that stem from `pid`, or from this one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True) if not is_gone(child.pid)]
    return []


def memory_names() -> set[str]:
    """Names in /dev/shm, where other programs of this machine have theirs too."""
    return {name for name in os.listdir("/dev/shm") if "swath" in name or name.startswith("torch_")}


def open_descriptors() -> dict[str, int]:
    """How many descriptors of each sort are open here."""
    counts: dict[str, int] = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            sort = os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]
            counts[sort] = counts.get(sort, 0) + 1
    return counts


# -- deeds ---------------------------------------------------------------------------------------------------------


def signal_itself(number: int) -> Deed:
    return lambda: os.kill(os.getpid(), number)


def exit_at_once(code: int = 3) -> Deed:
    return lambda: os._exit(code)


def sleep_long() -> None:
    time.sleep(3600)


def sleep_deaf() -> None:
    """Hang in a way that SIGTERM does not end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)


DEATHS = {
    "SIGKILL": (signal_itself(signal.SIGKILL), "was killed by SIGKILL (signal 9)"),
    "SIGSEGV": (signal_itself(signal.SIGSEGV), "was killed by SIGSEGV (signal 11)"),
    "exit": (exit_at_once(3), "has ended with exit code 3"),
}


class DeedEnv(CountingGymEnv):
    """A counting env that does something in its `at`-th call of `where` (reset, step, init or close).

    With `once`, the path of a file, that happens in one process only: not in the one that takes its place.
    """

    def __init__(
        self, deed: Deed, at: int = 25, where: str = "step", once: Any = None, pace_s: float = 0.0, **options: Any
    ) -> None:
        super().__init__(**options)
        self.deed, self.at, self.where, self.once, self.pace_s = deed, at, where, once, pace_s
        self.calls = {"init": 0, "reset": 0, "step": 0, "close": 0}
        self._passes("init")

    def _passes(self, where: str) -> None:
        self.calls[where] += 1
        if where == self.where and self.calls[where] == self.at:
            if self.once is not None:
                try:
                    os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return
            self.deed()

    def reset(self, **options: Any) -> Any:
        self._passes("reset")
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        if self.pace_s:
            time.sleep(self.pace_s)
        self._passes("step")
        return super().step(action)

    def close(self) -> None:
        self._passes("close")
        super().close()


def doing(
    deed: Deed, worker: int = 1, workers: int = 2, others_pace_s: float = 0.0, **options: Any
) -> list[Callable[[], Any]]:
    """Factories of counting envs, of which that of `worker` does a deed.

    The others may be slowed down, where the deed must be done before they have collected all frames by themselves.
    """
    options.setdefault("lengths", 7)

    def other(lane: int) -> Callable[[], Any]:
        return lambda: DeedEnv(lambda: None, lane=lane, lengths=options["lengths"], pace_s=others_pace_s)

    factories: list[Callable[[], Any]] = [other(lane) for lane in range(workers)]
    factories[worker] = lambda: DeedEnv(deed, lane=worker, **options)
    return factories


# -- collectors ----------------------------------------------------------------------------------------------------


def build(kind: Kind, envs: Any = None, policy: Any = None, **options: Any) -> Any:
    """A collector of that kind with two workers and 20 frames in a batch."""
    return kind.build(envs, policy, **{"lengths": 7, "frames_per_batch": 20, **options})


def advance(collector: Any) -> Any:
    """The next batch, as this kind of collector gives it; notices within one call what has gone wrong."""
    if collector.replay_buffer is None:
        return collector.next()
    return collector.replay_buffer.sample()


def advance_until_it_raises(collector: Any, seconds: float = WAIT_S) -> BaseException:
    """The error that comes of going on."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            advance(collector)
        except Exception as error:
            return error
        if collector.replay_buffer is not None:
            time.sleep(0.005)  # a trainer does something with its batch
    raise AssertionError(f"nothing was raised for {seconds} s")


def told(error: BaseException) -> str:
    """All that an error says: its text, its notes, and its cause."""
    notes = "\n".join(getattr(error, "__notes__", []))
    return f"{error}\n{notes}\n{error.__cause__}"


# -- programs ------------------------------------------------------------------------------------------------------

BEGIN = """
import os, signal, sys, threading, time
sys.path[:0] = {here!r}
from swath.runtime import process; process.PRELOADED += ("swath.testing", "psutil", "pytest")
from swath.runtime.server import preload
preload(["swath.collectors"])  # without torch's compiler, which takes as long as all the rest, and is not used
import fault_tools
globals().update(vars(fault_tools))
"""
HERE = [str(Path(__file__).parents[above]) for above in range(3)]


class Program:
    """A Python program in a session of its own, with all its descendants; nothing of it outlives the context."""

    def __init__(self, text: str, how: str = "-c", tmp_path: Path | None = None, **options: Any) -> None:
        """Start `text` behind the usual imports: with "-c", from a "file", or from "stdin"."""
        code = BEGIN.format(here=HERE) + textwrap.dedent(text)
        command, stdin = [sys.executable, "-u", "-c", code], None
        if how == "file":
            assert tmp_path is not None
            (tmp_path / "program.py").write_text(code)
            command = [sys.executable, "-u", str(tmp_path / "program.py")]
        elif how == "stdin":
            command, stdin = [sys.executable, "-u", "-"], subprocess.PIPE
        self.popen = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            **options,
        )
        if stdin is not None:
            assert self.popen.stdin is not None
            self.popen.stdin.write(code)
            self.popen.stdin.close()
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.errors = ""
        self.seen: set[int] = set()
        """It, and all its descendants that were ever there when it said something."""
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.put(line.rstrip("\n"))
        self.lines.put(None)

    def _read_errors(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.errors += line

    def says(self, seconds: float = 60.0) -> str:
        """The next line that it prints."""
        line = self.lines.get(timeout=seconds)
        self.seen |= {self.popen.pid, *descendants(self.popen.pid)}
        assert line is not None, f"it has ended without a word:\n{self.errors}"
        return line

    def ends(self, seconds: float) -> int:
        """Its exit code. It and all that stems from it must be gone by then.

        Not counted is what the end of a program takes that has only imported torch: seconds, on a loaded machine.
        """
        self.seen |= set(descendants(self.popen.pid))
        seconds += 1.5 * exit_of_idle_program_s()
        deadline = time.monotonic() + seconds
        try:
            code = self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended within {seconds} s:\n{self.errors}") from None
        until(lambda: all(map(is_gone, self.seen)), max(deadline - time.monotonic(), 0.5))
        for reader in self._readers:
            reader.join(5)
        return code

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        left = self.seen | {self.popen.pid, *descendants(self.popen.pid)}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait()
        assert self.popen.stdout is not None
        assert self.popen.stderr is not None
        for reader in self._readers:
            reader.join(5)
        self.popen.stdout.close()
        self.popen.stderr.close()


@functools.cache
def exit_of_idle_program_s() -> float:
    """How long the interpreter takes to end, after a program that has done nothing with what it has imported."""
    with Program("print('ready')") as program:
        program.says()
        begun = time.monotonic()
        program.popen.wait(60)
        return time.monotonic() - begun


def assert_ended_well(program: Program, tracebacks: int = 0) -> None:
    """It has said nothing but these tracebacks."""
    errors = program.errors
    assert errors.count("Traceback (most recent call last)") == tracebacks, errors
    assert "Exception ignored" not in errors, errors
    assert "leaked" not in errors, errors
    if not tracebacks:
        assert errors == "", errors


def advance_quietly(collector: Any) -> None:
    """In a thread whose errors are not what the test is about."""
    with contextlib.suppress(Exception):
        advance(collector)


torch.set_num_threads(1)
