"""MultiAsyncCollector: batches of single workers, in the order in which they are ready.

NOTE [Back-pressure]: every worker has a few batches under way or waiting, no more. A batch that is delivered makes room
for one more of the same worker. Nothing is ever dropped because the consumer is slow: workers then wait. As each worker
has the same room and finished batches wait in one line, none can crowd out another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensordict import TensorDictBase

from swath.collectors.joining import alone
from swath.collectors.multi import MultiCollector
from swath.collectors.shared_arena import SharedArena
from swath.collectors.workers import LOOK_S, Work
from swath.errors import EndlessError


class MultiAsyncCollector(MultiCollector):
    """Delivers the batch of whichever worker is ready first: `[*env.batch_size, T]`.

    Workers go on collecting meanwhile, with the newest weights at the beginning of each of their batches: the frames
    tell which, in `policy_version`.
    """

    is_sync = False

    @property
    def _unit(self) -> int:
        return self._workers.lanes[0]

    @property
    def requested_frames_per_batch(self) -> int:
        """Frames in a batch of one worker; of the largest, where they differ."""
        return max(self.frames_per_batch_worker(index) for index in range(self.num_workers))

    def __len__(self) -> int:
        """Number of batches, where all workers contribute the same number of frames."""
        if len(set(self._steps.values())) > 1:
            raise EndlessError("Workers contribute batches of different sizes: how many there will be is not known.")
        return super().__len__()

    def _begin(self) -> None:
        self._arenas: dict[int, SharedArena] = {}
        self._lag = self._worst_lag = 0
        super()._begin()

    def _raw_batches(self) -> Iterator[TensorDictBase]:
        while not self._budget.is_spent and not self.closed:
            work = self._next_done(writes=False)
            self._endings = [work.ends]
            yield self._stored(alone(work, self._layout.delivered, self._layout.batch_size), work.index)
            del work
            self._after_batch()
        self._end()

    def _fills(self) -> Iterator[None]:
        while not self._budget.is_spent and not self.closed:
            self._next_done(writes=True)
            yield None
            self._after_batch()
        if not self.closed:
            self._ask("finish_episodes")
        self._end()

    def _after_batch(self) -> None:
        if self.config.update_at_each_batch and not self.closed:
            self.update_policy_weights_()

    def _next_done(self, writes: bool) -> Work:
        """The work that was finished first; others are begun, as many as there is room for."""
        self._must_be_open()
        self._give_up(self._endings)
        self._endings = []
        self._begin_more(writes, ahead=1)
        while (work := self._due()) is None:
            self._workers.attend(LOOK_S)
            self._begin_more(writes, ahead=1)
        self._workers.done.remove(work)
        assert work.receipt is not None
        self._budget.spend(work.receipt.frames)
        self._batches += 1
        self._lag = self._publisher.version - work.receipt.version
        self._worst_lag = max(self._worst_lag, self._lag)
        self._begin_more(writes, ahead=0)
        return work

    def _due(self) -> Work | None:
        """The finished work that is delivered next: the first, unless another would then become too old.

        Each delivery may bring a new version. What remains must be deliverable, the oldest first, within
        `max_staleness` versions of its own: otherwise the oldest is waited for.
        """
        done, staleness = self._workers.done, self.config.max_staleness
        if staleness is None:
            return done[0] if done else None
        under_way = sorted([*done, *self._workers.under_way], key=lambda work: work.version)
        for work in done:
            ages = [
                self._publisher.version + 1 + place - other.version
                for place, other in enumerate(other for other in under_way if other is not work)
            ]
            if work is under_way[0] or all(age <= staleness for age in ages):
                return work
        return None

    def _begin_more(self, writes: bool, ahead: int) -> None:
        """Give out work while there is room: in each worker, in the budget, and (see `max_staleness`) in time.

        A batch that is begun now will be delivered after those that wait; each delivery may bring a new version. With
        `ahead` the consumer is asking for a batch, so that one more may be under way than while it has one.
        """
        workers, staleness = self._workers, self.config.max_staleness
        for _ in range(self.config.slots_per_worker):
            waiting = {index: 0 for index in workers.indices}
            for work in workers.done:
                if work.index in waiting:
                    waiting[work.index] += 1
            for index in sorted(workers.indices, key=workers.last_ticket.__getitem__):  # whoever waits longest first
                under_way = workers.outstanding(index) + waiting[index]
                if under_way >= self.config.slots_per_worker:
                    continue
                if staleness is not None and self._under_way >= staleness + ahead:
                    return
                steps = self._steps_left(index)
                if not steps:
                    return
                work = self._work(index, steps, writes)
                work.version = self._publisher.version
                workers.issue(work)

    @property
    def _under_way(self) -> int:
        """How many batches are being collected or wait."""
        return sum(self._workers.outstanding(index) for index in self._workers.indices) + len(self._workers.done)

    def _steps_left(self, index: int) -> int:
        """How many steps a worker may make without exceeding the budget, given what others are about to make."""
        if self._budget.is_endless:
            return self._steps[index]
        planned = self._workers.frames_under_way * self._unit + self._undelivered_frames
        left = self._budget.total - self._budget.spent - planned
        return min(self._steps[index], max(0, -(-left // self._unit)))

    def _work(self, index: int, steps: int, writes: bool) -> Work:
        if writes:
            return Work(index, steps)
        if index not in self._arenas:
            self._arenas[index] = SharedArena(self._layout.leaves, self._layout.batch_size, index << 40)
        arena = self._arenas[index]
        begun = self._budget.spent + self._workers.frames_under_way * self._unit + self._undelivered_frames
        return Work(index, steps, self._is_random(begun), arena, arena.acquire(steps))

    def stats(self, workers: str = "aggregate") -> dict[str, Any]:
        """As of every collector, and how many versions behind the last batch was, and at worst."""
        told = super().stats(workers)
        if workers != "per_worker":
            told |= {
                "policy_lag": self._lag,
                "max_policy_lag": self._worst_lag,
                "waiting_batches": len(self._workers.done),
            }
        return told


class AsyncCollector(MultiAsyncCollector):
    """One worker process that collects ahead while the consumer is busy."""

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        """Start the worker; `create_env_fn` is one factory."""
        if isinstance(create_env_fn, list | tuple):
            if len(create_env_fn) != 1:
                raise ValueError(
                    f"AsyncCollector has one worker, got {len(create_env_fn)} factories: use MultiAsyncCollector."
                )
            create_env_fn = create_env_fn[0]
        if options.get("num_workers", 1) not in (1, None):
            raise ValueError(f"AsyncCollector has one worker, got num_workers={options['num_workers']}.")
        super().__init__([create_env_fn], policy, **options)
