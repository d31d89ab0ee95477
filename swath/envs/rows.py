"""Rows: one row per lane of every entry, in memory that stays where it is.

The env, the policy and the loop hand data to each other through rows. Because they never move, each of them takes its
views once and writes in place afterwards: no TensorDict and no array is made per step. The memory is that of columns,
private or shared, and rows may join entries of several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from swath.errors import wrong_shape
from swath.keys import Key
from swath.runtime.columns import Columns, Leaf, nbytes, writable
from swath.runtime.memory import PrivateBlock

__all__ = ["Index", "Leaf", "Rows", "as_items", "copier", "rows_of"]


Index = slice | np.ndarray
LARGE = 32_768
"""So many numbers, and more, are copied by numpy, as torch would wake its threads for them. Fewer are copied by torch:
what is copied comes from there or goes there, so that its code is in the caches, and numpy's is not."""


def rows_of(lanes: np.ndarray) -> Index:
    """An index for the rows of `lanes`: of one lane a slice, with which numpy is several times faster."""
    if len(lanes) > 1:
        return lanes
    first = int(lanes[0])
    return slice(first, first + 1)


def as_items(array: np.ndarray, dims: int) -> np.ndarray:
    """`array`, which is contiguous, with its first dimensions only: what else there is of each place is one item.

    Between arrays with a distance from item to item, numpy copies these in up to a third of the time.
    """
    lead = array.shape[:dims]
    if not array.size:
        return array
    items = array.reshape(*lead, -1)
    return items.view(np.dtype((np.void, items.shape[-1] * array.itemsize))).reshape(lead)


def copier(tensor: Tensor) -> Callable[[], Tensor]:
    """What makes a copy of `tensor`, which stays where it is; by way of numpy where it is large, see `LARGE`."""
    if tensor.device.type != "cpu" or tensor.numel() < LARGE:
        return tensor.detach().clone
    array = tensor.detach().numpy()
    return lambda: torch.from_numpy(array.copy())


class Rows:
    """Entries of shape `batch_size + leaf.shape`, as tensors and, on the CPU, as flat arrays.

    `tensors[key]` has the env's batch shape, `arrays[key]` is `[N, ...]` over the same memory; entries on another
    device have no array.
    """

    def __init__(
        self, leaves: Mapping[Key, Leaf], batch_size: Iterable[int] = (), device: torch.device | None = None
    ) -> None:
        """Allocate zeros for all `leaves`."""
        self.batch_size = tuple(batch_size)
        self.lanes = math.prod(self.batch_size)
        self.restarts = False
        """A promise of the caller that steps an env with these rows: to reset finished lanes before the next step."""
        self.tensors: dict[Key, Tensor] = {}
        self.arrays: dict[Key, np.ndarray] = {}
        self._forms: dict[Key, tuple[torch.Size, torch.dtype, Callable[[Tensor], object]]] = {}
        is_here = device is None or device.type == "cpu"
        block = PrivateBlock(nbytes(leaves, self.batch_size)) if leaves and is_here else None
        self._take(Columns(leaves, self.batch_size, block=block, device=device))

    @staticmethod
    def over(columns: Columns) -> Rows:
        """Rows in the memory of `columns`, whose shape is the batch size; it lives for as long as they do."""
        rows = Rows({}, columns.shape)
        rows._take(columns)
        return rows

    def _take(self, columns: Columns) -> None:
        self.piece = columns.piece
        """The bytes that the entries lie in that it began with, if that is one piece of memory."""
        for key, tensor in columns.tensors.items():
            self.add(key, tensor)

    def add(self, key: Key, tensor: Tensor) -> None:
        """Take in `tensor`, of shape `batch_size + leaf.shape`, as the memory of `key`."""
        self.tensors[key] = tensor
        take: Callable[[Tensor], object] = tensor.copy_
        if tensor.device.type == "cpu":
            self.arrays[key] = self.flat(key).numpy()
            if tensor.numel() >= LARGE:
                take = partial(_copy_in_turn, tensor, tensor.detach().numpy())
        self._forms[key] = tensor.shape, tensor.dtype, take

    def flat(self, key: Key) -> Tensor:
        """`key` as `[N, ...]` over the same memory, wherever it lies."""
        tensor = self.tensors[key].detach()
        return tensor.view((self.lanes, *tensor.shape[len(self.batch_size) :]))

    def leaf(self, key: Key) -> Leaf:
        """Shape and dtype of one lane of `key`."""
        return Leaf.of(self.tensors[key], len(self.batch_size))

    def put(self, key: Key, value: Tensor, where: str) -> None:
        """Copy `value` into `key`; shape and kind must agree, as broadcasting or rounding would hide a mistake."""
        _copy_alike(key, where, *self._forms[key], value)

    def writer(self, key: Key, where: str) -> Callable[[Tensor], None]:
        """What puts a value into `key`, for those who do it in every step."""
        return partial(_copy_alike, key, where, *self._forms[key])

    def set(self, key: Key, value: Tensor) -> None:
        """Copy `value`, of the same shape, into `key`."""
        self._forms[key][2](value.detach() if value.requires_grad else value)

    def taker(self, key: Key) -> Callable[[Tensor], object]:
        """What copies a value without gradient, of the same shape, into `key`."""
        return self._forms[key][2]

    def set_some(self, key: Key, lanes: np.ndarray, value: Tensor) -> None:
        """Copy the rows of `lanes` of `value`, which has all of them, into `key`."""
        array, target = self.arrays.get(key), self.tensors[key]
        if value.dtype is not target.dtype or value.requires_grad or not value.is_cpu:
            value = value.detach().to(target)
        if array is not None:
            array[lanes] = value.numpy().reshape(array.shape).take(lanes, 0)
            return
        index, flat = torch.from_numpy(lanes).to(target.device), self.flat(key)
        writable(flat)[index] = writable(value.to(target).reshape(flat.shape)[index])

    def copy(self, key: Key) -> Tensor:
        """A tensor of its own with what is in `key` now."""
        return self.copier(key)()

    def copier(self, key: Key) -> Callable[[], Tensor]:
        """A function that makes such a copy of `key`, which stays where it is."""
        return copier(self.tensors[key])

    def part(self, start: int, stop: int, batch_size: tuple[int, ...]) -> Rows:
        """The rows of lanes `start` to `stop` as rows of their own over the same memory."""
        part = Rows({}, batch_size)
        for key in self.tensors:
            lanes = self.flat(key)[start:stop]
            part.add(key, lanes.view((*batch_size, *lanes.shape[1:])))
        return part


def _copy_alike(
    key: Key, where: str, shape: torch.Size, dtype: torch.dtype, take: Callable[[Tensor], object], value: Tensor
) -> None:
    """Let `value` be taken if it has this shape and can be had as this type."""
    if value.shape != shape:
        raise wrong_shape(key, shape, value.shape, where)
    if value.dtype is not dtype and not torch.can_cast(value.dtype, dtype):
        raise TypeError(
            f"{where} gave {key!r} as {value.dtype}, but {dtype} was expected: the first call decides. "
            "Give the same kind of numbers every time."
        )
    take(value.detach() if value.requires_grad else value)


def _copy_in_turn(target: Tensor, array: np.ndarray, value: Tensor) -> None:
    """Copy `value` into `target`, which `array` is a view of, in this thread alone if that is possible."""
    if value.dtype is target.dtype and type(value) is Tensor and value.is_cpu and not value.is_neg():
        array[...] = value.numpy()
    else:
        target.copy_(value)
