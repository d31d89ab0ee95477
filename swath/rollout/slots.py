"""Slots: the memory that batches are made of.

NOTE [Slot ownership]: a slot is filled by an engine, then handed to the consumer, and comes back by itself. Delivered
tensors are new ones each time, and lie over arrays that only the slot has beside them. A tensor, and with it each view
or slice of it, holds its array: as long as any of these has more references than the slot's own, something of the batch
is kept. While it is being filled elsewhere, and there is nothing to hand out yet, a claim counts the same. A batch of
which anything is kept is therefore never overwritten, and one that is let go costs no allocation. A child that is
forked meanwhile has the batch too, and nobody here hears when it lets go: what is handed out then is not used again.
Nothing is called when a batch dies; the arena looks when it needs a slot, and only at a few, however many are kept.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from sys import getrefcount
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from swath.entries import Cast, mould, trainable, trusted
from swath.keys import Key
from swath.runtime.columns import Columns, Place
from swath.runtime.descriptors import is_scarce

SPARE_SLOTS = 2
"""Free slots that are kept for later; more than that is what a consumer once held and has let go."""
LOOKS = 8
"""How many slots in use are looked at, in turn, whenever one is needed."""
FEW = 16
"""Slots that may each keep a descriptor."""


class Slot:
    """Columns `[N, T, ...]` of every entry: lane-major, so that a batch and each of its episodes is contiguous."""

    def __init__(self, memory: Columns, batch_size: tuple[int, ...]) -> None:
        """Fill and hand out `memory` `[N, T]`: private, shared with another process, or on an accelerator."""
        self.memory = memory
        self.batch_size = batch_size
        self.lanes, self.steps = memory.shape
        self.is_shared = memory.is_shared
        """Whether another process may fill it, or has it where this one was forked."""
        self.is_retired = False
        """Whether it is not used again when it comes back."""
        self.tensors = memory.tensors
        self._is_on_cpu = all(tensor.device.type == "cpu" for tensor in self.tensors.values())
        self.columns: dict[Key, Any] = {
            key: tensor.numpy() if self._is_on_cpu else tensor for key, tensor in self.tensors.items()
        }
        """Arrays on the CPU, tensors elsewhere."""
        self._shaped = {
            key: column.reshape(self._shape_of(column)).view()
            for key, column in self.columns.items()
            if self._is_on_cpu
        }
        """The same as they are handed out; see NOTE [Slot ownership]."""
        self.claim: object = np.empty(0)
        """Something that keeps the slot from being used for anything else for as long as it is held."""
        self._holders = [self.claim, *self._shaped.values()]
        self._unheld = list(map(getrefcount, self._holders))
        self.whole = Place(memory, 0, self.lanes)
        """Where a worker writes that has the slot for itself."""
        self._places: dict[int, Place] = {}
        self._form: tuple[Sequence[Key], Cast, torch.Size] | None = None
        """Of the last batch: its keys, what makes it of the holders, and its size."""
        self.bound: Any = None
        """What whoever fills the slot remembers of it,"""
        self.written: Any = None
        """and whoever copies it elsewhere."""
        _slots[id(memory)] = self

    @staticmethod
    def over(memory: Columns, batch_size: tuple[int, ...]) -> Slot:
        """The slot of this memory, which may exist already."""
        return _slots.get(id(memory)) or Slot(memory, batch_size)

    def _shape_of(self, column: Any) -> tuple[int, ...]:
        return (*self.batch_size, self.steps, *column.shape[2:])

    def array(self, key: Key) -> np.ndarray:
        """The column `key` as an array; a copy of it, if it lies on another device."""
        column = self.columns[key]
        return column if isinstance(column, np.ndarray) else column.cpu().numpy()

    def put(self, key: Key, values: np.ndarray, steps: int) -> None:
        """Write the first steps of the column `key`: `values` `[N, steps]`, or `[N, 1]` which are the same for all."""
        column = self.columns[key]
        is_array = isinstance(column, np.ndarray)
        column[:, :steps] = values if is_array else torch.from_numpy(values).to(column.device)

    @property
    def is_free(self) -> bool:
        """Whether there is no claim to it, and nothing of the last delivery is held."""
        return list(map(getrefcount, self._holders)) == self._unheld

    @property
    def is_mostly_let_go(self) -> bool:
        """Whether only a small part of the last delivery is held, so that without the slot most memory would be free.

        Not so where all entries lie in one piece of memory, or if there is a claim to it.
        """
        counts = list(map(getrefcount, self._holders))
        if self.memory.block is not None or counts[0] != self._unheld[0]:
            return False
        sizes = [array.nbytes for array in self._shaped.values()]
        held = [size for size, now, unheld in zip(sizes, counts[1:], self._unheld[1:], strict=True) if now != unheld]
        return bool(2 * sum(held) < sum(sizes))

    def retire_if_held(self) -> None:
        """Let it not be used again if somebody has it, where its memory is the same in a fork; in any thread."""
        if self.is_shared and not self.is_free:
            self.is_retired = True

    def place(self, first_row: int, rows: int) -> Place:
        """Where a worker writes its rows, of which there are always as many."""
        if first_row not in self._places:
            self._places[first_row] = Place(self.memory, first_row, rows)
        return self._places[first_row]

    def hand_out(self, keys: Sequence[Key], steps: int) -> dict[Key, Tensor]:
        """Ordinary tensors `[*batch_size, steps, ...]` of the entries `keys`, over the slot's memory.

        A slot that is not full is copied instead where its lanes would not lie behind each other.
        """
        if self._is_on_cpu:
            shaped, from_array = self._shaped, torch.from_numpy
            entries = {key: from_array(shaped[key]) for key in keys}
        else:
            entries = {key: self.tensors[key].reshape(self._shape_of(self.tensors[key])) for key in keys}
        if steps < self.steps:
            time = len(self.batch_size)
            entries = {key: tensor.narrow(time, 0, steps).contiguous() for key, tensor in entries.items()}
        if not self._is_on_cpu:  # nothing tells when tensors there die; an accelerator's allocator caches by itself
            self.is_retired = True
        return entries

    def batch(self, keys: Sequence[Key], steps: int) -> TensorDictBase:
        """The same as a batch `[*batch_size, steps]`, to be trained on."""
        if torch.is_inference_mode_enabled():
            with trainable():
                return self.batch(keys, steps)
        if steps < self.steps or not self._is_on_cpu:
            return named_batch(self.hand_out(keys, steps), (*self.batch_size, steps))
        if self._form is None or self._form[0] is not keys:
            order, size = list(self._shaped), (*self.batch_size, steps)
            places = tuple((key, order.index(key) + 1) for key in keys)
            self._form = keys, mould(places, None, tuple(time_named(size)), torch.from_numpy), torch.Size(size)
        return self._form[1](self._holders, self._form[2])


_slots: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()
"""By the identity of their memory, which they hold."""


def _retire_held() -> None:
    for ref in _slots.valuerefs():
        if (slot := ref()) is not None:
            slot.retire_if_held()


os.register_at_fork(before=_retire_held, after_in_parent=_retire_held)  # twice: other threads go on meanwhile


def named_batch(entries: Mapping[Key, Tensor], batch_size: tuple[int, ...]) -> TensorDictBase:
    """A batch whose last dimension is time."""
    return trusted(entries, batch_size, None, names=time_named(batch_size))


def time_named(batch_size: tuple[int, ...]) -> list[str | None]:
    """The names of the dimensions of a batch: the last is time."""
    return [*(None,) * (len(batch_size) - 1), "time"]


class Arena:
    """Hands out free slots of one layout.

    A consumer may keep any number of batches, but a process may only have so many descriptors. So, where there are
    many slots in shared memory, or little is left of what the process may have, the descriptor of one that is
    delivered is closed, and it is not used again. One that keeps a small part of many batches shall not keep the
    memory of all of them: from a few on, such slots are given up.
    """

    def __init__(self, allocate: Callable[[int], Columns], batch_size: Iterable[int]) -> None:
        """Take memory from `allocate`, a function of the number of steps, when a slot is needed."""
        self.allocated = 0
        """How many slots were ever allocated: constant in steady state."""
        self._allocate = allocate
        self._batch_size = tuple(batch_size)
        self._in_use: deque[Slot] = deque()
        self._free: list[Slot] = []

    def __len__(self) -> int:
        return len(self._in_use) + len(self._free)

    def acquire(self, steps: int) -> Slot:
        """A free slot of `steps` steps."""
        in_use = self._in_use
        if len(in_use) <= SPARE_SLOTS + 1 and not self._free:  # as with most consumers: there is nothing to give back
            for _ in range(len(in_use)):
                slot = in_use[0]
                in_use.rotate(-1)
                if slot.steps == steps and not slot.is_retired and slot.is_free:
                    return slot
        for _ in range(min(LOOKS, len(in_use))):
            slot = in_use.popleft()
            if not slot.is_free:
                if len(in_use) < FEW or not slot.is_mostly_let_go:  # else whoever holds the rest keeps that alone
                    in_use.append(slot)
            elif not slot.is_retired:
                self._free.append(slot)
        found = next((slot for slot in self._free if slot.steps == steps), None)
        if found is None:
            found = Slot(self._allocate(steps), self._batch_size)
            self.allocated += 1
        else:
            self._free.remove(found)
        del self._free[SPARE_SLOTS:]
        in_use.append(found)
        return found

    def delivered(self, slot: Slot) -> None:
        """All that is to be written to the slot has been."""
        block = slot.memory.block
        if slot.is_shared and block is not None and (len(self) > FEW or is_scarce(block.fd)):
            block.release()
            slot.is_retired = True
