"""Frames drawn in proportion to priorities."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from swath.data.contents import Contents
from swath.data.samplers import Draw, Sampler
from swath.data.sumtree import SumTree
from swath.errors import NothingToSampleError, check_foreign_arguments

WEIGHT, SAME_WEIGHT = "_weight", "priority_weight"
"""The names under which importance weights are delivered: users of TorchRL know both."""

_REDUCTIONS: dict[str, Callable[..., Any]] = {"max": np.max, "min": np.min, "median": np.median, "mean": np.mean}
_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}
_LONG_RANGE, _LARGE_PART = 128, 1 / 32
"""New rows, and new rows as a part of all, from which on to `fill` several lanes is faster than to `set` them."""
_CHUNK = 1 << 16
"""How many rows are looked at in one go: fresh memory for more of them costs more time than the look does."""
_REFUSED = {
    "device": "Priorities are kept on the CPU, where their sums are quickest to change.",
    "max_pending": "New priorities count at once.",
}
_HARMLESS = {"device": (None, "cpu", torch.device("cpu")), "max_pending": (None,)}


class PrioritizedSampler(Sampler):
    """Draws each frame with a chance proportional to `(priority + eps) ** alpha`, with replacement.

    New frames have the highest priority seen so far, so that each is likely to be drawn soon; `update_priority` then
    gives them their own. Every draw comes with importance weights, which make up for the unequal chances: of a frame
    drawn with the chance P out of N it is `(N * P) ** -beta`, divided by the largest such weight in the buffer.

    Args:
        max_capacity: how many frames the buffer can hold. Only a hint: if it can hold more, the sampler grows.
        alpha: how much priorities matter; 0: not at all, 1: fully.
        beta: how much of the bias the importance weights take away; 0: nothing, 1: all. May be changed at any time.
        eps: added to all priorities, so that none is zero.
        dtype: of the importance weights. Sums are always made in double precision.
        reduction: how several priorities given for one frame become one: "max", "min", "median" or "mean".
        max_priority_within_buffer: new frames have the highest priority of those now in the buffer, instead of the
            highest ever seen.
        others: `device`, if it is None or the CPU; what else is not known is named in the error.
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        **others: Any,
    ) -> None:
        check_foreign_arguments(type(self).__name__, others, refused=_REFUSED, harmless=_HARMLESS)
        if reduction not in _REDUCTIONS:
            raise ValueError(f"`reduction` must be one of {', '.join(map(repr, _REDUCTIONS))}, got {reduction!r}.")
        if dtype not in _DTYPES:
            raise NotImplementedError(f"`dtype` must be torch.float32 or torch.float64, got {dtype}.")
        self.max_capacity = max_capacity
        self.dtype = dtype
        self.reduction = reduction
        self.max_priority_within_buffer = max_priority_within_buffer
        self._eps = _not_negative("eps", eps)
        self._alpha = _not_negative("alpha", alpha)
        self._beta = _not_negative("beta", beta)
        self._highest: float | None = None
        self.empty()

    @property
    def alpha(self) -> float:
        """How much priorities matter. When it is changed, the priorities given so far are kept."""
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        alpha = _not_negative("alpha", alpha)
        if self._alpha:  # with 0 all priorities were alike, and stay so
            present = self._tree.get(np.arange(self._frames))
            self._tree.load(np.where(present > 0.0, present ** (alpha / self._alpha), 0.0))
        self._alpha = alpha

    @property
    def beta(self) -> float:
        """How much of the bias the importance weights take away."""
        return self._beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._beta = _not_negative("beta", beta)

    @property
    def eps(self) -> float:
        """What is added to all priorities."""
        return self._eps

    @property
    def default_priority(self) -> float:
        """The priority of new frames: the highest so far, or 1 if none was ever given."""
        if self.max_priority_within_buffer and self._alpha and (heaviest := self._tree.maximum):
            return float(heaviest ** (1.0 / self._alpha) - self._eps)
        return 1.0 if self._highest is None else self._highest

    def draw(self, contents: Contents, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Choose `batch_size` frames, each in proportion to its weight."""
        self._look(contents)
        index = self._find(batch_size, generator)
        while not (contents.whole or (there := contents.holds(index)).all()):  # rare: a writer has taken their rows
            self._tree.set(index[~there], 0.0)
            index[~there] = self._find(int((~there).sum()), generator)
        weight = (self._tree.get(index) / self._tree.minimum) ** -self._beta
        weight = weight.astype(_DTYPES[self.dtype])
        return Draw(index, {WEIGHT: weight, SAME_WEIGHT: weight.copy()})

    def update_priority(self, contents: Contents, index: np.ndarray, priority: np.ndarray) -> None:
        """Give the frames `index` new priorities: one for each, several for each, or one for all.

        `index` has any shape; priorities have the same, or `[B]` for B frames, or one of these with more dimensions
        behind. Of a frame that comes more than once the last one counts.

        Raises:
            ValueError: a priority is negative, infinite or not a number.
            RuntimeError: there are not as many priorities as frames.
            IndexError: the buffer has no such frame.
        """
        self._look(contents)
        index, priority = np.asarray(index).reshape(-1), np.asarray(priority, np.float64)
        priority = self._by_frame(priority, len(index))
        if not index.size:
            return
        self._check(index, priority)
        highest = float(priority.max())
        self._highest = highest if self._highest is None else max(highest, self._highest)
        # A frame that is not there must keep the weight zero.
        self._tree.set(index, np.where(contents.holds(index), self._weigh(priority), 0.0))

    def empty(self) -> None:
        """Forget all frames and priorities."""
        self._tree = SumTree(self.max_capacity)
        self._highest = None
        self._frames = 0
        """How many frames the buffer has room for, once it was seen."""
        self._seen = range(0)
        """The positions that the tree knows."""
        self._edits = 0

    def state_dict(self) -> dict[str, Any]:
        """All priorities, and for which frames they are."""
        return {
            "alpha": self._alpha,
            "beta": self._beta,
            "eps": self._eps,
            "weights": torch.from_numpy(self._tree.get(np.arange(self._frames))),
            "highest": self._highest,
            "first": self._seen.start,
            "end": self._seen.stop,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        weights = state["weights"].numpy()
        self._have_room(len(weights))
        self._tree.load(weights)
        self._frames, self._seen = len(weights), range(state["first"], state["end"])
        self._alpha, self._beta, self._eps = state["alpha"], state["beta"], state["eps"]
        self._highest = state["highest"]

    def _find(self, count: int, generator: torch.Generator | None) -> np.ndarray:
        total = self._tree.total
        if total <= 0.0:
            raise NothingToSampleError("The buffer is empty: there is nothing to sample.")
        shares = torch.rand(count, dtype=torch.float64, generator=generator, device="cpu").numpy()
        return self._tree.find(shares * total)

    def _weigh(self, priority: Any) -> Any:
        return (priority + self._eps) ** self._alpha

    def _look(self, contents: Contents) -> None:
        """Give weights to the frames that have come, and take them from those that have gone."""
        if contents.edits != self._edits:
            self._look_again(contents)
        if contents.end == self._seen.stop and contents.first == self._seen.start:
            return
        if contents.end < self._seen.stop:  # another buffer, or one that was emptied
            self.empty()
        self._frames = contents.lanes * contents.capacity
        self._have_room(self._frames)
        weight = self._new_weight()
        if self._seen:
            # Rows that a writer has taken; those of positions more than a round ago hold newer frames by now.
            gone = max(self._seen.start, contents.end - contents.capacity)
            self._fill(contents, gone, contents.first, 0.0)
        new = max(self._seen.stop, contents.first)
        self._fill(contents, new, contents.end, weight)
        for chunk in range(contents.end if contents.whole else new, contents.end, _CHUNK):
            rows = contents.index(np.arange(chunk, min(chunk + _CHUNK, contents.end)))
            missing = rows[~contents.holds(rows)]
            self._tree.set(contents.in_all_lanes(missing).reshape(-1), 0.0)
        self._seen = range(contents.first, contents.end)

    def _look_again(self, contents: Contents) -> None:
        """Give weights to frames that were missing and are there now: they were changed, or written very slowly."""
        self._edits = contents.edits
        first, stop = max(self._seen.start, contents.first), min(self._seen.stop, contents.end)
        for chunk in range(first, stop, _CHUNK):
            rows = contents.index(np.arange(chunk, min(chunk + _CHUNK, stop)))
            frames = contents.in_all_lanes(rows[contents.holds(rows)]).reshape(-1)
            self._tree.set(frames[self._tree.get(frames) == 0.0], self._new_weight())

    def _have_room(self, frames: int) -> None:
        if frames > self.max_capacity:
            self.max_capacity, self._tree = frames, self._tree.grown(frames)

    def _new_weight(self) -> float:
        if self.max_priority_within_buffer and (heaviest := self._tree.maximum):
            return heaviest
        return float(self._weigh(1.0 if self._highest is None else self._highest))

    def _fill(self, contents: Contents, start: int, stop: int, weight: float) -> None:
        """Give all frames at the positions from `start` up to `stop` the same weight."""
        if start >= stop:
            return
        lanes, capacity, count = contents.lanes, contents.capacity, stop - start
        if lanes > 1 and count < min(_LONG_RANGE, capacity * _LARGE_PART):
            self._tree.set(contents.in_all_lanes(np.arange(start, stop)).reshape(-1), weight)
            return
        row = start % capacity
        straight = min(count, capacity - row)  # up to the end of the ring; the rest is at its beginning
        self._tree.fill(row, row + straight, weight, capacity, lanes)
        self._tree.fill(0, count - straight, weight, capacity, lanes)

    def _by_frame(self, priority: np.ndarray, frames: int) -> np.ndarray:
        """One priority for each of `frames` frames `[B]`, or one for all `[]`."""
        if priority.size == 1:
            return priority.reshape(())
        # The frames are in the leading dimensions: as few as there need be.
        for dims in range(1, priority.ndim + 1):
            if math.prod(priority.shape[:dims]) == frames:
                rows = priority.reshape(frames, math.prod(priority.shape[dims:]))
                return np.asarray(_REDUCTIONS[self.reduction](rows, axis=1) if rows.shape[1] != 1 else rows[:, 0])
        raise RuntimeError(
            f"There must be one priority for each frame, or one for all: got priorities of shape {priority.shape} "
            f"for {frames} frames."
        )

    def _check(self, index: np.ndarray, priority: np.ndarray) -> None:
        if not 0 <= index.min() <= index.max() < self._frames:
            raise IndexError(
                f"The buffer has frames from 0 to {self._frames - 1}, but priorities were given for frames from "
                f"{index.min()} to {index.max()}."
            )
        if not (priority.min() >= 0.0 and priority.max() < np.inf):  # not a number fails too
            raise ValueError(
                f"Priorities must be finite numbers of at least 0, got values from {priority.min()} to "
                f"{priority.max()}. Are they signed errors? Then give their absolute values, and look for NaN."
            )


def _not_negative(name: str, value: float) -> float:
    if not value >= 0.0:
        raise ValueError(f"`{name}` must be a number of at least 0, got {value}.")
    return float(value)
