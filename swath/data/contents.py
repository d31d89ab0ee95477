"""What a buffer holds at one moment, as samplers see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from swath.keys import Key

EMPTY = 0
"""The stamp of a row that holds nothing: never written, being written, or given up by a writer that died."""


@dataclass(frozen=True)
class Contents:
    """The rows of a ring, and which of them can be read.

    Rows are written in order, for ever: the row at *position* p lies in row `p % capacity`. A row holds one frame of
    each lane; the frame of lane l in row r has the *index* `l * capacity + r`, so that a lane is one piece of memory.
    Most buffers have one lane; those with `ndim` above 1 have several.

    Positions from `first` up to `end` may hold something: a row does if its stamp is its position + 1. All positions
    below `end` are settled: what is not there now will not come any more.
    """

    lanes: int
    capacity: int
    first: int
    end: int
    stamps: np.ndarray
    """`[capacity]`: position + 1 of what each row holds, or `EMPTY`."""
    seams: np.ndarray
    """`[lanes * capacity]`, bool: the frame does not continue the one before it in its lane, as when another writer or
    another env wrote that one. Says nothing of episodes that end: their flags and ids do."""
    entry: Callable[[Key, np.ndarray], np.ndarray]
    """The entry of that key, for frames `index` of any shape, which need not hold anything: `[*index.shape, ...]`.
    KeyError if there is none."""
    origin: int = 0
    """The first position since the buffer was last emptied: if it is still `first`, nothing was overwritten."""
    whole: bool = False
    """Whether all of these positions hold something: nobody is writing, and nobody died while writing."""
    edits: int = 0
    """Another number whenever frames have been changed where they lie. It changes once they can be read again: who has
    looked at them while they were hidden, or before, has to look again."""

    @property
    def rows(self) -> int:
        """How many positions may hold something."""
        return self.end - self.first

    def index(self, positions: np.ndarray, lanes: np.ndarray | int = 0) -> np.ndarray:
        """The frames of `lanes` at `positions`."""
        if isinstance(lanes, int) and not lanes:
            return np.asarray(positions % self.capacity)
        return np.asarray(positions % self.capacity + np.asarray(lanes) * self.capacity)

    def in_all_lanes(self, positions: np.ndarray) -> np.ndarray:
        """The frames of all lanes at `positions` `[rows]`: `[lanes, rows]`."""
        return self.index(positions, np.arange(self.lanes)[:, None])

    def positions(self, index: np.ndarray) -> np.ndarray:
        """The position at which each frame of `index` should be, as seen now."""
        newest = self.end - 1
        return np.asarray(newest - (newest - index % self.capacity) % self.capacity)

    def holds(self, index: np.ndarray) -> np.ndarray:
        """Whether each frame of `index` is there, and is still the one that it was when this was made."""
        positions = self.positions(index)
        return np.asarray((self.stamps[index % self.capacity] == positions + 1) & (positions >= self.first))
