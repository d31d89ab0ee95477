"""Stretches: frames that belong together, where they lie, and how they are brought together.

Cutting a batch into episodes copies it once, as a whole, and notes where each piece lies. When episodes are taken,
every entry is brought together at once for all of them: what is done for each piece by itself is arithmetic. Behind the
frames of a copy lies one of padding, which is taken like any other: numpy gathers whole rows by one index in a fifth of
the time that it takes to write them between zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from swath.entries import leaves_of, trusted
from swath.keys import PADDING_ID, TRAJ_IDS, Key
from swath.runtime.columns import array_of, tensor_of

LARGE = 1024
"""Bytes of a frame's entry from which a copy more counts."""
PADDING = -1
"""The index of the frame of padding."""


class Chunk:
    """Frames `[M]` that lie together.

    Attributes:
        entries: by key, `[M, ...]` or, of a copy, `[M + 1, ...]`, where the last is padding. Arrays on the CPU, and
            tensors elsewhere.
        kinds: their types, some of which numpy does not know.
        size: how many frames there are.
        live: how many of them an episode still needs.
        device: that of the batch.
    """

    def __init__(self, frames: TensorDictBase) -> None:
        """Take `frames` `[..., T]` as they lie."""
        given = leaves_of(frames)
        self.kinds = {key: leaf.dtype for key, leaf in given.items()}
        self.entries: dict[Key, Any] = {
            key: array_of(leaf) if leaf.device.type == "cpu" else leaf.detach() for key, leaf in given.items()
        }
        self.device, self.size, dims = frames.device, frames.numel(), frames.ndim
        self.live = self.size
        self.form = [(key, entry.dtype, entry.shape[dims:]) for key, entry in self.entries.items()]
        """What frames must have in common to lie in one chunk."""

    def copy(self, carried: Sequence[Stretch] = ()) -> list[Stretch]:
        """Copy the frames `[M]`, and behind them those `carried` over from other chunks; tell where these lie now."""
        count, order = self.size, Order([carried]) if carried else None
        ends = list(accumulate([one.size for one in carried], initial=count))
        self.size = self.live = ends[-1]
        for key, kind, shape in self.form:
            entry, whole = self.entries[key], (self.size + 1, *shape)
            out = np.empty(whole, kind) if isinstance(entry, np.ndarray) else entry.new_empty(whole)
            out[:count] = entry.reshape(count, *shape)
            if order is not None:
                out[count:PADDING] = order.taken(key)
            out[PADDING] = PADDING_ID if key == TRAJ_IDS else 0
            self.entries[key] = out
        return [Stretch(self, first, end) for first, end in pairwise(ends)]

    @cached_property
    def numbers(self) -> np.ndarray:
        """Those of the frames, to be cut into pieces."""
        return np.arange(self.size)

    @cached_property
    def frames(self) -> TensorDictBase:
        """All of them."""
        leaves = {key: as_tensor(entry[: self.size], self.kinds[key]) for key, entry in self.entries.items()}
        return trusted(leaves, (self.size,), self.device)

    @cached_property
    def is_large(self) -> bool:
        """Whether it is better not to copy them."""
        return any(entry[:1].nbytes > LARGE for entry in self.entries.values())

    @property
    def is_sparse(self) -> bool:
        """Whether much of it is not needed any more; of large frames, most."""
        return self.live * 2 < self.size if self.is_large else self.live * 4 < self.size * 3


class Stretch(NamedTuple):
    """The frames `first` to `end` of a chunk."""

    chunk: Chunk
    first: int
    end: int

    @property
    def size(self) -> int:
        """How many they are."""
        return self.end - self.first

    def slice(self) -> TensorDictBase:
        """The frames where they lie."""
        return self.chunk.frames[self.first : self.end]


def length_of(stretches: Iterable[Stretch]) -> int:
    """How many frames there are in all."""
    return sum([end - first for _, first, end in stretches])


def connected(stretches: Sequence[Stretch]) -> list[Stretch]:
    """The same, those in one that lie behind each other."""
    found: list[Stretch] = []
    for one in stretches:
        if found and found[-1].chunk is one.chunk and found[-1].end == one.first:
            one = Stretch(one.chunk, found.pop().first, one.end)
        found.append(one)
    return found


class Order:
    """Frames of several chunks as they are to lie: those of each row one after the other, and padding behind."""

    def __init__(self, rows: Sequence[Sequence[Stretch]], width: int = 0) -> None:
        """Fill up each of `rows` to `width` frames."""
        before, total = dict[Chunk, int](), 0
        numbers, padding = list[np.ndarray](), np.full(width, PADDING)
        for row in rows:
            left = width
            for chunk, first, end in row:
                if chunk not in before:
                    before[chunk], total = total, total + chunk.size
                numbers.append(chunk.numbers[first:end] + before[chunk] if before[chunk] else chunk.numbers[first:end])
                left -= end - first
            if left > 0:
                numbers.append(padding[:left])
        index = np.concatenate(numbers)
        (self.first, _), *others = before.items()
        self._others: list[tuple[Chunk, np.ndarray, np.ndarray]] = []
        """Most often there are none: then an entry is gathered in one call."""
        for chunk, begin in others:
            places = np.flatnonzero((index >= begin) & (index < begin + chunk.size))
            self._others.append((chunk, index[places] - begin, places))
        if others:
            index[index >= self.first.size] = PADDING  # where others are written
        self._index = index.reshape(len(rows), width) if width else index

    def taken(self, key: Key) -> Any:
        """The entry `key` of these frames, in new memory: an array, or a tensor elsewhere."""
        out = _rows_of(self.first.entries[key], self._index)
        for chunk, source, places in self._others:
            flat = out.reshape(self._index.size, *out.shape[self._index.ndim :])
            flat[places] = _rows_of(chunk.entries[key], source)
        return out

    def entries(self) -> dict[Key, Tensor]:
        """All entries of these frames."""
        return {key: as_tensor(self.taken(key), kind) for key, kind in self.first.kinds.items()}


def _rows_of(entry: Any, index: np.ndarray) -> Any:
    """The rows `index` of an array, or of a tensor elsewhere."""
    return entry.take(index, 0) if isinstance(entry, np.ndarray) else entry[torch.from_numpy(index).to(entry.device)]


def as_tensor(entry: Any, kind: torch.dtype) -> Tensor:
    """An entry as a tensor over the same memory."""
    return tensor_of(entry, kind) if isinstance(entry, np.ndarray) else entry
