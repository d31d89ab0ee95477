"""What workers write down for their pool to read at any moment, and the other way round: numbers in shared memory.

No message is needed to know how a worker is doing, and none is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from swath.runtime.carrier import EVERYTHING
from swath.runtime.memory import Block, MemoryBlock, PrivateBlock

STEPS, SIGNS, REPORTED, FIELDS = range(4)
"""Where a worker's numbers lie: its steps, other signs of life, steps that were reported, and what it reports."""


class Board:
    """A row of numbers per worker, and a ticket up to which it should end its orders."""

    def __init__(
        self, workers: int, fields: Sequence[str], block: Block | None = None, *, private: bool = False
    ) -> None:
        """Make a board for `workers`, each of which reports `fields`."""
        self._workers, self._fields = workers, tuple(fields)
        width = FIELDS + len(self._fields)
        self._block = block or (PrivateBlock if private else MemoryBlock)(workers * (width + 1) * 8)
        self._numbers = self._block.array((workers, width), np.float64)
        self._stops = self._block.array((workers,), np.int64, workers * width * 8)

    def __reduce__(self) -> tuple[Any, ...]:
        return Board, (self._workers, self._fields, self._block)

    def report(self, index: int) -> dict[str, float]:
        """What a worker has reported, by name, and the `steps` that it has made."""
        steps, _, _, *numbers = self._numbers[index].tolist()
        return {"steps": steps, **dict(zip(self._fields, numbers, strict=True))}

    def heartbeat(self, index: int) -> int:
        """How often the worker has shown that it lives."""
        return int(self._numbers[index, STEPS] + self._numbers[index, SIGNS])

    def unreported_steps(self, index: int) -> int:
        """Steps since the last report."""
        return int(self._numbers[index, STEPS] - self._numbers[index, REPORTED])

    def numbers(self, index: int) -> tuple[float, ...]:
        """All that stands there for a worker, for a board elsewhere to `show`."""
        return tuple(self._numbers[index].tolist())

    def show(self, index: int, numbers: Sequence[float]) -> None:
        """Write down what stands on a worker's board elsewhere."""
        self._numbers[index] = numbers

    def interrupt(self, index: int, ticket: int = EVERYTHING) -> None:
        """End the worker's orders up to `ticket`, after its current step."""
        self._stops[index] = ticket

    def resume(self, index: int) -> None:
        """Interrupt nothing more."""
        self._stops[index] = 0

    def clear(self, index: int) -> None:
        """Begin anew, for a new worker in the place of another."""
        self._numbers[index] = 0.0
        self._stops[index] = 0

    def release(self) -> None:
        """No more workers will be given the board; what stands on it can still be read."""
        self._block.release()

    def row(self, index: int) -> BoardRow:
        """The worker's own side."""
        return BoardRow(self._numbers[index], self._stops[index : index + 1], self._fields)


class BoardRow:
    """A worker's own row."""

    def __init__(self, numbers: np.ndarray, stops: np.ndarray, fields: Sequence[str]) -> None:
        self._numbers, self._stops, self._fields = numbers, stops, fields

    def beat(self, ticket: int) -> bool:
        """Count a step; whether the order `ticket` is to end."""
        self._numbers[STEPS] += 1.0
        return bool(self._stops[0] >= ticket)

    def is_interrupted(self, ticket: int) -> bool:
        """Whether the order `ticket` is to end; a sign of life too."""
        self._numbers[SIGNS] += 1.0
        return bool(self._stops[0] >= ticket)

    def report(self, numbers: Mapping[str, float]) -> None:
        """Show `numbers`."""
        self._numbers[FIELDS:] = [float(numbers.get(name, 0.0)) for name in self._fields]
        self.settle()

    def settle(self) -> None:
        """All steps so far have been reported."""
        self._numbers[SIGNS] += 1.0
        self._numbers[REPORTED] = self._numbers[STEPS]
