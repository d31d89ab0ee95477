"""What a network does in one call, noted while it is called.

Each function of torch that it calls is looked up by name. What stands for a result is a node, which says how to compute
it on arrays, or how to see it in the arrays of other nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from swath.modules.mlp import Fetched, Operation

SILENT = {"dim", "size", "__get__"}
"""What torch's modules ask of a tensor before they compute. The code of users may not: see NOTE [One call for all]."""


CONVERSIONS = ("float", "to")


class UnknownError(Exception):
    """The network does something that is not known here."""


@dataclass(eq=False)
class TapeNode:
    """What one call has given."""

    inputs: Sequence[Any] = ()
    """Nodes and numbers."""
    bind: Callable[..., list[Operation]] | None = None
    """The calls that compute it, given the arrays of the inputs and where to write,"""
    live: Callable[..., list[Operation]] | None = None
    """and, if there are others, those that use weights where they lie."""
    view: Callable[..., np.ndarray] | None = None
    """Or how to see it in the inputs."""
    buffer: np.ndarray | None = None  # [N, ...]
    axis: int | None = 0
    """Which of its dimensions is that of the lanes, None if it has none. What is computed for lanes has it first."""


class _Parameter:
    """A parameter or buffer that is used by itself, on a private copy."""

    def __init__(self, owner: nn.Module, name: str, value: Tensor) -> None:
        self._owner, self._name = owner, name
        self.array = value.detach().numpy().copy()

    def fetch(self, is_live: bool) -> None:
        """Take it as it is now."""
        self.array[...] = getattr(self._owner, self._name).detach().numpy()


class Tape(TorchFunctionMode):
    """Notes what is done to tensors, as a context."""

    def __init__(
        self,
        module: nn.Module,
        sources: Sequence[Tensor],
        dtype: np.dtype[Any],
        is_flat: bool,
        functions: Mapping[str, Callable[..., TapeNode | None]],
    ) -> None:
        """For a forward of `module` on `sources`; `is_flat` says that these will have one dimension of lanes.

        All is computed as `dtype`: sources of another type have to be converted before anything else is done to them.
        `functions` make the node for a result, given the tape, the result, and what the function of torch was given.
        """
        super().__init__()
        self._owners = {
            id(value): (owner, name)
            for owner in module.modules()
            for name, value in (*owner._parameters.items(), *owner._buffers.items())
            if value is not None
        }
        self.is_flat, self._functions = is_flat, functions
        self.lanes, self.dtype = len(sources[0]), dtype
        self._dtypes = (torch.from_numpy(np.empty(0, dtype)).dtype, torch.bool)
        self.inputs = [TapeNode() for _ in sources]
        self._found = {id(source): (source, node) for source, node in zip(sources, self.inputs, strict=True)}
        """Nodes by the id of their tensors, which stay alive here, so that no other takes it."""
        self.nodes: list[TapeNode] = []
        self.fetched: list[Fetched] = []
        self.multiplications = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and note that it was called."""
        kwargs = dict(kwargs or {})
        results, name = func(*args, **kwargs), getattr(func, "__name__", "")
        if name not in SILENT or isinstance(results, Tensor):
            build = self._functions.get(name)
            given = [one for one in _inside((args, *kwargs.values())) if isinstance(one, Tensor)]
            if name not in CONVERSIONS and any(one.dtype not in self._dtypes for one in given):
                raise UnknownError("a number that may change")
            if build is None or (kwargs.pop("inplace", False) and self._is_seen_elsewhere(self.node_of(args[0]))):
                raise UnknownError(func)
            node = build(self, results, *args, **kwargs)
            if node is not None:
                self.give(results, node)
        return results

    def _is_seen_elsewhere(self, node: TapeNode) -> bool:
        """Whether something else would change with what `node` stands for."""
        return node.bind is None or any(node in other.inputs for other in self.nodes if other.bind is None)

    def give(self, result: Tensor, node: TapeNode) -> None:
        """`result` is what `node` stands for."""
        if result.dtype not in self._dtypes:
            raise UnknownError(result.dtype)
        if node.bind is not None and node.buffer is None:
            has_lanes = any(isinstance(one, TapeNode) and one.axis is not None for one in node.inputs)
            node.axis = 0 if has_lanes else None
            node.buffer = np.empty(tuple(result.shape), bool if result.dtype is torch.bool else self.dtype)
        if node.bind is not None and node.axis == 0 and len(result) != self.lanes:
            raise UnknownError("rows that are not lanes")
        self._found[id(result)] = result, self.add(node)

    def add(self, node: TapeNode) -> TapeNode:
        """Take in a node, which need not be the result of a call."""
        if node not in self.nodes:
            self.nodes.append(node)
        return node

    def owner(self, value: Tensor) -> tuple[nn.Module, str]:
        """The module that has a parameter or buffer, and its name there."""
        if id(value) not in self._owners:
            raise UnknownError("a tensor of unknown origin")
        return self._owners[id(value)]

    def node_of(self, value: Any) -> Any:
        """What stands for an argument: a node, or a number."""
        if id(value) in self._found:
            return self._found[id(value)][1]
        if isinstance(value, Tensor):
            parameter = _Parameter(*self.owner(value), value)
            spreads = value.ndim < 2 or value.shape[0] == 1
            if parameter.array.dtype != self.dtype or not spreads:
                raise UnknownError("a parameter of another kind")
            self.fetched.append(parameter)
            self.give(value, node := TapeNode(view=lambda: parameter.array, axis=None))
            return node
        if type(value) not in (int, float):
            raise UnknownError(type(value))
        return value

    def rows_of(self, value: Any) -> Any:
        """The same, of something that has its lanes, if any, as its first dimension."""
        node = self.node_of(value)
        if isinstance(node, TapeNode) and node.axis not in (0, None):
            raise UnknownError("rows that are not lanes")
        return node

    def dimension(self, x: Tensor, dim: int) -> int:
        """The dimension of `x` that `dim` names, however many there are of lanes; it may not be one of theirs."""
        place = dim % x.ndim
        if (dim >= 0 and not self.is_flat) or place == self.node_of(x).axis:
            raise UnknownError(f"dimension {dim}")
        return place

    def must_be_last(self, x: Tensor, dim: int) -> None:
        """Raise if `dim` is not the last dimension of `x`."""
        if self.dimension(x, dim) != x.ndim - 1:
            raise UnknownError(f"dimension {dim}")


def _inside(given: Any) -> Iterator[Any]:
    """All that is in an argument, as in the slices of an index."""
    if isinstance(given, tuple | list):
        for one in given:
            yield from _inside(one)
    elif isinstance(given, slice):
        yield from (given.start, given.stop, given.step)
    else:
        yield given
