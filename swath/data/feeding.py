"""Feeders: what fills a buffer in the background, as the buffer knows it."""

from __future__ import annotations

import weakref
from typing import Protocol


class Feeder(Protocol):
    """Somebody who writes to a buffer while others sample from it."""

    def is_feeding(self) -> bool:
        """Whether more frames may come."""

    def raise_failure(self) -> None:
        """Raise what went wrong there, if something did."""


class Feeders:
    """All feeders of a buffer; those that nobody holds any more are forgotten."""

    def __init__(self) -> None:
        """Begin with none."""
        self._known: list[weakref.ref[Feeder]] = []
        self._had_any = False

    def add(self, feeder: Feeder) -> None:
        """Know of `feeder`."""
        if all(ref() is not feeder for ref in self._known):
            self._known.append(weakref.ref(feeder))
            self._had_any = True

    def remove(self, feeder: Feeder) -> None:
        """Forget `feeder`, and those that are gone."""
        self._known = [ref for ref in self._known if ref() not in (None, feeder)]

    def __bool__(self) -> bool:
        """Whether there were any."""
        return bool(self._known)

    def raise_failure(self) -> None:
        """Raise what went wrong with any of them."""
        for ref in self._known:
            feeder = ref()
            if feeder is not None:
                feeder.raise_failure()

    def are_feeding(self) -> bool:
        """Whether any of them may write more."""
        alive = [feeder for ref in self._known if (feeder := ref()) is not None]
        return any(feeder.is_feeding() for feeder in alive)

    def have_ended(self) -> bool:
        """Whether there were some, and none of them will write for the caller any more."""
        return self._had_any and not self.are_feeding()
