"""Sums over many weights, kept up to date: draws in proportion to weights that change all the time."""

from __future__ import annotations

import numpy as np

HEAVIEST = 1e290
"""The largest weight: even the sum of very many of them is finite."""

_TOP = 1024
"""Levels are halved down to about this size; the rest is one `searchsorted`, cheaper than ten more levels."""
_BLOCK = 16
"""How many weights, or minima, have one minimum in common."""


class SumTree:
    """Weights `[capacity]`, at first all zero, with their total, their minimum, and a search by cumulated weight.

    Every sum is made from the two below it, never by adding a change to what it was, so that rounding errors do not
    pile up however long the tree is used. All methods work on whole batches.

    Args:
        capacity: how many weights there are.
    """

    def __init__(self, capacity: int) -> None:
        """Make all weights zero."""
        if capacity < 1:
            raise ValueError(f"A sum tree needs a capacity of at least 1, got {capacity}.")
        self.capacity = capacity
        depth = max(0, (_blocks(capacity, _TOP) - 1).bit_length())
        step = max(_BLOCK, 1 << depth)
        size = _blocks(capacity, step) * step  # the sizes of all levels are whole
        self._levels = [np.zeros(size >> level) for level in range(depth + 1)]
        """Weights first; every level above has the sums of pairs."""
        self._lows = [np.full(_blocks(size, _BLOCK**2) * _BLOCK, np.inf), np.full(_blocks(size, _BLOCK**2), np.inf)]
        """The smallest weight above zero of every block, and of every block of blocks."""
        self._cumulated: np.ndarray | None = None
        """Running sums of the topmost level, until something changes."""

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._running()[-1])

    @property
    def minimum(self) -> float:
        """The smallest weight above zero; infinity if there is none."""
        return float(self._lows[1].min())

    @property
    def maximum(self) -> float:
        """The largest weight. Not kept up to date: asking takes time in proportion to the capacity."""
        return float(self._levels[0].max())

    def get(self, index: np.ndarray) -> np.ndarray:
        """The weights of `index`."""
        return np.asarray(self._levels[0][index])

    def set(self, index: np.ndarray, weights: np.ndarray | float) -> None:
        """Give `index` new weights; of an index that comes more than once the last one counts.

        Raises:
            IndexError: an index is negative, or not below the capacity.
            ValueError: a weight is negative, not a number, or too heavy to be summed up.
        """
        if not index.size:
            return
        self._check_weights(weights)
        if not 0 <= index.min() <= index.max() < self.capacity:
            raise IndexError(f"Indices must be from 0 to {self.capacity - 1}, got {index.min()} to {index.max()}.")
        self._levels[0][index] = weights
        self._lower(index // _BLOCK, index // _BLOCK**2)
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            index = index >> 1
            pair = index << 1
            sums = below[pair]
            pair += 1
            sums += below[pair]
            above[index] = sums
        self._cumulated = None

    def fill(self, start: int, stop: int, weight: float) -> None:
        """Give all indices from `start` up to `stop` the same weight, faster than `set` does."""
        if not 0 <= start <= stop <= self.capacity:
            raise IndexError(f"A range must lie within 0 and {self.capacity}, got {start} to {stop}.")
        self._check_weights(weight)
        if start < stop:
            self._levels[0][start:stop] = weight
            self._sum_up(start, stop)

    def load(self, weights: np.ndarray) -> None:
        """Replace all weights; those past the end of `weights` become zero."""
        if len(weights) > self.capacity:
            raise ValueError(f"There is room for {self.capacity} weights, got {len(weights)}.")
        if len(weights):
            self._check_weights(weights)
        self._levels[0][: len(weights)] = weights
        self._levels[0][len(weights) :] = 0.0
        self._sum_up(0, self.capacity)

    def find(self, mass: np.ndarray) -> np.ndarray:
        """For each mass, the index at which the running sum of the weights first exceeds it.

        With a mass drawn uniformly from `[0, total)` every index comes in proportion to its weight. One that has the
        weight zero never comes, also where rounding puts a mass at or past the end.
        """
        cumulated = self._running()
        if cumulated[-1] <= 0.0:
            raise ValueError("All weights are zero: there is nothing to find.")
        # Just below the end, the first running sum that exceeds the mass is the one that reaches the end.
        mass = np.maximum(0.0, np.minimum(mass, np.nextafter(cumulated[-1], 0.0)))
        index = cumulated.searchsorted(mass, side="right")
        mass -= np.concatenate(([0.0], cumulated))[index]
        for level in self._levels[-2::-1]:
            index += index
            left = level[index]
            right = mass >= left
            left *= right
            mass -= left
            index += right
        void = np.flatnonzero(self._levels[0][index] == 0.0)
        if len(void):
            index[void] = [self._nearest(int(i)) for i in index[void]]
        return index

    def _nearest(self, index: int) -> int:
        """The last index before `index` with some weight: there rounding has pushed a mass past the end of a pair."""
        level, levels = 0, self._levels
        while not (index & 1 and levels[level][index - 1]):  # climb until there is some weight to the left
            index >>= 1
            level += 1
        index -= 1
        while level:  # then go down, as far to the right as there is weight
            level -= 1
            index = 2 * index + bool(levels[level][2 * index + 1])
        return index

    def _running(self) -> np.ndarray:
        if self._cumulated is None:
            self._cumulated = self._levels[-1].cumsum()
        return self._cumulated

    def _sum_up(self, start: int, stop: int) -> None:
        """Make all sums above the leaves from `start` up to `stop` anew."""
        blocks, wider = (slice(start // width, _blocks(stop, width)) for width in (_BLOCK, _BLOCK**2))
        self._lower(blocks, wider)
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            start, stop = start >> 1, (stop + 1) >> 1
            pairs = below[2 * start : 2 * stop]
            np.add(pairs[::2], pairs[1::2], out=above[start:stop])
        self._cumulated = None

    def _lower(self, blocks: np.ndarray | slice, wider: np.ndarray | slice) -> None:
        """Find the minima of `blocks` anew, then those of the `wider` blocks."""
        rows = self._levels[0].reshape(-1, _BLOCK)[blocks]
        self._lows[0][blocks] = _minima(np.where(rows > 0.0, rows, np.inf))
        self._lows[1][wider] = _minima(self._lows[0].reshape(-1, _BLOCK)[wider])

    @staticmethod
    def _check_weights(weights: np.ndarray | float) -> None:
        lightest, heaviest = np.min(weights), np.max(weights)
        if not (lightest >= 0.0 and heaviest <= HEAVIEST):  # not a number fails too
            raise ValueError(f"Weights must be from 0 to {HEAVIEST:g}, got {lightest} to {heaviest}.")


def _blocks(count: int, width: int) -> int:
    """How many blocks of `width` are needed to hold `count`."""
    return -(-count // width)


def _minima(rows: np.ndarray) -> np.ndarray:
    """The minimum of each row; numpy is much faster at those of columns."""
    return np.asarray(rows.T.copy().min(0))
