"""Pace: who waits for whom, among those who write to a buffer and those who sample from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from swath.data.feeding import Feeders
from swath.data.rate_limiter import RateLimiter
from swath.data.storages import Storage
from swath.errors import SwathError

LOOK_AGAIN_S = 0.05
"""How long a wait goes on before the other side's health is looked at again."""
POLL_S = 1e-3
"""The same between processes, which have no way to wake each other that survives a kill."""


class RateLimitError(SwathError, TimeoutError):
    """Writing or sampling waited too long for the other side."""


class Pace:
    """Holds writing and sampling in proportion, if asked, and lets samplers wait for those who fill the buffer."""

    def __init__(self, storage: Storage, limiter: RateLimiter | None) -> None:
        """Wait for changes in `storage`, by the rules of `limiter`."""
        self.feeders = Feeders()
        self._storage = storage
        self._limiter = limiter
        self._news = threading.Condition()
        self._listeners = 0
        self.is_closed = False
        """Whether nobody should wait any more."""

    def drew(self, asked: int, drawn: int) -> None:
        """Of the frames that somebody has asked for, so many were drawn; none, if there are not the right ones."""
        ledger = self._storage.ledger
        if self._limiter is not None:
            if drawn != asked:
                ledger.count_samples(drawn - asked)
            if ledger.is_starved == bool(drawn):
                ledger.is_starved = not drawn
            self.tell()

    def tell(self) -> None:
        """Wake those of this process who wait: something has changed."""
        if self._listeners:
            with self._news:
                self._news.notify_all()

    def wait(self) -> None:
        """Until something may have changed."""
        if self._storage.is_shared:
            time.sleep(POLL_S)
            return
        with self._news:
            self._listeners += 1
            self._news.wait(LOOK_AGAIN_S)
            self._listeners -= 1

    def await_sample(self, size: int) -> None:
        """Until `size` frames may be sampled; they are then counted as such."""
        limiter, begun = self._limiter, time.monotonic()
        if limiter is None:
            return
        while not self._reserve(limiter, size):
            self.feeders.raise_failure()
            if self.is_closed or self.feeders.have_ended():
                self._storage.ledger.count_samples(size)
                return  # nobody will write any more: there is nothing to be in proportion to
            if time.monotonic() - begun > limiter.timeout_s:
                raise RateLimitError(self._told("sample()", limiter))
            self._storage.ledger.wanted = size  # so that writers do not wait as well
            self.wait()

    def _reserve(self, limiter: RateLimiter, size: int) -> bool:
        """Count `size` frames as sampled, if they may be: both at once, as others may be asking."""
        ledger = self._storage.ledger
        with ledger.lock:
            if not limiter.may_sample(size, self._storage.write_count, ledger.sampled):
                return False
            ledger.count_samples(size)
            return True

    def await_insert(self, frames: int, batch_size: int | None, stopping: Callable[[], bool] | None) -> None:
        """Until `frames` may be written, or we are `stopping`."""
        limiter, begun = self._limiter, time.monotonic()
        if limiter is None:
            return
        ledger = self._storage.ledger
        while not limiter.may_insert(
            frames, max(batch_size or 1, ledger.wanted), self._storage.write_count, ledger.sampled
        ):
            if ledger.is_starved or (stopping is not None and stopping()):
                return
            if stopping is None and time.monotonic() - begun > limiter.timeout_s:
                raise RateLimitError(self._told("writing", limiter))
            self.wait()

    def _told(self, who: str, limiter: RateLimiter) -> str:
        return (
            f"{who} has waited {limiter.timeout_s:.0f} s for {limiter}: {self._storage.write_count} frames were "
            f"written and {self._storage.ledger.sampled} sampled. Does anybody write and sample at the same time? In "
            "one thread that takes turns, leave the rate limiter out."
        )
