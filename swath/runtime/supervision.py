"""Supervision: what is done about workers that fail or do not move, and for how long they may not.

NOTE [Time that counts]: a program that is stopped (Ctrl-Z, a debugger, a laptop whose lid is closed) stops together
with its workers. When it goes on, it has not seen them move for long, but they are not to blame. Who waits asks to be
woken after a second at most; if it is woken much later, it did not run, and neither may they have: that time counts for
nobody. A thread that did not wait may have been busy elsewhere just as well. So what it finds to have stood still is
excused once, and again only when it has moved: at the second time it has stood still for as long by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from swath.runtime.carrier import Task

LATE_S = 2.0
"""Who looks so much later than he wanted to was not running."""


@dataclass(frozen=True)
class Supervision:
    """What happens when a worker fails, and when it is said to have stalled.

    Attributes:
        on_failure: "raise" the error, "restart" the worker, or "drop" it and go on with the others.
        max_restarts: how often each worker is restarted; then the error is raised.
        stall_warning_s: after how many seconds without a heartbeat a worker is named in a warning.
        stall_timeout_s: after how many it is killed, which `on_failure` then deals with; None waits on.
        start_timeout_s: how long a worker may take to start.
    """

    on_failure: str = "raise"
    max_restarts: int = 3
    stall_warning_s: float = 15.0
    stall_timeout_s: float | None = None
    start_timeout_s: float = 300.0

    def stall_text(self, who: str, seconds: float, state: str) -> str:
        """That a worker has not moved for so long, in words."""
        limit, digits = self.stall_timeout_s, 0 if seconds > 10 else 1
        outlook = "Waiting goes on" if limit is None else f"It is killed after stall_timeout_s={limit:g}"
        return (
            f"{who} has made no step for {seconds:.{digits}f} s: {state}. {outlook}; "
            f"stall_warning_s={self.stall_warning_s:g} says when to warn."
        )


class Owner(Protocol):
    """Whose workers they are."""

    def task(self, index: int, replaces: bool) -> Task:
        """What to start a worker for, and whether it replaces one that has failed."""

    def lost(self, index: int) -> None:
        """A worker has failed and will be replaced or dropped; its reports can still be read."""

    def restarted(self, index: int) -> None:
        """A new worker was started; what is sent now comes before its work."""


class WorkerClocks:
    """Since when each worker of a pool has not moved, or is being made."""

    def __init__(self) -> None:
        self._pulse: dict[int, tuple[int, float]] = {}
        self._first: dict[int, int] = {}
        """The pulse of each worker when it was first seen."""
        self._started_at: dict[int, float] = {}
        self._excused: set[int] = set()
        self._now = time.monotonic()
        self._late_s = 0.0

    def start(self, index: int) -> None:
        """A new worker has nothing to do with the one whose place it takes."""
        self._started_at[index] = time.monotonic()
        self._first.pop(index, None)
        self.expect(index)

    def expect(self, index: int) -> None:
        """From now on it is expected to move."""
        self._pulse.pop(index, None)
        self._excused.discard(index)

    def wait(self, wait: Callable[[float], bool], timeout_s: float) -> bool:
        """What `wait` says. Time for which it slept longer than it should have counts for nobody."""
        begun = time.monotonic()
        has_come = wait(timeout_s)
        late_s = time.monotonic() - begun - timeout_s
        if late_s > LATE_S:
            self._now += late_s
            self._pulse = {index: (beats, since + late_s) for index, (beats, since) in self._pulse.items()}
            self._started_at = {index: since + late_s for index, since in self._started_at.items()}
        return has_come

    def look(self) -> None:
        """What is asked next is asked now."""
        before, self._now = self._now, time.monotonic()
        self._late_s = self._now - before if self._now - before > LATE_S else 0.0

    def still_s(self, index: int, beats: int, is_busy: bool) -> float:
        """For how long a worker whose pulse is `beats` has not moved; 0 if it has since the last look, or need not."""
        self._first.setdefault(index, beats)
        last, since = self._pulse.get(index, (-1, self._now))
        if not is_busy or beats != last:
            self.expect(index)
            since = self._now
        elif self._late_s and index not in self._excused:
            self._excused.add(index)
            since += self._late_s
            self._started_at[index] += self._late_s
        self._pulse[index] = (beats, since)
        return self._now - since

    def starting_s(self, index: int) -> float:
        """How long ago it was started."""
        return self._now - self._started_at[index]

    def has_moved(self, index: int, beats: int) -> bool:
        """Whether it has ever moved."""
        return beats != self._first.get(index, beats)


class Patience:
    """For how long something has not come, for whoever waits for it and asks often. From any thread."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self.renew()

    def renew(self) -> None:
        """It has come."""
        with self._turn:
            self._asked_at, self._waited_s = time.monotonic(), 0.0

    def waited_s(self) -> float:
        """For how long it has not come."""
        with self._turn:
            now = time.monotonic()
            self._waited_s += min(now - self._asked_at, LATE_S)
            self._asked_at = now
            return self._waited_s
