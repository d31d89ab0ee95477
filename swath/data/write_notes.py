"""WriteNotes: what each worker was writing last, for the one who outlives it.

NOTE [Settled with the write]: a worker says how many frames it has collected when they are in the replay buffer, and
may be killed in between. Then the frames are there, but nobody has counted them, and they would be collected again. So
it notes, for every write and before its first byte, where that goes and what its count is with it. Whether the frames
are there is told by the stamps of their rows, which make them readable, and by nothing else. Two notes take turns: one
that is cut short leaves the one before it, which may not have been counted yet either.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from swath.data.ledger import Ledger
from swath.runtime import MemoryBlock

BEGIN, ROWS, COUNT = range(3)


class WriteNotes:
    """Two notes per worker, in memory that all see."""

    def __init__(self, workers: int, block: MemoryBlock | None = None) -> None:
        self._workers = workers
        self._block = block or MemoryBlock(workers * 2 * 3 * 8)
        self._numbers = self._block.array((workers, 2, 3), np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return WriteNotes, (self._workers, self._block)

    def clear(self, worker: int) -> None:
        """Begin anew, for a new worker in the place of another."""
        self._numbers[worker] = 0

    def keep(self, worker: int, ledger: Ledger, count: Callable[[], int]) -> None:
        """Note all that is written from now on, in the worker; `count` says what it has collected."""
        turns = itertools.cycle(self._numbers[worker])

        def note(begin: int, rows: int) -> None:
            own = next(turns)
            own[ROWS] = 0
            own[BEGIN], own[COUNT] = begin, count()
            own[ROWS] = rows

        ledger.on_reserve = note

    def settled(self, worker: int, ledger: Ledger, told: int) -> int:
        """How many frames of a worker that is dead are settled, of which it has `told` so many."""
        settled = [told]
        for begin, rows, count in self._numbers[worker].tolist():
            if rows and count > told:
                settled.append(count - ledger.unfinished(begin, rows))
        return max(settled)
