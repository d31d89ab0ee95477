"""Crates: values whose tensors travel beside them, so that they need not be copied to be sent."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from swath.runtime.columns import array_of, tensor_of
from swath.runtime.memory import Block
from swath.runtime.pickling import unpicklable


@dataclass(frozen=True)
class Crate:
    """Any value, with its tensors beside it. Ray lets these lie in its object store, where nobody may change them."""

    packed: bytes
    arrays: list[np.ndarray]
    is_lent: bool
    """Whether who opens it only reads the tensors, and not for longer than it has the crate: they are not copied."""

    @staticmethod
    def of(value: Any, *, is_lent: bool = False) -> Crate:
        """Pack `value`."""
        file, arrays = io.BytesIO(), list[np.ndarray]()
        try:
            _Packer(file, arrays).dump(value)
        except Exception as error:
            raise unpicklable(value, error) from error
        return Crate(file.getvalue(), arrays, is_lent)

    def open(self, *, borrows: bool = False) -> Any:
        """The value: with tensors of its own, unless they are lent and it `borrows`."""
        return _Unpacker(io.BytesIO(self.packed), self.arrays, copies=not (borrows and self.is_lent)).load()


class _Packer(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, arrays: list[np.ndarray]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._arrays = arrays

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Block):
            raise TypeError(
                "Memory that processes share stays on its machine: give a function, as storage=lambda: ...."
            )
        if type(value) is not Tensor or value.layout != torch.strided:
            return None
        self._arrays.append(array_of(value.detach().cpu()))
        return len(self._arrays) - 1, value.dtype, value.device


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arrays: list[np.ndarray], *, copies: bool) -> None:
        super().__init__(file)
        self._arrays, self._copies = arrays, copies

    def persistent_load(self, saved: Any) -> Tensor:
        place, dtype, device = saved
        array = self._arrays[place]
        return tensor_of(array.copy() if self._copies else array, dtype).to(device)
