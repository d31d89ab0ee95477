"""MultiSyncCollector: every batch has a part of every worker, and one version of the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensordict import TensorDictBase

from swath.collectors.joining import STACK, joined
from swath.collectors.multi import MultiCollector
from swath.collectors.shared_arena import SharedArena
from swath.collectors.workers import LOOK_S, Work


class MultiSyncCollector(MultiCollector):
    """Delivers one batch of all workers at a time: `[workers, *env.batch_size, T]`, rows in the workers' order.

    Workers write straight into the batch. They wait while the consumer has it, so that with `update_policy_weights_`
    in between every frame of a batch is made by the newest weights.
    """

    is_sync = True

    @property
    def _unit(self) -> int:
        return self.num_lanes if len(set(self._steps.values())) == 1 else self._workers.lanes[0]

    @property
    def requested_frames_per_batch(self) -> int:
        """Frames in a batch, over all workers: whole steps of all lanes."""
        return sum(self.frames_per_batch_worker(index) for index in self._workers.indices or range(self.num_workers))

    def _begin(self) -> None:
        self._arenas: dict[Any, SharedArena] = {}
        super()._begin()
        time, how = len(self._layout.batch_size), self.config.cat_results
        if isinstance(how, int) and not -time - 1 <= how <= time:
            raise ValueError(f"cat_results={how} is no dimension of batches {[*self._layout.batch_size, 'T']}.")
        if len(set(self._steps.values())) > 1 and isinstance(how, int) and how not in (-1, time):
            raise ValueError(
                f"cat_results={how} puts lanes of all workers beside each other, but frames_per_batch="
                f"{self.config.frames_per_batch} gives them {sorted(set(self._steps.values()))} steps: use -1."
            )

    def _raw_batches(self) -> Iterator[TensorDictBase]:
        while not self._budget.is_spent and not self.closed:
            works = self._collect()
            self._endings = [work.ends for work in works]
            yield self._stored(self._joined(works))
            del works
        self._end()

    def _fills(self) -> Iterator[None]:
        while not self._budget.is_spent and not self.closed:
            self._before_batch()
            self._await([Work(index, steps) for index, steps in self._shares().items()])
            yield None
        if not self.closed:
            self._ask("finish_episodes")
        self._end()

    def _before_batch(self) -> None:
        self._must_be_open()
        self._give_up(self._endings)
        self._endings = []
        if self.config.update_at_each_batch:
            self.update_policy_weights_()

    def _shares(self) -> dict[int, int]:
        """How many steps each worker makes for the next batch: what the budget leaves of what was asked for."""
        wanted = {index: self._steps[index] for index in self._workers.indices}
        if self._budget.is_endless:
            return wanted
        left = self._budget.total - self._budget.spent
        lanes = self._workers.lanes[0]
        if len(set(wanted.values())) == 1:
            steps = -(-left // (lanes * len(wanted)))
            return {index: min(steps, most) for index, most in wanted.items()}
        shares = {}
        for index, most in wanted.items():
            shares[index] = min(most, -(-max(left, 0) // lanes))
            left -= shares[index] * lanes
        return {index: steps for index, steps in shares.items() if steps}

    def _collect(self) -> list[Work]:
        self._before_batch()
        return self._await(self._laid_out(self._shares()))

    def _joined(self, works: list[Work]) -> TensorDictBase:
        how = STACK if self.config.cat_results is None else self.config.cat_results
        is_taken_apart = self.config.split_trajs or self.config.trajs_per_batch is not None
        if how == STACK and is_taken_apart and len({work.steps for work in works}) > 1:
            how = -1  # a ragged stack has no rows to take episodes from
        marks_gaps = self.config.preemptive_threshold not in (None, 1.0) or self.config.interruptor is not None
        return joined(works, self._layout.delivered, self._layout.batch_size, how, marks_gaps=marks_gaps)

    def _laid_out(self, shares: dict[int, int]) -> list[Work]:
        """Work for each worker, in one slot if all make the same number of steps."""
        random = self._is_random(self._budget.spent)
        own = self._layout.batch_size
        if len(set(shares.values())) == 1:
            arena = self._arena("all", len(shares), (len(shares), *own))
            slot, lanes = arena.acquire(next(iter(shares.values()))), self._workers.lanes[0]
            return [Work(i, n, random, arena, slot, row * lanes) for row, (i, n) in enumerate(shares.items())]
        arenas = {index: self._arena("own", index, own) for index in shares}
        return [Work(i, n, random, arenas[i], arenas[i].acquire(n)) for i, n in shares.items()]

    def _arena(self, kind: str, which: int, batch_size: tuple[int, ...]) -> SharedArena:
        if (kind, which) not in self._arenas:
            first = len(self._arenas) << 40
            self._arenas[kind, which] = SharedArena(self._layout.leaves, batch_size, first)
        return self._arenas[kind, which]

    def _await(self, works: list[Work]) -> list[Work]:
        """Have the work done, by those workers that are there; what they have then collected is counted."""
        for work in works:
            self._workers.issue(work)
        threshold = self.config.preemptive_threshold
        enough = None if threshold is None or threshold == 1.0 else int(len(works) * threshold)
        while not all(work.is_over for work in works):
            if enough is not None and sum(work.is_over for work in works) >= enough:
                for work in works:
                    self._workers.preempt(work)
                enough = None
            self._workers.attend(LOOK_S)
        self._workers.done.clear()
        done = [work for work in works if work.receipt is not None]
        self._budget.spend(sum(work.receipt.frames for work in done if work.receipt is not None))
        self._batches += 1
        return done
