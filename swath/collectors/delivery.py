"""Deliveries: which finished parts reach the consumer, in which order, and when a worker may start again."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter

from swath.collectors.config import CommonConfig
from swath.collectors.worker import BatchLayout, Collect, Fill
from swath.rollout.budget import FrameBudget
from swath.rollout.loop import Receipt
from swath.rollout.slots import Arena, Slot
from swath.runtime.columns import Columns, Place
from swath.runtime.pool import LOOK_S, Pool
from swath.runtime.work import Work
from swath.weights import Publisher

BY_POLICY, AT_RANDOM = Collect(False), Collect(True)
filling = lru_cache(maxsize=64)(Fill)
"""The same order again: to make one takes longer than to look it up."""
OVER, GIVEN_UP = attrgetter("is_over"), attrgetter("is_given_up")


class Part(Work):
    """A worker's part of a batch: in a slot, or in the replay buffer.

    Attributes:
        row: which row of the slot's first dimension it is, where all workers share a slot.
        version: of the weights when it was given out: it is done with these or newer ones.
        claim: keeps the slot for this part until it is delivered or forgotten; see NOTE [Slot ownership].
    """

    arena: Arena | None = None
    slot: Slot | None = None
    row: int | None = None
    claim: object = None

    def __init__(self, index: int, request: object, steps: int, version: int, place: Place | None = None) -> None:
        self.index, self.request, self.steps, self.version, self.place = index, request, steps, version, place

    @property
    def frames(self) -> int:
        """How many frames were collected for it so far as is known."""
        return self.receipt.frames if isinstance(self.receipt, Receipt) else 0

    @property
    def collected(self) -> Receipt:
        """Its receipt, which it has when it is delivered."""
        assert isinstance(self.receipt, Receipt)
        return self.receipt


@dataclass(frozen=True)
class Terms:
    """On what terms workers collect.

    Attributes:
        layout: what batches look like.
        steps: how many steps each worker contributes to a batch.
        writes: whether it goes into the replay buffer.
        init_random_frames: act at random until so many frames are collected.
        version: the number of the weights that were published last.
    """

    layout: BatchLayout
    steps: dict[int, int]
    writes: bool
    init_random_frames: int
    version: Callable[[], int]

    @staticmethod
    def of(config: CommonConfig, layout: BatchLayout, steps: dict[int, int], publisher: Publisher) -> Terms:
        """The terms that a collector's arguments ask for."""
        writes = config.workers_write
        random = 0 if writes else config.init_random_frames or 0
        return Terms(layout, steps, writes, random, lambda: publisher.version)

    @cached_property
    def lanes(self) -> int:
        """Frames in a step of one worker."""
        return math.prod(self.layout.batch_size)


