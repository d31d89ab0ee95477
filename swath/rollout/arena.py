"""Arena and slots: the memory that batches are made of.

NOTE [Slot ownership]: a slot is written by the loop, then lent to the consumer, and comes back by itself. Each delivery
wraps the slot's memory in fresh array objects, over which the delivered tensors lie. The slot only remembers these
arrays weakly: when the last tensor, view or slice of the batch has died, so have they, and the slot may be filled
again. Whoever has it filled elsewhere, and has nothing to lend yet, holds a claim to it, which counts the same. A batch
of which anything is kept is therefore never overwritten, and one that is let go costs no allocation.
Nothing is called when a batch dies; the arena looks when it needs a slot, and only at a few, however many are kept.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swath.envs.rows import Leaf
from swath.keys import Key

SPARE_SLOTS = 2
"""Free slots that are kept for later; more than that is what a consumer once held and has let go."""
LOOKS = 8
"""How many lent slots are looked at, in turn, whenever one is needed."""


class Slot:
    """Columns `[N, T, ...]` of every entry: lane-major, so that a batch and each of its episodes is contiguous."""

    def __init__(self, tensors: Mapping[Key, Tensor], batch_size: tuple[int, ...]) -> None:
        """Take `tensors` `[N, T, ...]` as memory: private, shared with another process, or on an accelerator."""
        self.batch_size = batch_size
        self.lanes, self.steps = next(iter(tensors.values())).shape[:2]
        self._lent: list[weakref.ref[np.ndarray]] = []
        self.is_retired = False
        self._take(tensors)

    def _take(self, tensors: Mapping[Key, Tensor]) -> None:
        self.tensors = dict(tensors)
        self._is_on_cpu = all(tensor.device.type == "cpu" for tensor in tensors.values())
        self.columns: dict[Key, Any] = {
            key: tensor.numpy() if self._is_on_cpu else tensor for key, tensor in tensors.items()
        }

    def array(self, key: Key) -> np.ndarray:
        """The column `key` as an array; a copy of it, if it lies on another device."""
        column = self.columns[key]
        return column if isinstance(column, np.ndarray) else column.cpu().numpy()

    @property
    def is_free(self) -> bool:
        """Whether nobody has a claim to it, or holds anything of the last delivery."""
        if any(ref() is not None for ref in self._lent):
            return False
        self._lent.clear()
        return True

    def retire(self) -> None:
        """Never use the slot again: it is dropped when it comes back."""
        self.is_retired = True

    def claim(self) -> object:
        """Something that keeps the slot from being used for anything else for as long as it is held."""
        claim = np.empty(0)
        self._lent.append(weakref.ref(claim))
        return claim

    def lend(self, keys: Iterable[Key], steps: int) -> dict[Key, Tensor]:
        """Ordinary tensors `[*batch_size, steps, ...]` of the entries `keys`, over the slot's memory.

        A slot that is not full is copied instead where its lanes would not lie behind each other.
        """
        lent: dict[Key, Tensor] = {}
        for key in keys:
            if self._is_on_cpu:
                fresh = self.columns[key].view()
                self._lent.append(weakref.ref(fresh))
                tensor = torch.from_numpy(fresh)
            else:
                tensor = self.tensors[key]
            if steps < self.steps:
                tensor = tensor[:, :steps].contiguous()
            if len(self.batch_size) == 0:
                tensor = tensor[0]
            elif len(self.batch_size) > 1:
                tensor = tensor.unflatten(0, self.batch_size)
            lent[key] = tensor
        if not self._is_on_cpu:  # an accelerator's allocator caches by itself
            self._take({key: torch.zeros_like(tensor) for key, tensor in self.tensors.items()})
        return lent


class Arena:
    """Hands out free slots of one layout."""

    def __init__(
        self,
        leaves: Mapping[Key, Leaf],
        batch_size: Iterable[int],
        device: torch.device | None = None,
    ) -> None:
        """Fix the layout; memory is taken with the first slot."""
        self.leaves = dict(leaves)
        self.allocated = 0
        """How many slots were ever allocated: constant in steady state."""
        self._batch_size = tuple(batch_size)
        self._device = device
        self._lent: deque[Slot] = deque()
        self._free: list[Slot] = []

    def __len__(self) -> int:
        """How many slots there are now."""
        return len(self._lent) + len(self._free)

    def acquire(self, steps: int) -> Slot:
        """A free slot of `steps` steps."""
        for _ in range(min(LOOKS, len(self._lent))):
            slot = self._lent.popleft()
            if not slot.is_free:
                self._lent.append(slot)
            elif not slot.is_retired:
                self._free.append(slot)
        found = next((slot for slot in self._free if slot.steps == steps), None)
        if found is None:
            found = Slot(self._allocate(steps), self._batch_size)
            self.allocated += 1
        else:
            self._free.remove(found)
        del self._free[SPARE_SLOTS:]
        self._lent.append(found)
        return found

    def _allocate(self, steps: int) -> dict[Key, Tensor]:
        shape = (math.prod(self._batch_size), steps)
        return {
            key: torch.zeros(*shape, *leaf.shape, dtype=leaf.dtype, device=self._device)
            for key, leaf in self.leaves.items()
        }
