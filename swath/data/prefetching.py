"""Batches that are drawn ahead of time, in a thread of their own."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from swath.data.pacing import LOOK_AGAIN_S
from swath.data.samplers import Draw

STOP_S = 2.0


@dataclass(frozen=True)
class Sampled:
    """A batch, what is delivered with it, and how it was drawn."""

    batch: Any
    info: dict[str, Any]
    draw: Draw


@dataclass(frozen=True)
class _Task:
    """One batch to be drawn."""

    future: Future[Sampled | None]
    sample: weakref.WeakMethod[Callable[[int, bool], Sampled]]
    size: int
    is_over: threading.Event

    def draw(self) -> Sampled | None:
        sample = self.sample()
        if self.is_over.is_set() or sample is None:
            return None
        sampled = sample(self.size, True)
        if sampled.draw.ends_epoch:
            self.is_over.set()
        return sampled


class Prefetcher:
    """Keeps some batches ready. Nothing is drawn beyond the end of an epoch: the next may have other frames.

    The thread comes with the first batch, ends with this object, and never keeps a program alive.
    """

    def __init__(self, sample: Callable[[int, bool], Sampled], count: int) -> None:
        """Keep `count` batches ready that the method `sample` makes, told that it is ahead; its object is not held."""
        self._sample = weakref.WeakMethod(sample)
        self._count = count
        self._lock = threading.Lock()
        self._queue: deque[Future[Sampled | None]] = deque()
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        """Set at the end of an epoch, or when what was drawn is forgotten: then nothing more is drawn for it."""
        _prefetchers.add(self)

    def take(self, size: int, is_hopeless: Callable[[], bool]) -> Sampled | None:
        """The next batch; None if the caller need not wait for one: nothing more will be written."""
        while True:
            with self._lock:
                if self._thread is None:
                    self._tasks = SimpleQueue()
                    self._thread = threading.Thread(
                        target=_work, args=(self._tasks,), name="swath-prefetch", daemon=True
                    )
                    self._thread.start()
                while len(self._queue) <= self._count:
                    self._queue.append(Future())
                    self._tasks.put(_Task(self._queue[-1], self._sample, size, self._is_over))
                ahead = self._queue.popleft()
            while not wait([ahead], LOOK_AGAIN_S).done:
                if is_hopeless():
                    self.clear()
                    return None
            try:
                sampled = ahead.result()
            except BaseException:
                self.clear()  # what went wrong now may go well the next time
                raise
            if sampled is None or sampled.draw.ends_epoch:
                self.clear()  # nothing but places after the end
            if sampled is not None:
                return sampled

    def clear(self) -> None:
        """Forget what was drawn, also what is just being drawn."""
        with self._lock:
            for future in self._queue:
                future.cancel()
            self._queue.clear()
            self._is_over.set()
            self._is_over = threading.Event()

    def close(self, wait_s: float = STOP_S) -> None:
        """Forget everything and stop the thread."""
        self.clear()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._tasks.put(None)
            if wait_s and threading.current_thread() is not thread:
                thread.join(wait_s)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._tasks.put(None)


def _work(tasks: SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        if task.future.set_running_or_notify_cancel():
            try:
                task.future.set_result(task.draw())
            except BaseException as error:
                task.future.set_exception(error)
        del task  # while it waits for the next, it holds no batch


_prefetchers: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for prefetcher in list(_prefetchers):
        prefetcher.close(wait_s=0.2)