class Delivery(ABC):
    """What all have in common: parts are ordered from workers, finished, and counted against the budget."""

    def __init__(self, pool: Pool[Part], terms: Terms, budget: FrameBudget) -> None:
        """Deliver what the workers of `pool` collect, until `budget` is spent."""
        self.pool, self.terms, self.budget = pool, terms, budget
        self.batches = 0
        """How many were delivered."""
        self._discarded = 0
        self._arenas: dict[object, Arena] = {}
        self._counted = dict.fromkeys(terms.steps, 0)
        """Frames of each worker that have been counted."""

    @abstractmethod
    def next(self, *, in_bulk: bool = False) -> list[Part] | None:
        """The parts of the next batch; None when the budget is spent.

        With `in_bulk` it may be of several batches, where they go into a replay buffer: that spares messages.
        """

    @abstractmethod
    def rollout(self) -> list[Part]:
        """The parts of one batch in slots, wherever else batches go, and also when the budget is spent."""

    def take_over(self, other: Delivery) -> None:
        """Go on counting where another has stopped."""
        self.batches, self._discarded = other.batches, other._discarded
        self._counted, self._arenas = other._counted, other._arenas

    @property
    def slots_allocated(self) -> int:
        """How many slots were ever allocated: constant in steady state."""
        return sum(arena.allocated for arena in list(self._arenas.values()))  # another thread may add one

    @property
    def undelivered_frames(self) -> int:
        """Frames that are collected and wait to be delivered; what is in the replay buffer waits for nothing."""
        return 0 if self.terms.writes else self._finished_frames

    @property
    def _finished_frames(self) -> int:
        return sum(part.frames for part in list(self.pool.finished))

    def settle(self) -> None:
        """Wait for what is under way, and count what was written to the replay buffer of it."""
        while self.pool.under_way:
            self.pool.attend(LOOK_S)
        with self.pool.section:
            while self.terms.writes and self.pool.finished:
                self._count([self.pool.finished.popleft()])

    def await_writes(self) -> None:
        """Wait for what is being written ahead: a buffer that is saved between two batches has as much as is said."""
        parts = self.pool.under_way if self.terms.writes else []
        while not all(part.is_over for part in parts):
            self.pool.attend(LOOK_S)

    @property
    def discarded_frames(self) -> int:
        """Frames that were collected and given up on purpose: because of a new seed, or another state."""
        unclaimed = [] if self.terms.writes else [receipt for _, receipt in list(self.pool.unclaimed)]
        return self._discarded + sum(receipt.frames for receipt in unclaimed if isinstance(receipt, Receipt))

    def discard(self, others: int = 0) -> None:
        """Count what the pool was asked to forget; and so many frames that another collector has lost."""
        self._discarded += others
        self._void()

    def _void(self, parts: Sequence[Part] = ()) -> None:
        """Parts that nobody will get. What is in the replay buffer counts all the same, whoever has forgotten it."""
        with self.pool.section:
            unclaimed, self.pool.unclaimed = list(self.pool.unclaimed), deque()
            for index, receipt in [*((part.index, part.receipt) for part in parts), *unclaimed]:
                if isinstance(receipt, Receipt) and self.terms.writes:
                    self._spend(index, receipt.frames)
                elif isinstance(receipt, Receipt):
                    self._discarded += receipt.frames

    def lost(self, index: int, written: int) -> None:
        """A worker has failed: what it had `written` of an order to the replay buffer counts, and is not done again."""
        if not self.terms.writes:
            return
        written -= self._waiting(index)
        frames, self._counted[index] = written - self._counted[index], written
        parts = [part for part in self.pool.under_way if part.index == index]
        if frames > 0 and parts:
            self.budget.spend(frames)
            part, made = parts[0], frames // self.terms.lanes
            part.steps -= made
            part.request = Fill(part.steps, self.terms.steps[index])
            if part.steps <= 0:  # all was done but its receipt, and is counted
                self.pool.finish(index, part.ticket, Receipt(made, 0, self.terms.version(), 0))

    def restarted(self, index: int) -> None:
        """A new worker counts from the beginning."""
        self._counted[index] = -self._waiting(index)

    def _waiting(self, index: int) -> int:
        """Frames of a worker in parts that are finished and will be counted when they are delivered, or given up."""
        delivered = [part.receipt for part in list(self.pool.finished) if part.index == index]
        given_up = [receipt for worker, receipt in list(self.pool.unclaimed) if worker == index]
        return sum(receipt.frames for receipt in (*delivered, *given_up) if isinstance(receipt, Receipt))

    @property
    def frames(self) -> int:
        """How many frames were delivered, or written to the replay buffer, also for orders that are not finished."""
        with self.pool.section.lock:  # or a part that another thread is just counting would count twice, or not at all
            if not self.terms.writes:
                return self.budget.spent
            reports = {index: self.pool.carrier.report(index) for index in self._counted}
            known = sum(max(0, int(report["frames"]) - self._counted[index]) for index, report in reports.items())
            return self.budget.spent + known

    def _count(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self._spend(part.index, part.frames)
        self.batches += 1

    def _spend(self, index: int, frames: int) -> None:
        if not self.terms.writes:  # only who iterates counts then
            self.budget.spend(frames)
            return
        with self.pool.section.lock:
            self.budget.spend(frames)
            if index in self._counted:
                self._counted[index] += frames

    def _is_random(self, frames: int) -> bool:
        """Whether a batch is to be random when so many frames were collected before."""
        return frames < self.terms.init_random_frames

    def _arena(self, key: object, batch_size: tuple[int, ...]) -> Arena:
        if key not in self._arenas:
            layout, lanes, carrier = self.terms.layout, self.terms.lanes, self.pool.carrier
            rows = lanes * (batch_size[0] if len(batch_size) > len(layout.batch_size) else 1)

            def lease(steps: int) -> Columns:
                return carrier.lease(layout.leaves, (rows, steps), layout.device)

            self._arenas[key] = Arena(lease, batch_size)
        return self._arenas[key]

    def _part(self, index: int, steps: int, random: bool, arena: Arena, slot: Slot, row: int | None = None) -> Part:
        terms, work = self.terms, AT_RANDOM if random else BY_POLICY
        place = slot.whole if row is None else slot.place(row * terms.lanes, terms.lanes)
        part = Part(index, work, steps, terms.version(), place)
        part.arena, part.slot, part.row, part.claim = arena, slot, row, slot.claim
        return part


class Barrier(Delivery):
    """Each batch has a part of every worker; they wait while the consumer has it.

    With one worker in this process this is direct collection.
    """

    def __init__(
        self,
        pool: Pool[Part],
        terms: Terms,
        budget: FrameBudget,
        *,
        joins: bool = False,
        preemptive_threshold: float | None = None,
    ) -> None:
        """Collect with all workers; if it `joins`, all parts lie in one slot, `[workers, *batch_size, T]`.

        With `preemptive_threshold`, that part of the workers is waited for; the others then stop where they are.
        """
        super().__init__(pool, terms, budget)
        self._joins = joins
        self._threshold = None if preemptive_threshold == 1.0 else preemptive_threshold

    def next(self, *, in_bulk: bool = False) -> list[Part] | None:
        """The parts of all workers."""
        if self.budget.is_spent:
            return None
        return self._await(fills=self.terms.writes) or None

    def rollout(self) -> list[Part]:
        """The parts of all workers, in slots."""
        return self._await(fills=False)

    def _fills(self, shares: dict[int, int]) -> list[Part]:
        """A part for each worker, in the replay buffer."""
        return [Part(i, filling(n, self.terms.steps[i]), n, self.terms.version()) for i, n in shares.items()]

    def _shares(self) -> dict[int, int]:
        """How many steps each worker makes for the next batch: what the budget leaves of what was asked for."""
        wanted, workers = self.terms.steps.copy(), self.pool.carrier.workers
        if [*wanted] != workers:
            wanted = {index: wanted[index] for index in list(workers)}
        if self.budget.is_endless or self.budget.is_spent:
            return wanted
        lanes, begun, shares = self.terms.lanes, 0, dict[int, int]()
        if len(set(wanted.values())) == 1:
            return {index: self.budget.steps(most, lanes * len(wanted)) for index, most in wanted.items()}
        for index, most in wanted.items():
            shares[index] = self.budget.steps(most, lanes, begun)
            begun += shares[index] * lanes
        return {index: steps for index, steps in shares.items() if steps}

    def _lay_out(self, shares: dict[int, int]) -> list[Part]:
        """A part for each worker, in one slot if all make the same number of steps."""
        random, own = self._is_random(self.budget.spent), self.terms.layout.batch_size
        if self._joins and len(set(shares.values())) == 1:
            arena = self._arena(("all", len(shares)), (len(shares), *own))
            slot = arena.acquire(next(iter(shares.values())))
            return [self._part(i, n, random, arena, slot, row) for row, (i, n) in enumerate(shares.items())]
        parts = []
        for index, steps in shares.items():
            arena = self._arena(index, own)
            parts.append(self._part(index, steps, random, arena, arena.acquire(steps)))
        return parts

    def _await(self, fills: bool) -> list[Part]:
        """Have the parts collected, by those workers that are there; again, if another thread has made them void.

        No parts, if what was void has filled the buffer all the same: it counts.
        """
        while True:
            while self.terms.writes and self.pool.discarding:  # what is written all the same is told with the answer
                self.pool.attend(LOOK_S)
            if self.pool.unclaimed:
                self._void()
            if fills and self.budget.is_spent:
                return []
            parts = self._fills(self._shares()) if fills else self._lay_out(self._shares())
            done = self._collected(parts)
            if self.pool.finished:  # of one that was interrupted
                self._void([part for part in list(self.pool.finished) if self.pool.take(part)])
            if not any(map(GIVEN_UP, parts)):
                self._count(done)
                return done
            self._void(done)

    def _collected(self, parts: list[Part]) -> list[Part]:
        pool = self.pool
        if len(parts) == 1 and self._threshold is None:  # the same in fewer steps: there may be a batch for each frame
            pool.issue(parts[0])
            while not parts[0].is_over:
                pool.attend(LOOK_S)
            with pool.section.lock:
                return parts if pool.take(parts[0]) else []
        with pool.section:  # all at once, see `Pool.ask`
            for part in parts:
                pool.issue(part)
        enough = None if self._threshold is None else int(len(parts) * self._threshold)
        while not all(map(OVER, parts)):
            if enough is not None and sum(part.is_over for part in parts) >= enough:
                for part in parts:
                    self.pool.carrier.interrupt(part.index, part.ticket)
                enough = None
            self.pool.attend(LOOK_S)
        with self.pool.section.lock:  # a thread that gives up parts takes and marks them in one
            return [part for part in parts if self.pool.take(part)]
