"""Layouts: what lies where in a storage's memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swath.data.forms import Entries, Form, form_from
from swath.keys import Key, as_key, as_path
from swath.runtime.columns import Leaf, offsets
from swath.runtime.memory import page_aligned


@dataclass(frozen=True)
class StorageLayout:
    """Everything about the entries of a storage but their values.

    Attributes:
        form: how data are taken apart and put together.
        leaves: shape (of one frame) and dtype of every entry.
        dims: the storage's batch dimensions beside the one that it grows along: those of its lanes.
        rows: how many frames each lane has room for.
    """

    form: Form
    leaves: dict[Key, Leaf]
    dims: tuple[int, ...]
    rows: int

    @property
    def lanes(self) -> int:
        """How many lanes there are."""
        return math.prod(self.dims)

    @property
    def frames(self) -> int:
        """How many frames there is room for."""
        return self.lanes * self.rows

    @staticmethod
    def of(form: Form, entries: Entries, dims: Sequence[int], max_size: int) -> StorageLayout:
        """The layout for `entries` `[*dims, rows, ...]`, with room for `max_size` frames over all lanes."""
        lanes = math.prod(dims)
        if not lanes:
            raise ValueError(f"There must be a frame of at least one lane, got lanes of shape {tuple(dims)}.")
        if max_size < lanes:
            raise ValueError(f"A storage of max_size={max_size} has no room for one frame of each of {lanes} lanes.")
        leaves = {key: Leaf.of(entry, len(dims) + 1) for key, entry in entries.items()}
        return StorageLayout(form, leaves, tuple(dims), max_size // lanes)

    def columns_start(self, words: int) -> int:
        """Where the columns begin in a storage's memory: behind so many words, the stamps and the seams."""
        return page_aligned(words) + self.rows * 8 + self.frames

    def pieces(self, words: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where rows `start` to `stop` lie, behind so many words: the first byte of each piece, and how many."""
        stamps = page_aligned(words)
        yield stamps + start * 8, (stop - start) * 8
        columns = [(stamps + self.rows * 8, 1)]  # the seams
        for key, begin in offsets(self.leaves, (self.frames,), self.columns_start(words)).items():
            columns.append((begin, math.prod(self.leaves[key].shape) * self.leaves[key].dtype.itemsize))
        for begin, width in columns:
            for lane in range(self.lanes):
                yield begin + (lane * self.rows + start) * width, (stop - start) * width

    def public_index(self, index: np.ndarray) -> Any:
        """Frames as users know them: numbers of rows, or with several dimensions (rows, lanes...)."""
        if not self.dims:
            return torch.from_numpy(index)
        lanes = np.unravel_index(index // self.rows, self.dims)
        return tuple(torch.from_numpy(part) for part in (index % self.rows, *lanes))

    def public_index_of_rows(self, rows: np.ndarray) -> Tensor:
        """All frames of `rows`, as numbers of rows or as `[rows * lanes, ndim]`, row by row."""
        if not self.dims:
            return torch.from_numpy(rows)
        ndim = len(self.dims) + 1
        where = np.empty((len(rows), *self.dims, ndim), np.int64)
        for axis, numbers in enumerate((rows, *map(np.arange, self.dims))):
            where[..., axis] = numbers.reshape(-1, *[1] * (ndim - 1 - axis))
        return torch.from_numpy(where.reshape(-1, ndim))

    def flat_index(self, public: Any) -> np.ndarray:
        """The reverse of `public_index`, flat; `[..., ndim]` will do as well as a tuple."""
        if not self.dims:
            return np.asarray(torch.as_tensor(public, device="cpu").reshape(-1), np.int64)
        if not isinstance(public, tuple):
            public = torch.as_tensor(public, device="cpu").reshape(-1, len(self.dims) + 1).unbind(1)
        rows, *lanes = (np.asarray(part) for part in public)
        return np.asarray(np.ravel_multi_index(tuple(lanes), self.dims) * self.rows + rows)

    def to_json(self) -> str:
        """In words."""
        leaves = [[as_path(key), leaf.shape, name_of(leaf.dtype)] for key, leaf in self.leaves.items()]
        return json.dumps({"form": self.form.described(), "leaves": leaves, "dims": self.dims, "rows": self.rows})

    @staticmethod
    def from_json(words: str) -> StorageLayout:
        """From words. Nothing in them is ever executed."""
        read = json.loads(words)
        leaves = {as_key(path): Leaf(tuple(shape), dtype_named(name)) for path, shape, name in read["leaves"]}
        return StorageLayout(form_from(read["form"]), leaves, tuple(read["dims"]), read["rows"])


def dtype_named(name: str) -> torch.dtype:
    """The type of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type of tensors.")
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """The name of a type."""
    return str(dtype).removeprefix("torch.")
