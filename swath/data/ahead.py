"""Batches that are drawn ahead, in a thread of their own."""

from __future__ import annotations

import atexit
import contextlib
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
"""How long somebody waits for a batch before looking whether there is still hope."""
STOP_S = 2.0


@dataclass(frozen=True)
class Sampled:
    """A batch, what is told of it, and how it was drawn."""

    batch: Any
    info: dict[str, Any]
    draw: Draw


class _Run:
    """Batches that are drawn one after the other, up to the end of an epoch or until they are forgotten."""

    def __init__(self) -> None:
        self.is_over = False


Task = tuple["Future[Any]", Callable[[], Any]]


class _Worker:
    """A thread that does one thing after another. It ends with whoever holds this, and never keeps a program alive."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._tasks,), name="swath-prefetch", daemon=True)
        self._thread.start()
        _workers.add(self)

    def submit(self, task: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, task))
        return future

    def end(self, wait_s: float = 0.0) -> None:
        self._tasks.put(None)
        if wait_s and threading.current_thread() is not self._thread:
            self._thread.join(wait_s)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.end()


def _work(tasks: SimpleQueue[Task | None]) -> None:
    while (item := tasks.get()) is not None:
        future, task = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
        del item, future, task  # while it waits for the next, it holds nobody


_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for worker in list(_workers):
        worker.end(wait_s=0.2)


class DrawnAhead:
    """Keeps some batches ready. Nothing is drawn beyond the end of an epoch: the next may have other frames."""

    def __init__(self, sample: Callable[[int], Sampled], count: int) -> None:
        """Keep `count` batches ready that the method `sample` makes; its object is not held."""
        self._sample = weakref.WeakMethod(sample)
        self._count = count
        self._lock = threading.Lock()
        self._queue: deque[Future[Sampled | None]] = deque()
        self._worker: _Worker | None = None
        self._run = _Run()

    def take(self, size: int, is_hopeless: Callable[[], bool]) -> Sampled | None:
        """The next batch; None if the caller need not wait for one: nobody will write any more."""
        while True:
            with self._lock:
                if self._worker is None:
                    self._worker = _Worker()
                while len(self._queue) <= self._count:
                    self._queue.append(self._worker.submit(partial(_one, self._sample, size, self._run)))
                ahead = self._queue.popleft()
            while not _is_done(ahead):
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
        """Forget what was drawn. Somebody may still be drawing; that is forgotten too."""
        with self._lock:
            for future in self._queue:
                future.cancel()
            self._queue.clear()
            self._run.is_over = True
            self._run = _Run()

    def close(self) -> None:
        """Forget everything and end the thread."""
        self.clear()
        if self._worker is not None:
            self._worker.end(wait_s=STOP_S)
            self._worker = None


def _is_done(future: Future[Any]) -> bool:
    """Whether it is done, after a little while."""
    return bool(wait([future], LOOK_AGAIN_S).done)


def _one(sample: weakref.WeakMethod[Callable[[int], Sampled]], size: int, run: _Run) -> Sampled | None:
    draw = sample()
    if run.is_over or draw is None:
        return None
    sampled = draw(size)
    run.is_over |= sampled.draw.ends_epoch
    return sampled
