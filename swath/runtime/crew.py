"""Crew: several worker processes, waited on together."""

from __future__ import annotations

import contextlib
import os
import select
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from swath.runtime.channel import ChannelClosedError
from swath.runtime.child import CouldNotBegin, Target, Warned
from swath.runtime.faults import WorkerDiedError
from swath.runtime.process import Process, end_all, start

LAST_WORDS_S = 1.0
"""How long a worker whose channel has ended may take to have ended itself."""
SHUTDOWN_S = 4.0


@dataclass(frozen=True)
class Died:
    """A worker has ended without having been asked to: comes after everything that it had sent."""

    exitcode: int | None


@dataclass(frozen=True)
class Goodbye:
    """Asks a worker to end."""


class Crew:
    """Workers by their index.

    Whoever waits for one of them waits for messages and for the end of all of them, with a deadline: nothing that
    happens to a worker can make a caller wait for ever.
    """

    def __init__(
        self, name: str = "Worker", *, method: str = "forkserver", threads: int = 1, warns: bool = False
    ) -> None:
        """Begin without workers. `name` is what they are called in messages."""
        self.name = name
        self.processes: dict[int, Process] = {}
        self._method, self._threads, self._warns = method, threads, warns
        self._poll = select.poll()
        self._by_fd: dict[int, int] = {}
        self._unread: list[tuple[int, Any]] = []
        self._owner = os.getpid()

    def __len__(self) -> int:
        """How many workers there are, alive or dead."""
        return len(self.processes)

    def hire(self, index: int, target: Target) -> Process:
        """Start a worker that runs `target`, in the place of a former one of that index."""
        self.dismiss(index)
        process = start(target, self._method, self._threads, self._warns)
        self.processes = dict(sorted({**self.processes, index: process}.items()))
        for fd in (process.channel.fileno(), process.sentinel):
            self._poll.register(fd, select.POLLIN)
            self._by_fd[fd] = index
        return process

    def dismiss(self, index: int, timeout_s: float = 0.0) -> None:
        """Forget a worker; if it still runs, it is ended."""
        process = self.processes.pop(index, None)
        if process is None:
            return
        for fd in [fd for fd, owner in self._by_fd.items() if owner == index]:
            self._poll.unregister(fd)
            del self._by_fd[fd]
        self._unread = [(sender, message) for sender, message in self._unread if sender != index]
        end_all([process], Goodbye(), timeout_s)

    def send(self, index: int, message: Any, *, by_value: bool = False) -> None:
        """Send to a worker. One that has ended gets nothing: whoever waits for its answer is told."""
        process = self.processes.get(index)
        if process is None:
            return
        with contextlib.suppress(ChannelClosedError):
            process.channel.send(message, by_value=by_value)

    def wait(self, timeout_s: float) -> list[tuple[int, Any]]:
        """What has come from workers, in order: messages, and `Died` after the last one of a worker that has ended."""
        if self._unread:
            unread, self._unread = self._unread, []
            return unread
        deadline = time.monotonic() + timeout_s
        news: list[tuple[int, Any]] = []
        while not news:
            ready = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            for index in dict.fromkeys(self._by_fd[fd] for fd, _ in ready if fd in self._by_fd):
                news.extend((index, message) for message in self._heard(index))
            if time.monotonic() >= deadline:
                break
        return self._shown(news)

    def unread(self, news: Iterable[tuple[int, Any]]) -> None:
        """Put messages back, to be the first that `wait` returns."""
        self._unread = [*news, *self._unread]

    def _heard(self, index: int) -> Iterator[Any]:
        process = self.processes.get(index)
        if process is None:  # another thread has dismissed it
            return
        has_ended = process.wait(0.0)
        try:
            yield from process.channel.receive_rest() if has_ended else process.channel.receive_all()
        except ChannelClosedError:
            if not process.wait(LAST_WORDS_S):  # it has closed its channel, and lives on: nothing is to be had of it
                process.signal(9)
                process.wait(LAST_WORDS_S)
            has_ended = True
        if has_ended:
            self._release(index)
            yield Died(process.exitcode)

    def _shown(self, news: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """`news` without what is told here. If that raises, as warnings may, the rest is there for the next call."""
        self._unread = [(index, message) for index, message in news if not isinstance(message, Warned | CouldNotBegin)]
        for index, message in news:
            if isinstance(message, Warned):
                warnings.warn_explicit(f"{self.name} {index}: {message.text}", message.category, "swath", index)
            elif isinstance(message, CouldNotBegin):
                raise message.failure.error(f"Raised in {self.name.lower()} {index}, which could not read its task.")
        unread, self._unread = self._unread, []
        return unread

    def _release(self, index: int) -> None:
        """Wait no longer for a worker that has ended."""
        for fd in [fd for fd, owner in self._by_fd.items() if owner == index]:
            self._poll.unregister(fd)
            del self._by_fd[fd]

    def death(self, index: int, died: Died, doing: str = "", cause: str = "") -> WorkerDiedError:
        """The error that tells of a worker's end."""
        return WorkerDiedError(self.name, index, self.processes[index].pid, died.exitcode, doing, cause)

    def alive(self) -> list[int]:
        """The indices of those that have not ended."""
        return [index for index, process in self.processes.items() if process.is_alive]

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End all workers; see NOTE [Shutdown]. May be called again."""
        if os.getpid() != self._owner:
            return
        for index in list(self.processes):
            self._release(index)
        processes = list(self.processes.values())
        self.processes = {}
        end_all(processes, Goodbye(), SHUTDOWN_S if timeout_s is None else timeout_s)
