"""Batches that are drawn ahead of time, in a thread of their own."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from swath.data.samplers import Draw

LOOK_AGAIN_S = 0.05
"""How long a caller waits for a batch before it looks whether one can still come."""
STOP_S = 2.0


@dataclass(frozen=True)
class Sampled:
    """A batch, what is delivered with it, and how it was drawn."""

    batch: Any
    info: dict[str, Any]
    draw: Draw


Task = tuple["Future[Any]", Callable[[], Any]]


class _PrefetchThread:
    """A thread that does one task after another. It ends with this object, and never keeps a program alive."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._tasks,), name="swath-prefetch", daemon=True)
        self._thread.start()
        _threads.add(self)

    def submit(self, task: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, task))
        return future

    def stop(self, wait_s: float = 0.0) -> None:
        self._tasks.put(None)
        if wait_s and threading.current_thread() is not self._thread:
            self._thread.join(wait_s)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.stop()


def _work(tasks: SimpleQueue[Task | None]) -> None:
    while (item := tasks.get()) is not None:
        future, task = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
        del item, future, task  # while it waits for the next, it holds no buffer


_threads: weakref.WeakSet[_PrefetchThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for thread in list(_threads):
        thread.stop(wait_s=0.2)


class Prefetcher:
    """Keeps some batches ready. Nothing is drawn beyond the end of an epoch: the next may have other frames."""

    def __init__(self, sample: Callable[[int], Sampled], count: int) -> None:
        """Keep `count` batches ready that the method `sample` makes; its object is not held."""
        self._sample = weakref.WeakMethod(sample)
        self._count = count
        self.start()

    def start(self) -> None:
        """Make what belongs to this process; the thread comes with the first batch."""
        self._lock = threading.Lock()
        self._queue: deque[Future[Sampled | None]] = deque()
        self._thread: _PrefetchThread | None = None
        self._is_over = threading.Event()
        """Set at the end of an epoch, or when what was drawn is forgotten: then nothing more is drawn for it."""
        _prefetchers.add(self)

    def take(self, size: int, is_hopeless: Callable[[], bool]) -> Sampled | None:
        """The next batch; None if the caller need not wait for one: nothing more will be written."""
        while True:
            with self._lock:
                if self._thread is None:
                    self._thread = _PrefetchThread()
                while len(self._queue) <= self._count:
                    self._queue.append(self._thread.submit(partial(_draw_one, self._sample, size, self._is_over)))
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

    def close(self) -> None:
        """Forget everything and stop the thread."""
        self.clear()
        if self._thread is not None:
            self._thread.stop(wait_s=STOP_S)
            self._thread = None


def _draw_one(
    sample: weakref.WeakMethod[Callable[[int], Sampled]], size: int, is_over: threading.Event
) -> Sampled | None:
    draw = sample()
    if is_over.is_set() or draw is None:
        return None
    sampled = draw(size)
    if sampled.draw.ends_epoch:
        is_over.set()
    return sampled


_prefetchers: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


def _start_in_child() -> None:
    """After a fork: the thread did not come along."""
    for prefetcher in list(_prefetchers):
        prefetcher.start()


os.register_at_fork(after_in_child=_start_in_child)
