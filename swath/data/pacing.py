"""Pace: who waits for whom, among those who write to a buffer and those who sample from it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from swath.data.storages import Storage
from swath.errors import RateLimitError
from swath.runtime.interrupts import undisturbed

LOOK_AGAIN_S = 0.05
"""How long a wait goes on before the other side's health is looked at again."""
POLL_S = 1e-3
"""The same between processes, which have no way to wake each other that survives a kill."""


@dataclass(frozen=True)
class RateLimiter:
    """Holds the number of sampled frames near a fixed multiple of those written; either side waits for the other.

    Nobody waits when the other side could not go on either: if there is too little for one more batch, writers may
    always write. Nothing is ever dropped.

    Attributes:
        samples_per_insert: how many frames are sampled for each frame written. One update with a batch of 256 per
            frame is 256.
        tolerance: by how many sampled frames that may be missed, both ways; by default as much as one batch.
        min_size_to_sample: how many frames must be written before any is sampled.
        timeout_s: how long a caller waits before it raises TimeoutError. Collection in the background waits on.
    """

    samples_per_insert: float
    tolerance: float | None = None
    min_size_to_sample: int = 1
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what cannot be held."""
        if not self.samples_per_insert > 0:  # not a number is refused too
            raise ValueError(f"samples_per_insert must be positive, got {self.samples_per_insert!r}.")
        if self.tolerance is not None and not self.tolerance >= 0:
            raise ValueError(f"tolerance must not be negative, got {self.tolerance!r}.")
        if self.min_size_to_sample < 1:
            raise ValueError(f"min_size_to_sample must be at least 1, got {self.min_size_to_sample!r}.")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s!r}.")

    def may_sample(self, batch: int, written: int, sampled: int) -> bool:
        """Whether `batch` more frames may be sampled."""
        if written < self.min_size_to_sample:
            return False
        return sampled + batch <= self._due(written) + self._slack(batch)

    def may_insert(self, frames: int, batch: int, written: int, sampled: int) -> bool:
        """Whether `frames` more may be written, while the other side samples `batch` at a time."""
        if not self.may_sample(batch, written, sampled):
            return True
        return self._due(written + frames) - self._slack(batch) <= sampled

    def _due(self, written: int) -> float:
        """How many frames should be sampled by now. What had to be there before the first sample does not count."""
        return self.samples_per_insert * (written - self.min_size_to_sample + 1)

    def _slack(self, batch: int) -> float:
        return batch if self.tolerance is None else self.tolerance


class Feeder(Protocol):
    """What fills a buffer in the background, as the buffer knows it."""

    def is_feeding(self) -> bool:
        """Whether more frames may come."""

    def raise_failure(self) -> None:
        """Raise what went wrong there, if something did."""


class Feeders:
    """All feeders of a buffer; those that are gone are forgotten."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Feeder]] = []
        self._had_any = False

    def add(self, feeder: Feeder) -> None:
        """Know of `feeder`."""
        self.remove(feeder)
        self._known.append(weakref.ref(feeder))
        self._had_any = True

    def remove(self, feeder: Feeder) -> None:
        """Forget `feeder`, and those that are gone."""
        self._known = [ref for ref in self._known if ref() not in (None, feeder)]

    def _alive(self) -> list[Feeder]:
        return [feeder for ref in self._known if (feeder := ref()) is not None]

    def raise_failure(self) -> None:
        """Raise what went wrong with any of them."""
        for feeder in self._alive():
            feeder.raise_failure()

    def are_feeding(self) -> bool:
        """Whether any of them may write more."""
        return any(feeder.is_feeding() for feeder in self._alive())

    def have_ended(self) -> bool:
        """Whether there were some, and none of them will write for the caller any more."""
        return self._had_any and not self.are_feeding()


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
        """Whether no thread should wait any more."""

    def drew(self, asked: int, drawn: int) -> None:
        """Of the frames that were `asked` for, so many were drawn; none, if there are not the right ones."""
        ledger = self._storage.ledger
        if self._limiter is not None:
            if drawn != asked:
                ledger.count_samples(drawn - asked)
            if ledger.is_starved == bool(drawn):
                ledger.is_starved = not drawn
            self.notify()

    def delivered(self, frames: int) -> None:
        """So many frames went to the user; a rate limiter has counted them already, when it let them be drawn."""
        if self._limiter is None:
            self._storage.ledger.note_samples(frames)

    def notify(self) -> None:
        """Wake the threads of this process that wait: something has changed."""
        if self._listeners:
            with undisturbed, self._news:  # an interrupt within would leave it locked
                self._news.notify_all()

    def wait(self) -> None:
        """Until something may have changed."""
        if self._storage.is_shared:
            time.sleep(POLL_S)
            return
        with undisturbed, self._news:
            self._listeners += 1
            self._news.wait(LOOK_AGAIN_S)
            self._listeners -= 1

    def is_over(self, stopping: Callable[[], bool] | None) -> bool:
        """Whether one who samples has nobody to be in proportion to: nobody writes for him any more, or he says so."""
        return self.feeders.have_ended() or (stopping is not None and stopping())

    def await_sample(self, size: int, stopping: Callable[[], bool] | None) -> None:
        """Until `size` frames may be sampled, or we are `stopping`; they are then counted as such."""
        limiter, begun = self._limiter, time.monotonic()
        if limiter is None:
            return
        while not self._reserve(limiter, size):
            self.feeders.raise_failure()
            if self.is_closed or self.is_over(stopping):
                self._storage.ledger.count_samples(size)
                return
            if time.monotonic() - begun > limiter.timeout_s:
                raise RateLimitError(self._late("sample()", limiter))
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
        if (limiter := self._limiter) is None:
            return
        ledger, begun = self._storage.ledger, time.monotonic()
        while not limiter.may_insert(
            frames, max(batch_size or 1, ledger.wanted), self._storage.write_count, ledger.sampled
        ):
            if ledger.is_starved or (stopping is not None and stopping()):
                return
            if stopping is None and time.monotonic() - begun > limiter.timeout_s:
                raise RateLimitError(self._late("writing", limiter))
            self.wait()

    def _late(self, who: str, limiter: RateLimiter) -> str:
        return (
            f"{who} has waited {limiter.timeout_s:.0f} s for {limiter}: {self._storage.write_count} frames were "
            f"written and {self._storage.ledger.sampled} sampled. Does anybody write and sample at the same time? In "
            "one thread that takes turns, leave the rate limiter out."
        )
