"""An arena in shared memory: workers write straight into the batch that is delivered."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from swath.collectors.messages import SlotMemory
from swath.envs.rows import Leaf
from swath.keys import Key
from swath.rollout import Arena, Slot
from swath.runtime import Block, MemoryBlock
from swath.runtime.memory import line_aligned

FEW = 16
"""Slots that may each keep a descriptor."""


class SharedArena(Arena):
    """Hands out slots in shared memory, of `[workers * lanes, T]` or of one worker alone.

    A consumer may keep any number of batches, but a process may only have so many descriptors. So, where there are
    many slots, the descriptor of one that is delivered is closed, and it is not used again.
    """

    def __init__(self, leaves: Mapping[Key, Leaf], batch_size: Iterable[int], first_number: int = 0) -> None:
        """Fix the layout; `first_number` tells the slots of several arenas apart."""
        super().__init__(leaves, batch_size)
        self._next_number = first_number
        self._blocks: dict[int, tuple[Slot, Block]] = {}
        self._numbers: dict[int, int] = {}
        """Of slots, by their identity."""
        self._newest: Block | None = None

    def acquire(self, steps: int) -> Slot:
        """A free slot of `steps` steps."""
        slot = super().acquire(steps)
        if self._newest is not None:
            self._blocks[self._next_number] = (slot, self._newest)
            self._numbers[id(slot)] = self._next_number
            self._next_number += 1
            self._newest = None
        if len(self) < len(self._blocks):
            kept = {id(slot) for slot in (*self._lent, *self._free)}
            self._blocks = {number: pair for number, pair in self._blocks.items() if id(pair[0]) in kept}
            self._numbers = {id(slot): number for number, (slot, _) in self._blocks.items()}
        return slot

    @property
    def numbers(self) -> set[int]:
        """Of all slots that there are."""
        return set(self._blocks)

    def number(self, slot: Slot) -> int:
        """The number of a slot."""
        return self._numbers[id(slot)]

    def memory(self, number: int, first_row: int, *, is_known: bool) -> SlotMemory:
        """How to tell a worker of a slot; `is_known` if it was told before."""
        slot, block = self._blocks[number]
        return SlotMemory(number, slot.lanes, first_row, slot.steps, None if is_known else block)

    def delivered(self, slot: Slot) -> None:
        """All who write to the slot have done so."""
        if len(self._blocks) > FEW:
            self._blocks[self.number(slot)][1].release()
            slot.retire()

    @torch.inference_mode(False)
    def _allocate(self, steps: int) -> dict[Key, Tensor]:
        rows = math.prod(self._batch_size)
        self._newest = MemoryBlock(_size(self.leaves, rows, steps))
        return columns(self.leaves, rows, steps, self._newest)


def columns(leaves: Mapping[Key, Leaf], rows: int, steps: int, block: Block) -> dict[Key, Tensor]:
    """Tensors `[rows, steps, ...]` for all `leaves`, over the memory of `block`."""
    tensors, offset = {}, 0
    for key, leaf in leaves.items():
        shape = (rows, steps, *leaf.shape)
        size = math.prod(shape) * leaf.dtype.itemsize
        raw = torch.from_numpy(block.array((size,), np.uint8, offset))
        tensors[key] = raw.view(leaf.dtype).view(shape) if size else torch.empty(shape, dtype=leaf.dtype)
        offset += line_aligned(size)
    return tensors


def _size(leaves: Mapping[Key, Leaf], rows: int, steps: int) -> int:
    sizes = (rows * steps * math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())
    return max(sum(map(line_aligned, sizes)), 1)


class WorkerSlots:
    """A worker's part of the slots that it was told of."""

    def __init__(self, leaves: Mapping[Key, Leaf], batch_size: tuple[int, ...]) -> None:
        """Fix the layout of the worker's own lanes."""
        self._leaves, self._batch_size = dict(leaves), batch_size
        self._slots: dict[int, Slot] = {}

    def slot(self, memory: SlotMemory) -> Slot:
        """The slot over the worker's rows of `memory`."""
        if memory.block is not None:
            lanes = math.prod(self._batch_size)
            whole = columns(self._leaves, memory.rows, memory.steps, memory.block)
            own = {key: tensor[memory.first_row : memory.first_row + lanes] for key, tensor in whole.items()}
            self._slots[memory.number] = Slot(own, self._batch_size)
            memory.block.release()
        return self._slots[memory.number]

    def forget(self, numbers: Iterable[int]) -> None:
        """Let go of slots that are no longer used."""
        for number in numbers:
            self._slots.pop(number, None)
