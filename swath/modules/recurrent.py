"""LSTM and GRU layers for one time step, on arrays.

A step of a cell is one product of what goes in (the input, the state, and a one for the biases) with all weights in one
matrix. `tanh` is then enough for all gates: sigmoid(x) is (1 + tanh(x / 2)) / 2, and the halves are in the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from torch import Tensor, nn

from swath.modules.mlp import MAX_IN_THREAD, Operation, products
from swath.modules.tape import Tape, TapeNode, UnknownError

MAX_WEIGHTS = 150_000
"""Of a layer. To fetch more takes longer than torch takes for a step, and there may be a slot for each."""
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
BLOCKS = {
    # the gates in, out and forget, then the new content
    "lstm": ((0, 0.5, True, True), (1, 0.5, True, True), (3, 0.5, True, True), (2, 1.0, True, True)),
    # the gates reset and update, then the new content: that of the state, and that of the input
    "gru": ((0, 0.5, True, True), (1, 0.5, True, True), (2, 1.0, False, True), (2, 1.0, True, False)),
}
"""What the columns of a cell's matrix are: torch's number for them, a factor, and whether input and state count."""


class Cell:
    """One layer of an LSTM or GRU, on a private copy of the parameters."""

    def __init__(self, kind: str, owner: nn.Module, suffix: str, lanes: int) -> None:
        """The layer of `owner` whose parameters end with `suffix`."""
        self._owner, self._names = owner, [name + suffix for name in WEIGHTS]
        self._kind = BLOCKS[kind]
        (_, self._inputs), (_, self.size) = (getattr(owner, name).shape for name in self._names[:2])
        rows, columns = self._inputs + self.size + 1, 4 * self.size
        if lanes * rows > MAX_IN_THREAD or rows * columns > MAX_WEIGHTS:
            raise UnknownError("more than is computed without threads, or than is fetched for each slot")
        self.multiplications = rows * columns
        dtype = getattr(owner, self._names[0]).detach().numpy().dtype
        self._weight = np.zeros((rows, columns), dtype, order="F" if lanes == 1 else "C")  # as in `Layer`
        self._given = np.ones((lanes, rows), dtype)
        self._gates, self._half = np.empty((lanes, columns), dtype), np.full((lanes, columns), 0.5, dtype)

    def fetch(self, is_live: bool) -> None:
        """Take the parameters as they are now."""
        held = (getattr(self._owner, name, None) for name in self._names)
        arrays: list[Any] = [None if one is None else one.detach().numpy() for one in held]
        of_input, of_state, *biases = arrays
        size, inputs = self.size, self._inputs
        for place, (number, factor, has_input, has_state) in enumerate(self._kind):
            rows, columns = slice(number * size, (number + 1) * size), slice(place * size, (place + 1) * size)
            bias = 0.0
            if has_input:
                np.multiply(of_input[rows].T, factor, self._weight[:inputs, columns])
                bias += biases[0][rows] if biases[0] is not None else 0.0
            if has_state:
                np.multiply(of_state[rows].T, factor, self._weight[inputs:-1, columns])
                bias += biases[1][rows] if biases[1] is not None else 0.0
            self._weight[-1, columns] = bias * factor

    def _gated(self, x: np.ndarray, h: np.ndarray, gates: int) -> tuple[list[Operation], list[np.ndarray]]:
        """What computes the gates, and where they and the rest will be."""
        n, size = len(x), self.size
        given, out, half = self._given[:n], self._gates[:n], self._half[:n, : gates * size]
        signs = out[:, : gates * size]
        operations: list[Operation] = [
            partial(np.copyto, given[:, : self._inputs], x),
            partial(np.copyto, given[:, self._inputs : -1], h),
            *products(given, self._weight, out),
            partial(np.tanh, out if gates == 3 else signs, out if gates == 3 else signs),
            partial(np.multiply, signs, half, signs),
            partial(np.add, signs, half, signs),
        ]
        return operations, [out[:, start : start + size] for start in range(0, 4 * size, size)]

    def remember(self, x: np.ndarray, h: np.ndarray, c: np.ndarray, out: np.ndarray) -> list[Operation]:
        """The new content of an LSTM; `show` gives what it shows of it."""
        operations, (enter, keep, _, new) = self._gated(x, h, gates=3)
        return [
            *operations,
            partial(np.multiply, keep, c, out),
            partial(np.multiply, enter, new, new),
            partial(np.add, out, new, out),
        ]

    def show(self, content: np.ndarray, out: np.ndarray) -> list[Operation]:
        """The new state of an LSTM, behind `remember`."""
        _, _, leave, spare = (self._gates[: len(out), i * self.size : (i + 1) * self.size] for i in range(4))
        return [partial(np.tanh, content, spare), partial(np.multiply, leave, spare, out)]

    def update(self, x: np.ndarray, h: np.ndarray, out: np.ndarray) -> list[Operation]:
        """The new state of a GRU."""
        operations, (reset, keep, new, of_input) = self._gated(x, h, gates=2)
        return [
            *operations,
            partial(np.multiply, new, reset, new),
            partial(np.add, new, of_input, new),
            partial(np.tanh, new, new),
            partial(np.subtract, h, new, reset),
            partial(np.multiply, reset, keep, reset),
            partial(np.add, new, reset, out),
        ]


# -- on a tape -------------------------------------------------------------------------------------------------------


def lstm_cell(tape: Tape, results: Sequence[Tensor], x: Tensor, states: Sequence[Tensor], *weights: Any) -> None:
    """Note a call of an nn.LSTMCell."""
    for result, node in zip(results, _layer(tape, "lstm", [*map(tape.rows_of, (x, *states))], weights), strict=True):
        tape.give(result, node)


def gru_cell(tape: Tape, result: Tensor, x: Tensor, state: Tensor, *weights: Any) -> TapeNode:
    """Note a call of an nn.GRUCell."""
    return _layer(tape, "gru", [tape.rows_of(x), tape.rows_of(state)], weights)[0]


def lstm(tape: Tape, results: Sequence[Tensor], x: Tensor, states: Sequence[Tensor], *settings: Any) -> None:
    """Note a call of an nn.LSTM."""
    _layers(tape, "lstm", results, x, states, *settings)


def gru(tape: Tape, results: Sequence[Tensor], x: Tensor, state: Tensor, *settings: Any) -> None:
    """Note a call of an nn.GRU."""
    _layers(tape, "gru", results, x, [state], *settings)


def _layer(tape: Tape, kind: str, given: list[TapeNode], weights: Sequence[Any]) -> list[TapeNode]:
    """The states that one layer gives for an input and the states before."""
    owner, name = tape.owner(weights[0])
    cell = Cell(kind, owner, name.removeprefix(WEIGHTS[0]), tape.lanes)
    tape.fetched.append(cell)
    tape.multiplications += cell.multiplications
    shape, dtype = (tape.lanes, cell.size), tape.dtype
    if kind == "gru":
        return [tape.add(TapeNode(given, cell.update, buffer=np.empty(shape, dtype)))]
    content = tape.add(TapeNode(given, cell.remember, buffer=np.empty(shape, dtype)))
    return [tape.add(TapeNode([content], cell.show, buffer=np.empty(shape, dtype))), content]


def _layers(
    tape: Tape,
    kind: str,
    results: Sequence[Tensor],
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Any],
    has_biases: bool,
    count: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> None:
    """One time step of all layers: `x` is `[N, 1, in]` or `[1, N, in]`, the states are `[layers, N, hidden]`."""
    time, each = int(batch_first), 4 if has_biases else 2
    given, *before = (tape.node_of(one) for one in (x, *states))
    if [given.axis, *(one.axis for one in before)] != [1 - time, *(1 for _ in states)] or x.shape[time] != 1:
        raise UnknownError("not one step of all lanes")
    if bidirectional or (dropout and training) or len(weights) != count * each:
        raise UnknownError("more than layers that follow each other")
    value = tape.add(TapeNode([given], view=partial(np.squeeze, axis=time)))
    after = []
    for layer in range(count):
        rows = [tape.add(TapeNode([state], view=itemgetter(layer))) for state in before]
        after.append(_layer(tape, kind, [value, *rows], weights[layer * each :][:each]))
        value = after[-1][0]
    tape.give(results[0], TapeNode([value], view=partial(np.expand_dims, axis=time), axis=1 - time))
    for result, nodes in zip(results[1:], zip(*after, strict=True), strict=True):
        buffer = np.empty((tape.lanes, count, result.shape[-1]), tape.dtype)
        whole = tape.add(TapeNode(nodes, _stacked, buffer=buffer))
        tape.give(result, TapeNode([whole], view=partial(np.swapaxes, axis1=0, axis2=1), axis=1))


def _stacked(*given: np.ndarray) -> list[Operation]:
    *parts, out = given
    return [partial(np.copyto, out[:, place], part) for place, part in enumerate(parts)]
