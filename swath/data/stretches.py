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

from swath.entries import leaves_of, trainable, trusted
from swath.keys import PADDING_ID, TRAJ_IDS, Key
from swath.runtime.columns import array_of, tensor_of

LARGE = 1024
"""Bytes of a frame's entry from which a copy more counts."""
PADDING = -1
"""The index of the frame of padding."""


class Chunk:
    """Frames `[M]` that lie together.

    Attributes:
        entries: by key, `[M, ...]`; of a copy `[M + room + 1, ...]`, where the last is padding. Arrays on the CPU, and
            tensors elsewhere.
        kinds: their types, some of which numpy does not know.
        form: what frames must have in common to lie in one chunk.
        size: how many frames there are.
        room: how many more it can take.
        live: how many of them an episode still needs.
        device: that of the batch.
    """

    def __init__(self, frames: TensorDictBase) -> None:
        """Take `frames` `[..., T]` as they lie."""
        given, dims = leaves_of(frames), frames.ndim
        self.kinds = {key: leaf.dtype for key, leaf in given.items()}
        self.entries: dict[Key, Any] = {
            key: array_of(leaf) if leaf.is_cpu else leaf.detach() for key, leaf in given.items()
        }
        self.form = [(key, entry.dtype, entry.shape[dims:]) for key, entry in self.entries.items()]
        self.device = frames.device
        self.size: int = frames.numel()
        self.room = self.live = 0

    def copy(self, carried: Sequence[Stretch] = (), room: int = 0) -> list[Stretch]:
        """Copy the frames `[M]`, and behind them those `carried` over from other chunks; tell where these lie now.

        There is `room` for more behind them, and then the padding.
        """
        count, order = self.size, Gathering([carried]) if carried else None
        ends = list(accumulate([one.size for one in carried], initial=count))
        self.size, self.live, self.room = ends[-1], ends[-1] - count, room
        for key, kind, shape in self.form:
            entry, whole = self.entries[key], (self.size + room + 1, *shape)
            out = np.empty(whole, kind) if isinstance(entry, np.ndarray) else entry.new_empty(whole)
            out[:count] = entry.reshape(count, *shape)
            if order is not None:
                out[count : self.size] = order.taken(key)
            out[PADDING] = PADDING_ID if key == TRAJ_IDS else 0
            self.entries[key] = out
        return [Stretch(self, first, end) for first, end in pairwise(ends)]

    def append(self, more: Chunk) -> None:
        """Copy also the frames of `more`, which has the same form and for which there is room."""
        first, self.size, self.room = self.size, self.size + more.size, self.room - more.size
        for key, _, shape in self.form:
            self.entries[key][first : self.size] = more.entries[key].reshape(more.size, *shape)

    @cached_property
    def is_large(self) -> bool:
        """Whether it is better not to copy them."""
        return any(bool(entry[:1].nbytes > LARGE) for entry in self.entries.values())

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
        chunk = self.chunk
        with trainable():
            leaves = {
                key: as_tensor(entry[self.first : self.end], chunk.kinds[key]) for key, entry in chunk.entries.items()
            }
        return trusted(leaves, (self.size,), chunk.device)


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


class Gathering:
    """Frames of several chunks as they are to lie: those of each row one after the other, and padding behind."""

    def __init__(self, rows: Sequence[Sequence[Stretch]], mask: np.ndarray | None = None) -> None:
        """Take all of `rows`; with a `mask` `[N, longest]` of what is real, each fills a row of it."""
        before, total = dict[Chunk, int](), 0
        firsts, sizes, filled, width = list[int](), list[int](), 0, 0 if mask is None else mask.shape[1]
        for row in rows:
            for chunk, first, end in row:
                begin = before.get(chunk)
                if begin is None:
                    before[chunk], begin, total = total, total, total + chunk.size
                firsts.append(begin + first)
                sizes.append(end - first)
                filled += end - first
            if width and filled % width:
                sizes[-1] += width - filled % width  # what lies behind is padding, see below
                filled += width - filled % width
        lengths = np.array(sizes)
        index = (np.array(firsts) - lengths.cumsum() + lengths).repeat(lengths) + np.arange(filled)
        if mask is not None:
            index = np.where(mask, index.reshape(mask.shape), PADDING)
        (self.first, _), *others = before.items()
        self._others: list[tuple[Chunk, np.ndarray, np.ndarray]] = []
        """Most often there are none: then an entry is gathered in one call."""
        for chunk, start in others:
            places = np.flatnonzero((index >= start) & (index < start + chunk.size))
            self._others.append((chunk, index.reshape(-1)[places] - start, places))
        if others:
            index[index >= self.first.size] = PADDING  # where others are written
        self._index = index

    def taken(self, key: Key) -> Any:
        """The entry `key` of these frames, in new memory: an array, or a tensor elsewhere."""
        out = _rows_of(self.first.entries[key], self._index)
        for chunk, source, places in self._others:
            flat = out.reshape(self._index.size, *out.shape[self._index.ndim :])
            flat[places] = _rows_of(chunk.entries[key], source)
        return out

    def entries(self) -> dict[Key, Tensor]:
        """All entries of these frames."""
        if self._others:
            return {key: as_tensor(self.taken(key), kind) for key, kind in self.first.kinds.items()}
        index, laid = self._index, dict[Key, Tensor]()
        for key, entry in self.first.entries.items():  # the same without a call for each
            kind = self.first.kinds[key]
            if isinstance(entry, np.ndarray):
                made = torch.from_numpy(entry.take(index, 0))
                laid[key] = made if made.dtype is kind else made.view(kind)
            else:
                laid[key] = _rows_of(entry, index)
        return laid


def _rows_of(entry: Any, index: np.ndarray) -> Any:
    """The rows `index` of an array, or of a tensor elsewhere."""
    return entry.take(index, 0) if isinstance(entry, np.ndarray) else entry[torch.from_numpy(index).to(entry.device)]


def as_tensor(entry: Any, kind: torch.dtype) -> Tensor:
    """An entry as a tensor over the same memory."""
    return tensor_of(entry, kind) if isinstance(entry, np.ndarray) else entry
