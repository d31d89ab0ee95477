"""Forms: how what users write is taken apart into entries, and put together again when it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDictBase,
    is_leaf_nontensor,
    is_tensorclass,
)
from torch import Tensor

from swath.entries import trusted
from swath.keys import Key, as_key, as_path

WHOLE = "_"
"""The key of a tensor that has no name."""
Entries = dict[Key, Tensor]
Inner = dict[tuple[str, ...], tuple[int, ...]]
"""For a TensorDict and those nested in it, by path: the batch dimensions that belong to each frame, if any."""


class TensorDictForm:
    """TensorDicts, nested ones included, or a tensorclass. Other processes that only read one get TensorDicts."""

    def __init__(self, inner: Inner | None = None, kind: Any = None) -> None:
        """With the batch dimensions `inner`, as instances of the tensorclass `kind` if there is one."""
        self._inner, self._kind = inner or {}, kind

    def take_apart(self, data: Any) -> Entries:
        """The tensors in `data`, by key."""
        data = _without_class(data)
        if not isinstance(data, TensorDictBase):
            raise TypeError(f"The buffer holds TensorDicts, and was given {type(data).__name__}.")
        entries: Entries = {}
        for key, value in data.items(True, True, is_leaf=is_leaf_nontensor):
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"{as_key(key)!r} is {type(value).__name__}, which cannot be laid out in memory ahead. Keep it in "
                    "a ListStorage, or leave it out."
                )
            entries[as_key(key)] = value
        return entries

    def put_together(self, entries: Entries, shape: Sequence[int]) -> Any:
        """Data of the batch size `shape` from its `entries`."""
        made = trusted(entries, shape, next(iter(entries.values())).device, self._inner)
        return made if self._kind is None else self._kind.from_tensordict(made)

    def described(self) -> Any:
        """The form in words that JSON knows."""
        return {"tensordict": [[path, sizes] for path, sizes in self._inner.items()]}


class TreeForm:
    """A bare tensor, or dicts, lists and tuples of tensors, nested as one likes."""

    def __init__(self, shape: Any) -> None:
        """Of the `shape` that `nesting` returns."""
        self._shape = shape

    def take_apart(self, data: Any) -> Entries:
        """The tensors in `data`, by their paths."""
        if self._shape is None:
            return {WHOLE: as_tensor(data)}
        if nesting(data) != self._shape:
            raise ValueError(f"The buffer holds data nested as {self._shape}, and was given {nesting(data)}.")
        return {as_key(path): as_tensor(leaf) for path, leaf in _leaves(data, ())}

    def put_together(self, entries: Entries, shape: Sequence[int]) -> Any:
        """The same nesting."""
        return _grown(self._shape, entries, ())

    def described(self) -> Any:
        """The nesting."""
        return "tensor" if self._shape is None else {"tree": self._shape}


Form: TypeAlias = TensorDictForm | TreeForm


def form_of(data: Any, batch_dims: int) -> Form:
    """The form of `data`, of which the first `batch_dims` dimensions are those of frames."""
    plain = _without_class(data)
    if isinstance(plain, TensorDictBase):
        return TensorDictForm(_inner_sizes(plain, batch_dims), None if plain is data else type(data))
    if isinstance(data, Mapping | tuple | list | Tensor | np.ndarray | int | float | bool | np.generic):
        return TreeForm(nesting(data))
    raise TypeError(
        f"{type(data).__name__} cannot be laid out in memory ahead; write TensorDicts or tensors, or keep it in a "
        "ListStorage."
    )


def form_from(description: Any) -> Form:
    """The form that `described` describes."""
    if description == "tensor":
        return TreeForm(None)
    if "tree" in description:
        return TreeForm(description["tree"])
    return TensorDictForm({tuple(path): tuple(sizes) for path, sizes in description["tensordict"]})


def nesting(data: Any) -> Any:
    """How `data` are nested: None for a leaf, a dict, or a list that begins with the name of its kind."""
    if isinstance(data, Mapping):
        return {name: nesting(value) for name, value in data.items()}
    if isinstance(data, tuple | list):
        return ["tuple" if isinstance(data, tuple) else "list", *map(nesting, data)]
    return None


def _without_class(data: Any) -> Any:
    """An instance of a tensorclass as a TensorDict; all else as it is."""
    return data.to_tensordict() if is_tensorclass(data) and not isinstance(data, NonTensorData) else data


def _inner_sizes(data: TensorDictBase, batch_dims: int) -> Inner:
    rooms = [(as_path(as_key(key)), value) for key, value in data.items(True) if isinstance(value, TensorDictBase)]
    sizes = {path: tuple(room.batch_size[batch_dims:]) for path, room in [((), data), *rooms]}
    return {path: size for path, size in sizes.items() if size}


def as_tensor(value: Any) -> Tensor:
    """A tensor as it is; all else as one on the CPU, over the same memory if it is an array."""
    if isinstance(value, Tensor):
        return value
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else torch.as_tensor(value, device="cpu")


def gathered(items: Any) -> Any:
    """One batch of a list of items, such as `[td, td]` or `[(x, y), (x, y)]`; a batch stays as it is."""
    return collated(items) if isinstance(items, list) and items else items


def collated(items: list[Any]) -> Any:
    """A batch of items that were kept one by one: stacked where that can be done, leaf by leaf."""
    first = items[0]
    if isinstance(first, TensorDictBase):
        try:
            return torch.stack(items, 0)
        except RuntimeError:  # of unequal shapes: beside each other
            return LazyStackedTensorDict.lazy_stack(items)
    if isinstance(first, Mapping):
        return {name: collated([item[name] for item in items]) for name in first}
    if isinstance(first, tuple | list):
        columns = [collated(list(column)) for column in zip(*items, strict=True)]
        return tuple(columns) if isinstance(first, tuple) else columns
    if isinstance(first, Tensor) or is_tensorclass(first):
        return torch.stack(items, 0)
    if isinstance(first, np.ndarray | np.generic | int | float | bool):
        return torch.as_tensor(np.stack([np.asarray(item) for item in items]), device="cpu")
    return items


def _leaves(data: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(data, Mapping):
        return [leaf for name, value in data.items() for leaf in _leaves(value, (*path, str(name)))]
    if isinstance(data, tuple | list):
        return [leaf for at, value in enumerate(data) for leaf in _leaves(value, (*path, str(at)))]
    return [(path, data)]


def _grown(shape: Any, entries: Entries, path: tuple[str, ...]) -> Any:
    if isinstance(shape, Mapping):
        return {name: _grown(inner, entries, (*path, str(name))) for name, inner in shape.items()}
    if isinstance(shape, list):
        values = [_grown(inner, entries, (*path, str(at))) for at, inner in enumerate(shape[1:])]
        return tuple(values) if shape[0] == "tuple" else values
    return entries[as_key(path) if path else WHOLE]
