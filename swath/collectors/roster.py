"""Roster: what a collector's workers are started for, and what is counted of those that have failed."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from swath.collectors.config import CommonConfig
from swath.collectors.delivery import Delivery, Part
from swath.collectors.worker import EngineTask, LocalTask
from swath.data import ReplayBuffer
from swath.data.ray_buffer import OwnBuffer
from swath.data.write_notes import WriteNotes
from swath.envs.registry import Registered
from swath.rollout.engine import Engine
from swath.rollout.loop import Receipt
from swath.runtime.carrier import Task
from swath.runtime.pool import Pool
from swath.seeding import lane_seed
from swath.weights import Publisher

LASTING = (
    "episodes",
    "idle_frames",
    "dropped_frames",
    "lost_frames",
    "worker_restarts",
    "time/env",
    "time/policy",
    "time/bookkeeping",
)
"""Numbers of a worker that count on when another takes its place."""
NOTHING = Receipt(0, 0, 0, 0, total=0)


class Roster:
    """The owner of a pool of engines."""

    def __init__(self, config: CommonConfig, policy: Callable[[], Any], engine: Engine | None = None) -> None:
        """Start workers as `config` says, with what `policy` returns.

        `engine` is the one worker's, where it exists already in this process.
        """
        self.seed: tuple[int, bool] | None = None
        """What `set_seed` was called with."""
        self.hooks: dict[str, Any] = {}
        """Hooks that were replaced."""
        self.lost_frames = 0
        """Frames of workers that have failed, which nobody has got."""
        self.past: Mapping[str, float] = dict.fromkeys((*LASTING, "pending_frames"), 0.0)
        """What workers that have failed had counted."""
        self.gone: set[int] = set()
        """Those that nobody has replaced."""
        self.publisher: Publisher | None = None
        self._watched: tuple[weakref.ref[Pool[Part]], weakref.ref[Delivery]] | None = None
        self.next_number = config.worker_idx or 0
        """Of the next worker that needs one for its ids."""
        self.config, self._policy, self._engine = config, policy, engine
        self._registered = None if engine is not None else Registered.here()
        self._notes = WriteNotes(config.workers) if engine is None and config.workers_write else None

    def watch(self, pool: Pool[Part], delivery: Delivery) -> None:
        """Count what workers of `pool` lose. Weakly: what these hold must be freed with them."""
        self._watched = (weakref.ref(pool), weakref.ref(delivery))

    def _now(self) -> tuple[Pool[Part], Delivery] | None:
        if self._watched is None:
            return None
        pool, delivery = (ref() for ref in self._watched)
        return None if pool is None or delivery is None else (pool, delivery)  # type: ignore[return-value]

    def task(self, index: int, replaces: bool) -> Task:
        """What to start a worker for."""
        config = self.config
        if self._engine is not None:
            return LocalTask(self._engine, config.worker_idx or 0)
        if self._notes is not None:
            self._notes.clear(index)
        task = EngineTask(
            index=index,
            number=self._new_number(),
            settings=replace(config.engine_settings(index), **self.hooks),
            create_env_fn=config.create_env_fn[index],
            create_env_kwargs=config.of("create_env_kwargs", index),
            policy=self._policy(),
            policy_factory=config.of("policy_factory", index),
            init_fn=config.of("init_fn", index),
            registered=self._registered,
            seed=self._seed_of_replacement() if replaces else self.seed,
            notes=self._notes,
        )
        return config.task_of(task)

    def _new_number(self) -> int:
        """What tells a worker's trajectories from those of others: no other worker has or had it."""
        if isinstance(self.config.replay_buffer, OwnBuffer):
            return self.config.replay_buffer.enrol()
        self.next_number += 1
        return self.next_number - 1

    def renumbered(self, used: int) -> dict[int, int]:
        """New numbers for all workers, so that no trajectory gets an id that was `used` in another run."""
        if self._engine is not None or isinstance(self.config.replay_buffer, OwnBuffer):
            return {}  # an engine goes on counting; a buffer has given each of us a number of its own
        self.next_number = max(self.next_number, used)
        now = self._now()
        return {} if now is None else {index: self._new_number() for index in now[0].indices}

    def _seed_of_replacement(self) -> tuple[int, bool] | None:
        """New seeds, by lane, that follow from the one that was set but repeat none of its episodes."""
        now = self._now()
        if self.seed is None or self.seed[1] or now is None:
            return self.seed
        pool, delivery = now
        lanes = math.prod(delivery.terms.layout.env_size) * len(pool.indices)
        return lane_seed(self.seed[0], lanes + 1 + pool.restarts), False

    def lost(self, index: int) -> None:
        """Count what a worker that has failed leaves behind."""
        now = self._now()
        if now is None:  # nothing was collected yet
            return
        (pool, delivery), carrier = now, now[0].carrier
        report = carrier.report(index)
        told, last = int(report["frames"]), pool.last_receipt.get(index, NOTHING)
        written = self._written(index, told)
        lost = delivery.terms.lanes * carrier.unreported_steps(index) + int(report["pending_frames"])
        if delivery.terms.writes:
            lost -= written - told
        elif isinstance(last, Receipt) and last.total is not None:
            lost += told - last.total  # what it told of, but never gave
        self.lost_frames += max(0, lost)
        self.past = {name: value + (report[name] if name in LASTING else 0.0) for name, value in self.past.items()}
        self.gone.add(index)
        delivery.lost(index, written)

    def _written(self, index: int, told: int) -> int:
        """How many frames a worker that is dead has written to the replay buffer, of which it has `told` so many."""
        buffer = self.config.replay_buffer
        if self._notes is None or not isinstance(buffer, ReplayBuffer) or not buffer.storage.is_ready:
            return told
        return self._notes.settled(index, buffer.storage.ledger, told)

    def restarted(self, index: int) -> None:
        """A new worker takes the weights that the one before it took."""
        self.gone.discard(index)
        if (now := self._now()) is not None:
            now[1].restarted(index)
        if self.publisher is not None:
            self.publisher.resubscribe(index)
