"""Batches that are drawn ahead, in a thread of their own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from swath.data.samplers import Draw


@dataclass(frozen=True)
class Sampled:
    """A batch, what is told of it, and how it was drawn."""

    batch: Any
    info: dict[str, Any]
    draw: Draw
    ends_epoch: bool


class _Run:
    """Batches that are drawn one after the other, up to the end of an epoch or until they are forgotten."""

    def __init__(self) -> None:
        self.is_over = False


class DrawnAhead:
    """Keeps some batches ready. Nothing is drawn beyond the end of an epoch: the next may have other frames."""

    def __init__(self, sample: Callable[[int], Sampled], count: int) -> None:
        """Keep `count` batches ready that `sample` makes."""
        self._sample = sample
        self._count = count
        self._lock = threading.Lock()
        self._queue: deque[Future[Sampled | None]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._run = _Run()

    def take(self, size: int) -> Sampled:
        """The next batch."""
        while True:
            with self._lock:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(1, thread_name_prefix="swath-prefetch")
                while len(self._queue) <= self._count:
                    self._queue.append(self._pool.submit(self._one, size, self._run))
                ahead = self._queue.popleft()
            try:
                sampled = ahead.result()
            except BaseException:
                self.clear()  # what went wrong now may go well the next time
                raise
            if sampled is None or sampled.ends_epoch:
                self.clear()  # nothing but places after the end
            if sampled is not None:
                return sampled

    def _one(self, size: int, run: _Run) -> Sampled | None:
        if run.is_over:
            return None
        sampled = self._sample(size)
        run.is_over |= sampled.ends_epoch
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
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
