"""First-come delivery: each batch is of the worker that was ready first.

NOTE [Back-pressure]: every worker has a few batches under way or waiting, no more. A batch that is delivered makes room
for one more of the same worker. Nothing is ever dropped because the consumer is slow: workers then wait. As each worker
has the same room and finished batches wait in one line, none can crowd out another.
"""

from __future__ import annotations

from contextlib import nullcontext

from swath.collectors.delivery import Delivery, Part, Terms
from swath.collectors.worker import Fill
from swath.rollout.budget import FrameBudget
from swath.runtime.pool import LOOK_S, Pool

BULK_FRAMES = 1000
"""So many frames are ordered in bulk, or one batch if that is more."""


class FirstCome(Delivery):
    """Each batch is of one worker, the one that was ready first; others go on meanwhile."""

    def __init__(
        self,
        pool: Pool[Part],
        terms: Terms,
        budget: FrameBudget,
        *,
        slots_per_worker: int = 2,
        max_staleness: int | None = None,
    ) -> None:
        """Let each worker have `slots_per_worker` batches under way or waiting.

        With `max_staleness` workers wait so that no batch becomes older than so many versions.
        """
        super().__init__(pool, terms, budget)
        self._slots, self.max_staleness = slots_per_worker, max_staleness
        self._least = 0
        """How many steps are ordered at least."""
        self.lag = self.worst_lag = 0
        """By how many versions the last batch was behind, and the worst."""

    def next(self, *, in_bulk: bool = False) -> list[Part] | None:
        """The part that was finished first; others are begun, as many as there is room for."""
        if self.budget.is_spent:
            return None
        self._least = self._bulk() if in_bulk and self.terms.writes else 0
        self._begin_more(ahead=1)
        return self._next() or None

    def rollout(self) -> list[Part]:
        """The same in a slot; where nothing is under way, a worker is asked for one."""
        if self.terms.writes:
            self.settle()
        elif not self.budget.is_spent:
            self._begin_more(ahead=1)
        if not self.pool.under_way and not self.pool.finished:
            index = min(self.pool.indices, key=self.pool.last_ticket.__getitem__)
            self.pool.issue(self._in_slot(index, self.terms.steps[index], self.budget.spent))
        return self._next() or self.rollout()  # if it was discarded

    def _bulk(self) -> int:
        """How many steps to order at a time, to spare messages; fewer towards the end, so that all have work."""
        frames = BULK_FRAMES
        if not self.budget.is_endless:
            left = self.budget.total - self.budget.spent
            frames = min(frames, left // (2 * self._slots * max(1, len(self.pool.indices))))
        return frames // self.terms.lanes

    def _next(self) -> list[Part]:
        """The part that is due; none if all that was left to collect has been discarded, and counts."""
        while (part := self._taken()) is None:
            self.pool.attend(LOOK_S)
            if not self.budget.is_spent:
                self._begin_more(ahead=1)
            elif not self.pool.under_way and not self.pool.finished:
                return []
        self.lag = self.terms.version() - part.collected.version
        self.worst_lag = max(self.worst_lag, self.lag)
        if not self.budget.is_spent:
            self._begin_more(ahead=0)
        return [part]

    def _taken(self) -> Part | None:
        with self.pool.section:  # another thread may give up all that waits
            part = self._due()
            if part is not None:
                self.pool.finished.remove(part)
                self._count([part])
            return part

    def _due(self) -> Part | None:
        """The finished part that is delivered next: the first, unless another would then become too old.

        Each delivery may bring a new version. What remains must be deliverable, the oldest first, within
        `max_staleness` versions of its own: otherwise the oldest is waited for.
        """
        finished, staleness = list(self.pool.finished), self.max_staleness
        if staleness is None:
            return finished[0] if finished else None
        under_way = sorted([*finished, *self.pool.under_way], key=lambda part: part.version)
        for part in finished:
            others = (other for other in under_way if other is not part)
            ages = [self.terms.version() + 1 + place - other.version for place, other in enumerate(others)]
            if part is under_way[0] or all(age <= staleness for age in ages):
                return part
        return None

    def _begin_more(self, ahead: int) -> None:
        """Give out work while there is room: in each worker, in the budget, and (see `max_staleness`) in time.

        A batch that is begun now will be delivered after those that wait; each delivery may bring a new version. With
        `ahead` the consumer is asking for a batch, so that one more may be under way than while it has one.
        """
        with self.pool.section if self.terms.writes else nullcontext():  # or another thread discards what is counted
            if self.terms.writes and self.pool.discarding:  # what is written all the same is told with the answer
                return
            if self.pool.unclaimed:
                self._void()
            for _ in range(self._slots):
                if not self._begin_each(ahead):
                    return

    def _begin_each(self, ahead: int) -> bool:
        """Give each worker a batch more that has room for it; whether there is room for others."""
        pool = self.pool
        waiting = [part.index for part in list(pool.finished)]
        for index in sorted(pool.indices, key=pool.last_ticket.__getitem__):  # which has waited longest first
            if pool.outstanding(index) + waiting.count(index) >= self._slots:
                continue
            if self.max_staleness is not None and len(pool.under_way) + len(waiting) >= self.max_staleness + ahead:
                return False
            begun = self._finished_frames + sum(part.steps for part in pool.under_way) * self.terms.lanes
            steps = self.terms.steps[index]
            steps = self.budget.steps(steps * max(1, self._least // steps), self.terms.lanes, begun)
            if not steps:
                return False
            if self.terms.writes:
                fill = Fill(steps, self.terms.steps[index])
                part = Part(index, fill, steps=steps, version=self.terms.version())
            else:
                part = self._in_slot(index, steps, self.budget.spent + begun)
            pool.issue(part)
        return True

    def _in_slot(self, index: int, steps: int, begun: int) -> Part:
        arena = self._arena(index, self.terms.layout.batch_size)
        return self._part(index, steps, self._is_random(begun), arena, arena.acquire(steps))
