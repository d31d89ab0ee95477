"""Direct delivery: one worker in this process, which makes each batch when it is asked for."""

from __future__ import annotations

from swath.collectors.delivery import AT_RANDOM, BY_POLICY, Barrier, Part, filling


class Direct(Barrier):
    """A barrier of one, in few steps: there may be a batch for each frame.

    Where anything but the next batch is to be seen to, it does as a barrier does.
    """

    def next(self, *, in_bulk: bool = False) -> list[Part] | None:
        """The part of the worker."""
        pool, budget, terms = self.pool, self.budget, self.terms
        if pool.unclaimed or pool.finished or (terms.writes and pool.discarding):
            return super().next()
        steps, spent = terms.steps[0], budget.spent
        if budget.total >= 0:
            if spent >= budget.total:
                return None
            steps = budget.steps(steps)
        if terms.writes:
            part = Part(0, filling(steps, terms.steps[0]), steps, terms.version())
        else:
            if (arena := self._arenas.get(0)) is None:
                arena = self._arena(0, terms.layout.batch_size)
            slot, work = arena.acquire(steps), AT_RANDOM if spent < terms.init_random_frames else BY_POLICY
            part = Part(0, work, steps, terms.version(), slot.whole)
            part.arena, part.slot, part.claim = arena, slot, slot.claim
        if not pool.do(part):
            return super().next()
        self._spend(0, part.collected.frames)
        self.batches += 1
        return [part]
