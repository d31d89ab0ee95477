"""Rows in memory that several processes map."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from swath.envs.rows import Leaf, Rows
from swath.keys import Key
from swath.runtime import Block, MemoryBlock
from swath.runtime.memory import line_aligned


@dataclass(frozen=True)
class SharedRows:
    """A piece of memory, and what lies in it: enough to make rows of it in whichever process has it."""

    block: Block
    leaves: dict[Key, Leaf]
    batch_size: tuple[int, ...]

    @staticmethod
    def allocate(leaves: Mapping[Key, Leaf], batch_size: Iterable[int]) -> SharedRows:
        """Memory for all `leaves`, zero at first."""
        shared = SharedRows(MemoryBlock(), dict(leaves), tuple(batch_size))
        shared.block.resize(max(1, sum(shared._room(leaf) for leaf in leaves.values())))
        return shared

    def rows(self) -> Rows:
        """All rows, over the memory; it lives for as long as they do."""
        rows, offset = Rows({}, self.batch_size), 0
        for key, leaf in self.leaves.items():
            array = self.block.array((self._size(leaf),), np.uint8, offset)
            rows.add(key, torch.from_numpy(array).view(leaf.dtype).view(*self.batch_size, *leaf.shape))
            offset += self._room(leaf)
        return rows

    def _size(self, leaf: Leaf) -> int:
        return math.prod((*self.batch_size, *leaf.shape)) * leaf.dtype.itemsize

    def _room(self, leaf: Leaf) -> int:
        """The bytes of a column, up to where the next begins."""
        return line_aligned(self._size(leaf))
