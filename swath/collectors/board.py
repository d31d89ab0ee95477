"""What workers write down for their parent to read at any moment, and the other way round: numbers in shared memory.

No message is needed to know how a worker is doing, and none is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from swath.runtime import Block, MemoryBlock, ProcessLock

FIELDS = (
    "steps",
    "signs",  # of life beside steps
    "reported",  # steps whose frames have reached the parent or the replay buffer
    "frames",
    "batches",
    "episodes",
    "idle_frames",
    "pending_frames",
    "dropped_frames",
    "policy_version",
    "mean_return",
    "mean_length",
    "time/env",
    "time/policy",
    "time/bookkeeping",
    "time/waiting",
)
"""Numbers that a worker writes."""
LISTEN_S = 0.1
STOP_ALL = 2**62
"""Stops whatever is being collected."""


class Board:
    """A row of numbers per worker, and a ticket up to which it should stop what it collects."""

    def __init__(self, workers: int, block: Block | None = None) -> None:
        """Make a board for `workers`."""
        self._workers = workers
        size = workers * (len(FIELDS) + 1) * 8
        self._block = MemoryBlock(size) if block is None else block
        self._numbers = self._block.array((workers, len(FIELDS)), np.float64)
        self._stops = self._block.array((workers,), np.int64, workers * len(FIELDS) * 8)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the block."""
        return Board, (self._workers, self._block)

    def row(self, worker: int) -> dict[str, float]:
        """A worker's numbers by name."""
        return dict(zip(FIELDS, self._numbers[worker].tolist(), strict=True))

    def beats(self, worker: int) -> float:
        """How often the worker has shown that it lives."""
        return float(self._numbers[worker, 0] + self._numbers[worker, 1])

    def unreported_steps(self, worker: int) -> int:
        """Steps that the worker has made and that nobody has got."""
        return int(self._numbers[worker, 0] - self._numbers[worker, 2])

    def stop(self, worker: int, ticket: int = STOP_ALL) -> None:
        """End what the worker collects under tickets up to `ticket`, after its current step."""
        self._stops[worker] = ticket

    def go_on(self, worker: int) -> None:
        """Stop nothing more."""
        self._stops[worker] = 0

    def clear(self, worker: int) -> None:
        """Begin anew, for a new worker in the place of another."""
        self._numbers[worker] = 0.0
        self._stops[worker] = 0


class Attention:
    """A worker's view of the board; asked after every step whether to stop, which is a sign of life too."""

    def __init__(self, board: Board, worker: int, listen: Callable[[], Any], users: Any = None) -> None:
        """Look at the row of `worker`.

        Args:
            board: the workers' board.
            worker: the index.
            listen: called now and then, so that a message that is too large to wait on its way can come in.
            users: an interruptor that the user has given.
        """
        self._listen, self._listened_at = listen, perf_counter()
        self.ticket = 0
        """What is being collected."""
        self._numbers = board._numbers[worker]
        self._stops = board._stops[worker : worker + 1]
        self._users = users

    def collection_stopped(self) -> bool:
        """Whether the batch should end here."""
        self._numbers[0] += 1.0
        if perf_counter() - self._listened_at > LISTEN_S:
            self._listen()
            self._listened_at = perf_counter()
        if self._stops[0] >= self.ticket:
            return True
        return self._users is not None and bool(self._users.collection_stopped())

    @property
    def is_wanted(self) -> bool:
        """Whether somebody wants what runs to stop; asked while something is waited for, and so a sign of life too."""
        self._numbers[1] += 1.0
        return bool(self._stops[0] >= self.ticket)

    def write(self, stats: dict[str, Any]) -> None:
        """Show `stats`."""
        self._numbers[3:] = [float(stats.get(name, 0.0)) for name in FIELDS[3:]]
        self._numbers[1] += 1.0
        self._numbers[2] = self._numbers[0]


class SharedBudget:
    """Frames that several workers may still collect; each claims what it is about to collect."""

    def __init__(self, frames: int, workers: int, block: Block | None = None) -> None:
        """Begin with `frames` (negative: endless) for so many workers."""
        self._workers = workers
        self._block = MemoryBlock((2 + workers) * 8) if block is None else block
        self._numbers = self._block.array((2 + workers,), np.int64)
        self._lock = ProcessLock(self._block)
        if block is None:
            self._numbers[0] = frames

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the block."""
        return SharedBudget, (0, self._workers, self._block)

    @property
    def spent(self) -> int:
        """How many frames were collected."""
        return int(self._numbers[1])

    def claim(self, worker: int, steps: int, lanes: int) -> int:
        """How many of `steps` steps of `lanes` lanes the worker may make; 0 when nothing is left."""
        with self._lock:
            left = int(self._numbers[0])
            steps = steps if left < 0 else min(steps, -(-left // lanes))
            claimed = steps * lanes if left < 0 else min(left, steps * lanes)
            self._numbers[2 + worker] = claimed  # first: a worker that is killed in between must lose nothing
            if left >= 0:
                self._numbers[0] = left - claimed
            return steps

    def settle(self, worker: int, frames: int) -> None:
        """Count what the worker has collected of its claim; the rest is free again."""
        with self._lock:
            claimed, self._numbers[2 + worker] = int(self._numbers[2 + worker]), 0
            self._numbers[1] += frames
            if self._numbers[0] >= 0:
                self._numbers[0] += max(0, claimed - frames)
