"""Networks with a forward of their own, as calls on arrays.

Most users write `def forward(self, x): return self.out(x + torch.relu(self.block(x)))`, and not a row of layers. What
such a forward does is found out by calling it once, and noting which functions of torch it calls.

That says what it does in all calls where its code is settled; see NOTE [One call for all]. What was noted is then
compared with the network itself, as for all array forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from tensordict.nn import AddStateIndependentNormalScale, NormalParamExtractor
from tensordict.nn.utils import biased_softplus
from torch import Tensor, nn

from swath.envs.rows import Rows
from swath.keys import Key
from swath.modules.mlp import (
    ACTIVATIONS,
    MAX_IN_THREAD,
    MAX_MULTIPLICATIONS,
    ArrayStage,
    Layer,
    Norm,
    Operation,
    agrees,
    flatten,
)
from swath.modules.recurrent import gru, gru_cell, lstm, lstm_cell
from swath.modules.settled import is_settled
from swath.modules.tape import Tape, TapeNode, UnknownError
from swath.modules.without_trace import without_trace

LEAVES = {
    *(nn.Linear, nn.LayerNorm, nn.Identity, nn.Dropout, nn.Sequential, nn.ModuleList, *ACTIVATIONS),
    *(nn.LSTMCell, nn.GRUCell, nn.LSTM, nn.GRU, NormalParamExtractor, AddStateIndependentNormalScale, biased_softplus),
}
"""Modules of torch and tensordict whose calls consist of functions that are known here."""


# -- the functions that are known ------------------------------------------------------------------------------------


def _linear(tape: Tape, result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> TapeNode:
    owner, name = tape.owner(weight)
    if name != "weight" or getattr(owner, "bias", None) is not bias or x.ndim != 2:
        raise UnknownError("weights that are not a layer's")
    layer = Layer(owner, tape.lanes)  # type: ignore[arg-type]
    tape.fetched.append(layer)
    tape.multiplications += weight.numel()
    if tape.lanes * weight.shape[1] > MAX_IN_THREAD:
        raise UnknownError("more than is computed without threads")
    fetched, live = (partial(layer.operations, is_live=is_live) for is_live in (False, True))
    return TapeNode([tape.rows_of(x)], bind=fetched, live=live, buffer=layer.out)


def _layer_norm(
    tape: Tape, result: Tensor, x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> TapeNode:
    norm: Any = nn.LayerNorm(shape, eps, False) if weight is None else tape.owner(weight)[0]
    same = (norm.weight, norm.bias, norm.eps, tuple(norm.normalized_shape)) == (weight, bias, eps, (x.shape[-1],))
    if type(norm) is not nn.LayerNorm or not same or x.ndim != 2:
        raise UnknownError("a normalisation that is not a layer's")
    tape.fetched.append(normalise := Norm(norm, np.empty((tape.lanes, x.shape[1]), tape.dtype)))
    return _in_place(tape, x, normalise)


def _activation(kind: type[nn.Module]) -> Callable[..., TapeNode]:
    def note(tape: Tape, result: Tensor, x: Tensor, *settings: Any, **named: Any) -> TapeNode:
        return _in_place(tape, x, partial(ACTIVATIONS[kind], kind(*settings, **named)))

    return note


def _in_place(tape: Tape, x: Tensor, *changes: Callable[[np.ndarray], object]) -> TapeNode:
    return TapeNode(
        [tape.rows_of(x)], lambda x, out: [partial(np.copyto, out, x), *(partial(change, out) for change in changes)]
    )


def _ufunc(function: Callable[..., Any], is_reversed: bool = False) -> Callable[..., TapeNode]:
    def note(tape: Tape, result: Tensor, *operands: Any) -> TapeNode:
        inputs = [tape.rows_of(operand) for operand in (operands[::-1] if is_reversed else operands)]
        return TapeNode(inputs, lambda *given: [partial(function, *given[:-1], out=given[-1])])

    return note


def _clamp(tape: Tape, result: Tensor, x: Tensor, min: Any = None, max: Any = None) -> TapeNode:
    low, high = (None if end is None else tape.rows_of(end) for end in (min, max))
    if isinstance(low, TapeNode) or isinstance(high, TapeNode):
        raise UnknownError("bounds that are tensors")
    return TapeNode([tape.rows_of(x)], lambda x, out: [partial(np.clip, x, low, high, out=out)])


def _cat(tape: Tape, result: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> TapeNode:
    parts = [tape.rows_of(one) for one in tensors]
    if any(node.axis is None or one.ndim != 2 for node, one in zip(parts, tensors, strict=True)):
        raise UnknownError("something that is not rows of vectors")
    tape.must_be_last(tensors[0], dim)
    ends = np.cumsum([one.shape[1] for one in tensors]).tolist()

    def bind(*given: np.ndarray) -> list[Operation]:
        *rows, out = given
        return [partial(np.copyto, out[:, end - r.shape[1] : end], r) for r, end in zip(rows, ends, strict=True)]

    return TapeNode(parts, bind)


def _pieces(tape: Tape, results: Sequence[Tensor], x: Tensor, size: Any, dim: int = 0) -> None:
    tape.must_be_last(x, dim)
    end = 0
    for piece in results:
        start, end = end, end + piece.shape[-1]
        tape.give(piece, TapeNode([tape.rows_of(x)], view=itemgetter((..., slice(start, end)))))


def _item(tape: Tape, result: Tensor, x: Tensor, index: Any) -> TapeNode:
    node, given = tape.node_of(x), index if isinstance(index, tuple) else (index,)
    if node.axis is None or any(type(one) not in (int, slice, type(...)) for one in given):
        raise UnknownError("an index that is not plain")
    at = given.index(...) if ... in given else len(given)
    behind = given[at + 1 :]
    full = (*given[:at], *[slice(None)] * (x.ndim - at - len(behind)), *behind)
    if full[node.axis] != slice(None) or not (tape.is_flat or (at == 0 and len(behind) == 1)):
        raise UnknownError("an index that is not the same for any lanes")
    before = sum(type(one) is int for one in full[: node.axis])
    return TapeNode([node], view=itemgetter(full), axis=node.axis - before)


def _squeeze(tape: Tape, result: Tensor, x: Tensor, dim: int) -> TapeNode:
    place, node = tape.dimension(x, dim), tape.node_of(x)
    if x.shape[place] != 1 or node.axis is None:
        raise UnknownError("nothing to squeeze")
    return TapeNode([node], view=partial(np.squeeze, axis=place), axis=node.axis - (place < node.axis))


def _unsqueeze(tape: Tape, result: Tensor, x: Tensor, dim: int) -> TapeNode:
    place, node = dim % result.ndim, tape.node_of(x)
    if node.axis is None or not (tape.is_flat or (dim < 0 and place > node.axis)):
        raise UnknownError("a dimension that depends on the lanes")
    return TapeNode([node], view=partial(np.expand_dims, axis=place), axis=node.axis + (place <= node.axis))


def _transpose(tape: Tape, result: Tensor, x: Tensor, one: int, other: int) -> TapeNode:
    order = list(range(x.ndim))
    order[one], order[other] = order[other], order[one]
    return _permute(tape, result, x, order)


def _permute(tape: Tape, result: Tensor, x: Tensor, *order: Any) -> TapeNode:
    axes = [axis % x.ndim for axis in (order if isinstance(order[0], int) else order[0])]
    node = tape.node_of(x)
    if not tape.is_flat or node.axis is None:
        raise UnknownError("dimensions that depend on the lanes")
    return TapeNode([node], view=partial(np.transpose, axes=axes), axis=axes.index(node.axis))


def _same(tape: Tape, result: Tensor, x: Tensor) -> TapeNode:
    node = tape.node_of(x)
    return TapeNode([node], view=lambda x: x, axis=node.axis)


def _like(make: Callable[[np.ndarray], np.ndarray]) -> Callable[..., TapeNode]:
    return lambda tape, result, x: TapeNode([tape.rows_of(x)], view=make)


def _expand_as(tape: Tape, result: Tensor, x: Tensor, other: Tensor) -> TapeNode:
    return TapeNode([tape.rows_of(x), tape.rows_of(other)], view=lambda x, like: np.broadcast_to(x, like.shape))


def _where(tape: Tape, result: Tensor, condition: Tensor, one: Any, other: Any) -> TapeNode:
    given = [tape.rows_of(value) for value in (condition, one, other)]
    return TapeNode(
        given,
        lambda which, one, other, out: [partial(np.copyto, out, other), partial(np.copyto, out, one, where=which)],
    )


def _dropout(tape: Tape, result: Tensor, x: Tensor, p: float = 0.5, training: bool = True) -> TapeNode:
    if training:
        raise UnknownError("noise")
    return _same(tape, result, x)


def _to(tape: Tape, result: Tensor, x: Tensor, dtype: Any) -> TapeNode:
    if dtype is not torch.float32:
        raise UnknownError("a type that is not the network's")
    return _same(tape, result, x) if result is x else _in_place(tape, x)


FUNCTIONS: dict[str, Callable[..., TapeNode | None]] = {
    "linear": _linear,
    "layer_norm": _layer_norm,
    "dropout": _dropout,
    "lstm_cell": lstm_cell,
    "gru_cell": gru_cell,
    "lstm": lstm,
    "gru": gru,
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
    "__invert__": _ufunc(np.logical_not),
    "bitwise_not": _ufunc(np.logical_not),
    "logical_not": _ufunc(np.logical_not),
    "lt": _ufunc(np.less),
    "gt": _ufunc(np.greater),
    "add": _ufunc(np.add),
    "sub": _ufunc(np.subtract),
    "__rsub__": _ufunc(np.subtract, is_reversed=True),
    "mul": _ufunc(np.multiply),
    "div": _ufunc(np.divide),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _clamp,
    "cat": _cat,
    "chunk": _pieces,
    "split": _pieces,
    "__getitem__": _item,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "transpose": _transpose,
    "permute": _permute,
    "contiguous": _same,
    "expand_as": _expand_as,
    "zeros_like": _like(np.zeros_like),
    "ones_like": _like(np.ones_like),
    "where": _where,
    "masked_fill": lambda tape, result, x, mask, value: _where(tape, result, mask, value, x),
    "float": lambda tape, result, x: _to(tape, result, x, torch.float32),
    "to": lambda tape, result, x, dtype: _to(tape, result, x, dtype),
}
"""By name, which is the same for functions of torch and methods of tensors."""


# -- the stage -------------------------------------------------------------------------------------------------------


class TracedStage(ArrayStage):
    """What a network with a forward of its own does, call by call."""

    def __init__(
        self,
        tape: Tape,
        results: list[TapeNode],
        sources: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
    ) -> None:
        """Do what is on the `tape` to `sources`. Use `traced_stage`, which checks that it fits."""
        self._tape, self._results = tape, results
        super().__init__(sources, targets, tape.fetched)

    def _bind(self, sources: list[np.ndarray], targets: list[np.ndarray], is_live: bool) -> list[Operation]:
        """The calls; what is a result is written straight into its target, where it is one alone."""
        values: dict[Any, np.ndarray] = dict(zip(self._tape.inputs, sources, strict=True))
        final = {
            node: target
            for node, target in zip(self._results, targets, strict=True)
            if node.bind is not None and self._results.count(node) == 1
        }
        operations: list[Operation] = []
        for node in self._tape.nodes:
            given = [values[one] if isinstance(one, TapeNode) else one for one in node.inputs]
            if node.bind is None:
                assert node.view is not None
                values[node] = node.view(*given)
            else:
                assert node.buffer is not None
                rows = node.buffer if node.axis is None else node.buffer[: len(sources[0])]
                values[node] = final.get(node, rows)
                operations += (node.live if is_live and node.live else node.bind)(*given, values[node])
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
    if len(targets) != len(out_keys) or (flatten(module) is not None and len(sources) == 1):
        return None
    rows = {type(one) for one in module.modules() if flatten(one) is not None}  # TorchRL's MLP, which joins its inputs
    if not is_settled(module, LEAVES | rows, FUNCTIONS):
        return None
    return trace(module, sources, targets, len(outputs.batch_size) == 1)


def trace(module: nn.Module, sources: list[np.ndarray], targets: list[np.ndarray], is_flat: bool) -> TracedStage | None:
    """The same for a module of which one call shows all; `is_flat` says that it is given one dimension of lanes."""
    floating = {array.dtype for array in targets if array.dtype != bool}
    if len(floating) != 1 or (dtype := floating.pop()).kind != "f":
        return None
    if any(np.shares_memory(source, target) for source in sources for target in targets):
        return None
    if any(source.ndim < 2 for source in sources):
        return None
    if any(weight.device.type != "cpu" for weight in (*module.parameters(), *module.buffers())):
        return None
    try:
        stage = _traced(module, sources, targets, dtype, is_flat)
        return stage if agrees(stage, module, sources, targets) else None
    except Exception:  # whatever the network does to its tensors, and numpy does not do
        return None


def _traced(
    module: nn.Module, sources: list[np.ndarray], targets: list[np.ndarray], dtype: np.dtype[Any], is_flat: bool
) -> TracedStage:
    given = [torch.from_numpy(source.copy()) for source in sources]
    tape = Tape(module, given, dtype, is_flat, FUNCTIONS)
    with torch.no_grad(), without_trace(module), tape:
        results = module(*given)
    results = results if isinstance(results, tuple) else (results,)
    if tape.lanes * tape.multiplications > MAX_MULTIPLICATIONS:
        raise UnknownError("a network that outweighs the dispatcher")
    if [tuple(result.shape) for result in results] != [target.shape for target in targets]:
        raise UnknownError("other results than in the first call")
    return TracedStage(tape, [tape.rows_of(result) for result in results], sources, targets)
