"""Recovery: what is done about a worker that has failed.

Its error is raised, or it is dropped, or a new worker takes its place and is sent all that it has left undone.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from swath.errors import WorkerRestartedWarning, annotate
from swath.runtime.interrupts import undisturbed
from swath.runtime.supervision import Owner

if TYPE_CHECKING:
    from swath.runtime.pool import Pool

PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""How long a worker waits to be replaced that has failed before it moved: twice as long each time."""


class Recovery:
    """Drops workers of a pool that fail, or replaces them: at once or, if they had got nowhere, after a pause.

    Until then it is as if they had died just now: nobody waits, others go on, and what is sent to them is sent again.
    The pool comes with each call and is not kept: it is freed with the last reference to it.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.planned: dict[int, tuple[float, BaseException]] = {}
        """Workers that are to be replaced: when, and why."""
        self.restarting: dict[int, int] = {}
        """Workers that are just being replaced, and by which thread."""
        self._known_lost: set[int] = set()
        """Those of them that the owner knows to be lost."""
        self._restart_counts: dict[int, int] = {}
        self._in_vain: dict[int, int] = {}
        """How many in a row have failed before they moved."""

    def begin(self, pool: Pool[Any], index: int, error: BaseException, has_moved: bool) -> None:
        """Raise the `error` of a worker, drop it, or replace it: after a pause, unless it `has_moved`."""
        supervision, count = pool.supervision, self._restart_counts.get(index, 0)
        policy, was_ready = supervision.on_failure, index in pool.started or count > 0
        pool.started.pop(index, None)
        is_hopeless = policy == "restart" and count >= supervision.max_restarts
        is_last = policy == "drop" and len(pool.indices) == 1
        if policy == "raise" or not was_ready or is_hopeless or is_last or not isinstance(error, Exception):
            if is_hopeless and count:
                annotate(error, f"It was restarted {count} times before: max_restarts={supervision.max_restarts}.")
            if is_last:
                annotate(error, "No worker is left.")
            pool.failure = error
            raise error
        if policy == "drop":
            return self._drop(pool, index, error)
        self.plan(index, error, has_moved)
        return self.replace_failed(pool)

    def plan(self, index: int, error: BaseException, has_moved: bool) -> None:
        """Replace a worker because of `error`."""
        in_vain = self._in_vain[index] = 0 if has_moved else self._in_vain.get(index, 0) + 1
        pause_s = min(PAUSE_S * 2 ** (in_vain - 1), LONGEST_PAUSE_S) if in_vain else 0.0
        self.planned[index] = (time.monotonic() + pause_s, error)

    def patience_s(self, timeout_s: float) -> float:
        """How long to wait at most until one is due."""
        now = time.monotonic()
        return max(0.0, min([timeout_s, *(when - now for when, _ in list(self.planned.values()))]))

    def due(self) -> Iterator[tuple[int, BaseException]]:
        """Those whose time has come, and why they are replaced: each is forgotten when its turn comes."""
        for index, planned in list(self.planned.items()):
            if planned[0] <= time.monotonic() and self.planned.get(index) is planned:
                self.planned.pop(index, None)
                yield index, planned[1]

    def replace_failed(self, pool: Pool[Any]) -> None:
        """Replace those that are due."""
        if not self.planned:
            return
        with undisturbed:  # from the moment on in which it is no longer planned
            for index, error in self.due():
                self.restarting[index] = threading.get_ident()
                try:
                    self._restart(pool, index, error)
                except BaseException:
                    if self.restarting.pop(index, None) is not None:  # it was interrupted in the middle
                        self.plan(index, error, has_moved=True)
                    raise

    def _restart(self, pool: Pool[Any], index: int, error: BaseException) -> None:
        if index not in self._known_lost:  # else this was interrupted, and is done again
            self._known_lost.add(index)
            self._owner.lost(index)
            self._restart_counts[index] = self._restart_counts.get(index, 0) + 1
            pool.restarts += 1
        pool.start_worker(index, replaces=True)
        self._owner.restarted(index)
        with pool.section:
            pool.send_again(index)
            self._known_lost.discard(index)
            del self.restarting[index]
        count = f"{self._restart_counts[index]} of {pool.supervision.max_restarts}"
        summary = f"Worker {index} of {pool.name} is restarted ({count}): {type(error).__name__}: {error}"
        warnings.warn(summary, WorkerRestartedWarning, stacklevel=5)

    def _drop(self, pool: Pool[Any], index: int, error: BaseException) -> None:
        self._owner.lost(index)
        pool.remove(index)
        summary = f"is dropped, {len(pool.indices)} are left: {type(error).__name__}: {error}"
        warnings.warn(f"Worker {index} of {pool.name} {summary}", WorkerRestartedWarning, stacklevel=6)
