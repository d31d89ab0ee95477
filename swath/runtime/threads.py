"""ThreadCarrier: workers are threads of this process.

For work that waits more than it computes: Python runs one thread at a time, but all of them can wait at once. A thread
cannot be killed. One that hangs is given up: it ends when it comes back, and nothing that it does then is heard.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence

from swath.errors import ChannelClosedError
from swath.runtime.board import Board
from swath.runtime.carrier import Ended, Message, News, Stop, Task
from swath.runtime.local import LocalCarrier, LocalLink
from swath.runtime.processes import SHUTDOWN_S
from swath.runtime.rounds import Event
from swath.runtime.session import Session
from swath.runtime.watch import FdWatch

KILLED = -9


class ThreadLink(LocalLink):
    """A worker's end, and the pool's."""

    is_local = False

    def __init__(self, board: Board, index: int, came: Event) -> None:
        """Wake the pool by `came`."""
        super().__init__(board, index)
        self.is_given_up = False
        self.signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        """What wakes the worker: 0 for a message, or a number that its job understands."""
        self._came = came
        self.thread: threading.Thread | None = None

    def run(self, task: Task) -> None:
        """Work until it is stopped: in the worker's thread."""
        try:
            Session(task, self).run()
            code = 0
        except (ChannelClosedError, SystemExit):  # it was given up, or has said why it ends
            code = 1
        self.send(Ended(code))

    def send(self, news: News) -> None:
        """Send to the pool."""
        if not self.is_given_up:
            self.to_pool.append(news)
            self._came.lift()

    def post(self, message: Message) -> None:
        """Send to the worker: from the pool's side."""
        self.to_worker.append(message)
        self.signals.put(0)

    def wait(self) -> list[int]:
        """Wait for a message or for signals; the signals, none if it is a message."""
        while not self.to_worker:
            if signal := self.signals.get():
                return [signal]
        return []

    def receive(self, *, wait: bool) -> list[Message]:
        """Messages that have come."""
        while wait and not self.to_worker:
            self.signals.get()
        if self.is_given_up:
            raise ChannelClosedError("This worker was given up.")
        return [self.to_worker.popleft() for _ in range(len(self.to_worker))]


class ThreadCarrier(LocalCarrier):
    """Workers in threads."""

    is_local = False

    def __init__(self, workers: int, fields: Sequence[str] = ()) -> None:
        """Begin without workers; they report `fields`."""
        super().__init__(workers, fields)
        self._threads: dict[int, ThreadLink] = {}
        self._came = Event()
        self._watch = FdWatch(self._came.fd)
        self._owner = os.getpid()

    def watch(self, fd: int) -> None:
        """Let `wait` return when `fd` is readable, too."""
        self._watch.add(fd)

    def start(self, index: int, task: Task) -> None:
        """Start a thread."""
        if index in self._threads:
            self._stop([index], 0.0)
        self._board.clear(index)
        link = self._threads[index] = ThreadLink(self._board, index, self._came)
        link.thread = threading.Thread(target=link.run, args=(task,), daemon=True, name=f"swath worker {index}")
        link.thread.start()
        self.workers = sorted({*self.workers, index})

    def stop(self, index: int, timeout_s: float = 0.0) -> None:
        """Stop a thread and forget it."""
        if index in self.workers:
            self.workers = [worker for worker in self.workers if worker != index]
            self._stop([index], timeout_s)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Stop all threads; those that hang are given up."""
        if os.getpid() == self._owner:
            stopped, self.workers = self.workers, []
            self._stop(stopped, SHUTDOWN_S if timeout_s is None else timeout_s)
            if not any(link.thread is not None and link.thread.is_alive() for link in self._threads.values()):
                self._came.release()

    def _stop(self, indices: Sequence[int], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for index in indices:
            self._threads[index].post(Stop())
        for index in indices:
            link = self._threads[index]
            if link.thread is not None and link.thread is not threading.current_thread():
                link.thread.join(max(0.0, deadline - time.monotonic()))
            link.is_given_up = True

    def send(self, index: int, message: Message) -> None:
        """Send to a worker."""
        if index in self._threads:
            self._threads[index].post(message)

    def signal(self, index: int, number: int) -> None:
        """Wake a worker with a number that its job understands."""
        self._threads[index].signals.put(number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for news."""
        return bool(self._watch.wait(timeout_s))

    def receive(self) -> list[tuple[int, News]]:
        """What has come."""
        self._came.lower()
        news: list[tuple[int, News]] = []
        for index in self.workers:
            mail: deque[News] = self._threads[index].to_pool
            news.extend((index, mail.popleft()) for _ in range(len(mail)))
        return news

    def alive(self) -> list[int]:
        """The indices of threads that have not ended."""
        return [index for index in self.workers if (t := self._threads[index].thread) is not None and t.is_alive()]

    def kill(self, index: int) -> None:
        """Give a worker up; its end is reported."""
        link = self._threads[index]
        link.send(Ended(KILLED))
        link.is_given_up = True
