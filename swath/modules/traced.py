"""Networks with a forward of their own, as calls on arrays.

Most users write `def forward(self, x): return self.out(x + torch.relu(self.block(x)))`, and not a row of layers. What
such a forward does is found out by calling it once, with tensors that note which functions they are given to.

That says what it does in all calls where its code is settled; see NOTE [One call for all]. What was noted is then
compared with the network itself, as for all array forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swath.envs.rows import Rows
from swath.keys import Key
from swath.modules.mlp import (
    ACTIVATIONS,
    MAX_IN_THREAD,
    MAX_MULTIPLICATIONS,
    ArrayStage,
    Fetched,
    Layer,
    Norm,
    Operation,
    agrees,
    flatten,
)
from swath.modules.settled import is_settled
from swath.modules.without_trace import without_trace

LEAVES = {nn.Linear, nn.LayerNorm, nn.Identity, nn.Dropout, nn.Sequential, nn.ModuleList, *ACTIVATIONS}
"""Modules of torch whose calls consist of functions that are known here."""


class _UnknownError(Exception):
    """The network does something that is not known here."""


# -- what is noted ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Node:
    """What one call has given."""

    inputs: Sequence[Any] = ()
    """Nodes and numbers."""
    bind: Callable[..., list[Operation]] | None = None
    """The calls that compute it, given the arrays of the inputs and where to write."""
    view: Callable[..., np.ndarray] | None = None
    """Or how to see it in them."""
    buffer: np.ndarray | None = None  # [N, ...]


class _Parameter:
    """A parameter or buffer that is used by itself, on a private copy."""

    def __init__(self, owner: nn.Module, name: str, value: Tensor) -> None:
        self._owner, self._name = owner, name
        self.array = value.detach().numpy().copy()

    def fetch(self, is_live: bool) -> None:
        """Take it as it is now."""
        self.array[...] = getattr(self._owner, self._name).detach().numpy()


class _Tape:
    """Notes what is done to tensors."""

    def __init__(self, module: nn.Module, like: np.ndarray, is_flat: bool) -> None:
        """For a forward of `module` on arrays such as `like`; `is_flat` says that these have one dimension of lanes."""
        self._owners = {
            id(value): (owner, name)
            for owner in module.modules()
            for name, value in (*owner._parameters.items(), *owner._buffers.items())
            if value is not None
        }
        self.like, self._dtype = like, torch.from_numpy(like).dtype
        self._last = (-1, 1) if is_flat else (-1,)
        self.lanes = len(like)
        self.is_noting = False
        """Whether what is done to tensors is our own doing."""
        self.nodes: list[_Node] = []
        self.fetched: list[Fetched] = []
        self.multiplications = 0

    def note(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Any) -> None:
        """`function` was called."""
        build = FUNCTIONS.get(getattr(function, "__name__", ""))
        if build is None or (kwargs.pop("inplace", False) and self._is_seen_elsewhere(args[0].node)):
            raise _UnknownError(function)
        self.is_noting = True
        node = build(self, results, *args, **kwargs)
        if node is not None:
            self.give(results, node)
        self.is_noting = False

    def _is_seen_elsewhere(self, node: _Node) -> bool:
        """Whether something else would change with what `node` stands for."""
        return node.bind is None or any(node in other.inputs for other in self.nodes if other.bind is None)

    def give(self, result: Tensor, node: _Node) -> None:
        """`result` is what `node` stands for."""
        if result.dtype != self._dtype:
            raise _UnknownError(result.dtype)
        if node.bind is not None and node.buffer is None:
            node.buffer = np.empty(tuple(result.shape), self.like.dtype)
        if node.buffer is not None and len(node.buffer) != self.lanes:
            raise _UnknownError("rows that are not lanes")
        result.node = node  # type: ignore[attr-defined]
        self.nodes.append(node)

    def owner(self, value: Tensor) -> tuple[nn.Module, str]:
        """The module that has a parameter or buffer, and its name there."""
        if id(value) not in self._owners:
            raise _UnknownError("a tensor of unknown origin")
        return self._owners[id(value)]

    def node_of(self, value: Any) -> Any:
        """What stands for an argument: a node, or a number."""
        if isinstance(value, _Noted):
            return value.node
        if isinstance(value, Tensor):
            parameter = _Parameter(*self.owner(value), value)
            spreads = value.ndim < 2 or value.shape[0] == 1
            if parameter.array.dtype != self.like.dtype or not spreads:
                raise _UnknownError("a parameter of another kind")
            self.fetched.append(parameter)
            node = _Node(view=lambda: parameter.array)
            self.nodes.append(node)
            return node
        if type(value) not in (int, float):
            raise _UnknownError(type(value))
        return value

    def must_be_last(self, dim: int) -> None:
        """Raise if `dim` is not the last dimension, however many there are of lanes."""
        if dim not in self._last:
            raise _UnknownError(f"dimension {dim}")


class _Noted(Tensor):
    """A tensor that notes what is done to it. Each tape has a class of its own."""

    tape: _Tape
    node: _Node

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if not cls.tape.is_noting:
            cls.tape.note(func, args, dict(kwargs or {}), results)
        return results


# -- the functions that are known ------------------------------------------------------------------------------------


def _linear(tape: _Tape, result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Node:
    owner, name = tape.owner(weight)
    if name != "weight" or getattr(owner, "bias", None) is not bias or x.ndim != 2:
        raise _UnknownError("weights that are not a layer's")
    layer = Layer(owner, tape.lanes)  # type: ignore[arg-type]
    tape.fetched.append(layer)
    tape.multiplications += weight.numel()
    if tape.lanes * weight.shape[1] > MAX_IN_THREAD:
        raise _UnknownError("more than is computed without threads")
    return _Node([tape.node_of(x)], bind=partial(layer.operations, is_live=False), buffer=layer.out)


def _layer_norm(
    tape: _Tape, result: Tensor, x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> _Node:
    norm: Any = nn.LayerNorm(shape, eps, False) if weight is None else tape.owner(weight)[0]
    same = (norm.weight, norm.bias, norm.eps, tuple(norm.normalized_shape)) == (weight, bias, eps, (x.shape[-1],))
    if type(norm) is not nn.LayerNorm or not same or x.ndim != 2:
        raise _UnknownError("a normalisation that is not a layer's")
    tape.fetched.append(normalise := Norm(norm, np.empty((tape.lanes, x.shape[1]), tape.like.dtype)))
    return _in_place(tape, x, normalise)


def _activation(kind: type[nn.Module]) -> Callable[..., _Node]:
    def note(tape: _Tape, result: Tensor, x: Tensor, *settings: Any, **named: Any) -> _Node:
        return _in_place(tape, x, partial(ACTIVATIONS[kind], kind(*settings, **named)))

    return note


def _in_place(tape: _Tape, x: Tensor, change: Callable[[np.ndarray], object]) -> _Node:
    return _Node([tape.node_of(x)], lambda x, out: [partial(np.copyto, out, x), partial(change, out)])


def _ufunc(function: Callable[..., Any], is_reversed: bool = False) -> Callable[..., _Node]:
    def note(tape: _Tape, result: Tensor, *operands: Any) -> _Node:
        inputs = [tape.node_of(operand) for operand in (operands[::-1] if is_reversed else operands)]
        return _Node(inputs, lambda *given: [partial(function, *given[:-1], out=given[-1])])

    return note


def _clamp(tape: _Tape, result: Tensor, x: Tensor, min: Any = None, max: Any = None) -> _Node:
    low, high = (None if end is None else tape.node_of(end) for end in (min, max))
    if isinstance(low, _Node) or isinstance(high, _Node):
        raise _UnknownError("bounds that are tensors")
    return _Node([tape.node_of(x)], lambda x, out: [partial(np.clip, x, low, high, out=out)])


def _cat(tape: _Tape, result: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> _Node:
    tape.must_be_last(dim)
    if any(not isinstance(one, _Noted) or one.ndim != 2 for one in tensors):
        raise _UnknownError("something that is not rows of vectors")
    ends = np.cumsum([one.shape[1] for one in tensors]).tolist()

    def bind(*given: np.ndarray) -> list[Operation]:
        *parts, out = given
        return [partial(np.copyto, out[:, end - p.shape[1] : end], p) for p, end in zip(parts, ends, strict=True)]

    return _Node([tape.node_of(one) for one in tensors], bind)


def _pieces(tape: _Tape, results: Sequence[Tensor], x: Tensor, size: Any, dim: int = 0) -> None:
    tape.must_be_last(dim)
    end = 0
    for piece in results:
        start, end = end, end + piece.shape[-1]
        tape.give(piece, _Node([tape.node_of(x)], view=partial(_picked, index=(..., slice(start, end)))))


def _item(tape: _Tape, result: Tensor, x: Tensor, index: Any) -> _Node:
    if not (isinstance(index, tuple) and len(index) == 2 and index[0] is ... and type(index[1]) in (int, slice)):
        raise _UnknownError("an index that is not one of the last dimension")
    return _Node([tape.node_of(x)], view=partial(_picked, index=index))


def _picked(x: np.ndarray, index: Any) -> np.ndarray:
    piece: np.ndarray = x[index]
    return piece


def _squeeze(tape: _Tape, result: Tensor, x: Tensor, dim: int) -> _Node:
    tape.must_be_last(dim)
    if x.ndim != 2 or x.shape[1] != 1:
        raise _UnknownError("nothing to squeeze")
    return _Node([tape.node_of(x)], view=partial(_picked, index=(..., 0)))


def _expand_as(tape: _Tape, result: Tensor, x: Tensor, other: Tensor) -> _Node:
    return _Node([tape.node_of(x), tape.node_of(other)], view=lambda x, like: np.broadcast_to(x, like.shape))


def _dropout(tape: _Tape, result: Tensor, x: Tensor, p: float = 0.5, training: bool = True) -> _Node:
    if training:
        raise _UnknownError("noise")
    return _Node([tape.node_of(x)], view=lambda x: x)


FUNCTIONS: dict[str, Callable[..., _Node | None]] = {
    "linear": _linear,
    "layer_norm": _layer_norm,
    "dropout": _dropout,
    "tanh": _ufunc(np.tanh),
    "relu": lambda tape, result, x: _ufunc(np.maximum)(tape, result, x, 0.0),
    "sigmoid": _activation(nn.Sigmoid),
    "silu": _activation(nn.SiLU),
    "leaky_relu": _activation(nn.LeakyReLU),
    "softplus": _activation(nn.Softplus),
    "mish": _activation(nn.Mish),
    "gelu": _activation(nn.GELU),
    "elu": _activation(nn.ELU),
    "exp": _ufunc(np.exp),
    "neg": _ufunc(np.negative),
    "add": _ufunc(np.add),
    "sub": _ufunc(np.subtract),
    "__rsub__": _ufunc(np.subtract, is_reversed=True),
    "mul": _ufunc(np.multiply),
    "div": _ufunc(np.divide),
    "clamp": _clamp,
    "clip": _clamp,
    "cat": _cat,
    "chunk": _pieces,
    "split": _pieces,
    "__getitem__": _item,
    "squeeze": _squeeze,
    "expand_as": _expand_as,
}
"""By name, which is the same for functions of torch and methods of tensors."""


# -- the stage -------------------------------------------------------------------------------------------------------


class TracedStage(ArrayStage):
    """What a network with a forward of its own does, call by call."""

    def __init__(
        self,
        tape: _Tape,
        inputs: list[_Node],
        results: list[_Node],
        sources: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
    ) -> None:
        """Do what is on the `tape` to `sources`. Use `traced_stage`, which checks that it fits."""
        self._tape, self._inputs, self._results = tape, inputs, results
        super().__init__(sources, targets, tape.fetched)

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Fetch the parameters, always: none are used where they lie."""
        super().begin(0, generator)

    def _bind(self, sources: list[np.ndarray], targets: list[np.ndarray], is_live: bool) -> list[Operation]:
        """The calls; what is a result is written straight into its target, where it is one alone."""
        values: dict[Any, np.ndarray] = dict(zip(self._inputs, sources, strict=True))
        final = {
            node: target
            for node, target in zip(self._results, targets, strict=True)
            if node.bind is not None and self._results.count(node) == 1
        }
        operations: list[Operation] = []
        for node in self._tape.nodes:
            given = [values[one] if isinstance(one, _Node) else one for one in node.inputs]
            if node.bind is None:
                assert node.view is not None
                values[node] = node.view(*given)
            else:
                assert node.buffer is not None
                values[node] = final.get(node, node.buffer[: len(sources[0])])
                operations += node.bind(*given, values[node])
        for node, target in zip(self._results, targets, strict=True):
            if node not in final:
                operations.append(partial(np.copyto, target, values[node]))
        return operations

    def run(self, t: int) -> None:
        """The forward pass; torch does not warn of overflows either."""
        with np.errstate(all="ignore"):
            super().run(t)

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """The forward pass for some lanes."""
        with np.errstate(all="ignore"):
            super().run_on(lanes, times)

    def run_first(self, count: int, t: int) -> None:
        """The forward pass for the first lanes."""
        with np.errstate(all="ignore"):
            super().run_first(count, t)


