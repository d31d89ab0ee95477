"""Columns: named, typed arrays over one piece of memory.

The only implementation of laid-out memory in the library: rows of envs, slots of batches, storages of replay buffers
and snapshots of weights are columns, or hold some. The memory may be private to this process, shared with others, or a
file; a columns object over a block can be sent to another process, which then sees the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swath.keys import Key
from swath.runtime.memory import Block, MemoryBlock, PrivateBlock, line_aligned

PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Stand-ins, by size, for types that numpy does not know, or that torch can do little with."""
MAX_BLOCK = 16_384
"""Private columns with more bytes in all lie apart: whoever keeps one of them would keep the memory of all.

What is gained by one piece is gained with few bytes: that columns are copied and looked through together.
"""
LIMITED = {torch.uint16, torch.uint32, torch.uint64}
"""Types that torch can copy, but not write to by index or mask."""


@dataclass(frozen=True)
class Leaf:
    """Shape (of one element: a lane, a frame, a weight) and dtype of an entry."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor, batch_dims: int) -> Leaf:
        """The leaf that `tensor` is a batch of."""
        return Leaf(tuple(tensor.shape[batch_dims:]), tensor.dtype)


class Columns:
    """Tensors `[*shape, *leaf.shape]` of all `leaves`, each beginning at a cache line of its own.

    Attributes:
        leaves: shape and dtype of one element of every entry.
        shape: how many elements each column has.
        tensors: the columns by key.
        block: the memory, if it is one piece, private to this process or shared; between columns there are zeros.
    """

    def __init__(
        self,
        leaves: Mapping[Any, Leaf],
        shape: Iterable[int],
        *,
        block: Block | None = None,
        offset: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Lay the leaves out: from byte `offset` of `block` on, or in private memory on `device`, zero at first."""
        self.leaves: dict[Key, Leaf] = dict(leaves)
        self.shape = tuple(shape)
        is_here = device is None or device.type == "cpu"
        if block is None and self.leaves and is_here and (size := nbytes(self.leaves, self.shape)) <= MAX_BLOCK:
            block = PrivateBlock(size)
        self.block, self._offset = block, offset
        self._parts: dict[tuple[int, int], Columns] = {}
        with torch.inference_mode(False):  # ordinary tensors, in whichever mode the caller runs
            if block is None:
                self.tensors = {
                    key: torch.zeros((*self.shape, *leaf.shape), dtype=leaf.dtype, device=device or "cpu")
                    for key, leaf in self.leaves.items()
                }
            else:
                self.tensors = self._over(block)

    def _over(self, block: Block) -> dict[Key, Tensor]:
        tensors: dict[Key, Tensor] = {}
        for key, begin in offsets(self.leaves, self.shape, self._offset).items():
            leaf = self.leaves[key]
            shape = (*self.shape, *leaf.shape)
            raw = torch.from_numpy(block.array((math.prod(shape) * leaf.dtype.itemsize,), np.uint8, begin))
            empty = torch.empty(0, dtype=leaf.dtype, device="cpu")
            tensors[key] = raw.view(leaf.dtype).view(shape) if raw.numel() else empty.view(shape)
        return tensors

    @classmethod
    def shared(cls, leaves: Mapping[Any, Leaf], shape: Iterable[int]) -> Columns:
        """Columns in new memory that other processes can be given, zero at first."""
        shape = tuple(shape)
        return cls(leaves, shape, block=MemoryBlock(max(1, nbytes(leaves, shape))))

    @property
    def is_shared(self) -> bool:
        """Whether another process may see what is written here."""
        return self.block is not None and not self.block.is_private

    @property
    def arrays(self) -> dict[Key, np.ndarray]:
        """The columns that lie on the CPU as arrays over the same memory; see `array_of`."""
        return {key: array_of(tensor) for key, tensor in self.tensors.items() if tensor.device.type == "cpu"}

    @cached_property
    def piece(self) -> np.ndarray | None:
        """The bytes that all columns lie in, if that is one block."""
        if self.block is None:
            return None
        return self.block.array((nbytes(self.leaves, self.shape, self._offset) - self._offset,), np.uint8, self._offset)

    def fill(self, values: Mapping[Key, Tensor]) -> None:
        """Copy `values`, of the same shapes, into the columns of their keys."""
        for key, value in values.items():
            self.tensors[key].copy_(value)

    def part(self, start: int, stop: int) -> Columns:
        """Elements `start` to `stop` of the first dimension, over the same memory; the same object each time."""
        if (start, stop) == (0, self.shape[0]):
            return self
        if (start, stop) in self._parts:
            return self._parts[start, stop]
        part = self._parts[start, stop] = object.__new__(type(self))
        part.leaves, part.shape = self.leaves, (stop - start, *self.shape[1:])
        part.block, part._offset, part._parts = None, 0, {}
        part.tensors = {key: tensor[start:stop] for key, tensor in self.tensors.items()}
        return part

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as a description of the memory, which the receiving process maps."""
        if not self.is_shared:
            raise TypeError("Columns in private memory, or that are a part of others, cannot be sent to a process.")
        return _mapped, (self.leaves, self.shape, self.block, self._offset)


def _mapped(leaves: dict[Key, Leaf], shape: tuple[int, ...], block: Block, offset: int) -> Columns:
    return Columns(leaves, shape, block=block, offset=offset)


def offsets(leaves: Mapping[Any, Leaf], shape: Iterable[int], start: int = 0) -> dict[Key, int]:
    """At which byte each column begins, if the first does at `start` or a little later."""
    count, found, at = math.prod(shape), dict[Key, int](), start
    for key, leaf in leaves.items():
        found[key] = at = line_aligned(at)
        at += count * math.prod(leaf.shape) * leaf.dtype.itemsize
    return found


def nbytes(leaves: Mapping[Any, Leaf], shape: Iterable[int], start: int = 0) -> int:
    """Up to which byte columns reach that begin at `start`."""
    shape, end = tuple(shape), start
    for key, begin in offsets(leaves, shape, start).items():
        end = begin + math.prod((*shape, *leaves[key].shape)) * leaves[key].dtype.itemsize
    return end


def array_of(tensor: Tensor) -> np.ndarray:
    """`tensor` on the CPU as an array over the same memory; as integers of its size if numpy does not know its type."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(PLAIN[tensor.dtype.itemsize]).numpy()


def writable(tensor: Tensor) -> Tensor:
    """`tensor` over the same memory, of a type that can be written by index or mask; both sides have to be so."""
    return tensor.view(PLAIN[tensor.dtype.itemsize]) if tensor.dtype in LIMITED else tensor


def tensor_of(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    """The reverse of `array_of`."""
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype is dtype else tensor.view(dtype)


@dataclass(frozen=True)
class Place:
    """A worker's part of leased memory: so many rows from `first_row` on.

    On its way to another process the memory has a number, and comes along only the first time.
    """

    memory: Columns | None
    first_row: int
    rows: int
    number: int = 0
    forget: tuple[int, ...] = ()
    """Numbers of memory that is no longer used."""
