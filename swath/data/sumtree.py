"""Sums over many weights, kept up to date: draws in proportion to weights that change all the time."""

from __future__ import annotations

import numpy as np

HEAVIEST = 1e290
"""The largest weight: even the sum of very many of them is finite."""

_TOP = 1024
"""Levels are halved down to about this size; the rest is one `searchsorted`, cheaper than ten more levels."""
_BLOCK = 16
"""How many weights, or minima, have one minimum in common."""
_CHUNK = 1 << 16
"""How many weights are summed up in one go: fresh memory for more of them costs more time than the sums do. A multiple
of all blocks, and a power of 2."""
_GAP = 1 << 12
"""Ranges that begin no further apart are summed up together with what lies between them, in one go."""


class SumTree:
    """Weights `[capacity]`, at first all zero, with their total, their minimum, and a search by cumulated weight.

    Every sum is made from the two below it, never by adding a change to what it was, so that rounding errors do not
    pile up however long the tree is used. All methods work on whole batches.

    Args:
        capacity: how many weights there are.
    """

    def __init__(self, capacity: int) -> None:
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
        self._highs: list[np.ndarray] | None = None
        """The largest weights likewise, once the maximum was asked for."""
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
        """The largest weight. Kept up to date once it was asked for."""
        if self._highs is None:
            self._highs = [np.zeros_like(lows) for lows in self._lows]
            self._sum_up(0, self.capacity)
        return float(self._highs[1].max())

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
        self._bound(index // _BLOCK, index // _BLOCK**2)
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            index = index >> 1
            pair = index << 1
            sums = below[pair]
            pair += 1
            sums += below[pair]
            above[index] = sums
        self._cumulated = None

    def fill(self, start: int, stop: int, weight: float, step: int = 0, times: int = 1) -> None:
        """Give all indices from `start` up to `stop` the same weight, faster than `set` does.

        With `times`, also those in as many ranges like this, each `step` after the one before; they do not overlap.
        """
        width, far = stop - start, (times - 1) * step
        if not 0 <= start <= stop <= stop + far <= self.capacity or (times > 1 and step < width):
            raise IndexError(
                f"A range must lie within 0 and {self.capacity}, got {start} to {stop}, {times} times at a distance of "
                f"{step}."
            )
        self._check_weights(weight)
        if not width:
            return
        if times == 1 or step > max(_GAP, 2 * width):
            for begin in range(start, start + far + 1, max(step, 1)):
                self._levels[0][begin : begin + width] = weight
                self._sum_up(begin, begin + width)
            return
        leaves = self._levels[0][start : start + far]
        leaves.reshape(times - 1, step)[:, :width] = weight
        self._levels[0][start + far : stop + far] = weight
        self._sum_up(start, stop + far)

    def load(self, weights: np.ndarray) -> None:
        """Replace all weights; those past the end of `weights` become zero."""
        if len(weights) > self.capacity:
            raise ValueError(f"There is room for {self.capacity} weights, got {len(weights)}.")
        if len(weights):
            self._check_weights(weights)
        self._levels[0][: len(weights)] = weights
        self._levels[0][len(weights) :] = 0.0
        self._sum_up(0, self.capacity)

    def grown(self, capacity: int) -> SumTree:
        """A tree with these weights, and room for more."""
        larger = SumTree(capacity)
        larger.load(self._levels[0][: self.capacity])
        return larger

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
        for begin in range(start - start % _CHUNK, stop, _CHUNK):
            first, last = max(start, begin), min(stop, begin + _CHUNK)
            self._bound(*(slice(first // width, _blocks(last, width)) for width in (_BLOCK, _BLOCK**2)))
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            start, stop = start >> 1, (stop + 1) >> 1
            pairs = below[2 * start : 2 * stop]
            np.add(pairs[::2], pairs[1::2], out=above[start:stop])
        self._cumulated = None

    def _bound(self, blocks: np.ndarray | slice, wider: np.ndarray | slice) -> None:
        """Find the minima of `blocks` anew, then those of the `wider` blocks, and the maxima if they are kept."""
        rows = self._levels[0].reshape(-1, _BLOCK)[blocks]
        self._lows[0][blocks] = _columns(np.where(rows > 0.0, rows, np.inf)).min(0)
        self._lows[1][wider] = _columns(self._lows[0].reshape(-1, _BLOCK)[wider]).min(0)
        if self._highs is not None:
            self._highs[0][blocks] = _columns(rows).max(0)
            self._highs[1][wider] = _columns(self._highs[0].reshape(-1, _BLOCK)[wider]).max(0)

    @staticmethod
    def _check_weights(weights: np.ndarray | float) -> None:
        lightest, heaviest = np.min(weights), np.max(weights)
        if not (lightest >= 0.0 and heaviest <= HEAVIEST):  # not a number fails too
            raise ValueError(f"Weights must be from 0 to {HEAVIEST:g}, got {lightest} to {heaviest}.")


def _blocks(count: int, width: int) -> int:
    """How many blocks of `width` are needed to hold `count`."""
    return -(-count // width)


def _columns(rows: np.ndarray) -> np.ndarray:
    """Rows as columns, of which numpy finds the extremes much faster."""
    return rows.T.copy()