def traced_stage(
    module: nn.Module, sources: list[np.ndarray], outputs: Rows, out_keys: Sequence[Key]
) -> TracedStage | None:
    """A stage that does what `module` does, or None if this module has to run itself."""
    targets = [outputs.arrays[key] for key in out_keys if key in outputs.arrays]
    arrays = [*sources, *targets]
    if len(targets) != len(out_keys) or len({array.dtype for array in arrays}) != 1 or arrays[0].dtype.kind != "f":
        return None
    if any(np.shares_memory(source, target) for source in sources for target in targets):
        return None
    if (
        any(source.ndim != 2 for source in sources)
        or flatten(module) is not None
        or not is_settled(module, LEAVES, FUNCTIONS)
    ):
        return None
    if any(weight.device.type != "cpu" for weight in (*module.parameters(), *module.buffers())):
        return None
    try:
        stage = _traced(module, sources, targets, len(outputs.batch_size) == 1)
    except Exception:  # whatever the network does with tensors of another class
        return None
    return stage if agrees(stage, module, sources, targets) else None


def _traced(module: nn.Module, sources: list[np.ndarray], targets: list[np.ndarray], is_flat: bool) -> TracedStage:
    tape = _Tape(module, sources[0], is_flat)
    noting = type("Noting", (_Noted,), {"tape": tape})
    given: list[Any] = [torch.from_numpy(source.copy()).as_subclass(noting) for source in sources]
    for one in given:
        one.node = _Node()
    inputs = [one.node for one in given]
    with torch.no_grad(), without_trace(module):
        results = module(*given)
    tape.is_noting = True
    results = results if isinstance(results, tuple) else (results,)
    if tape.lanes * tape.multiplications > MAX_MULTIPLICATIONS:
        raise _UnknownError("a network that outweighs the dispatcher")
    if [tuple(result.shape) for result in results] != [target.shape for target in targets]:
        raise _UnknownError("other results than in the first call")
    return TracedStage(tape, inputs, [result.node for result in results], sources, targets)
