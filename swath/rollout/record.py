"""Records: the rows of all steps of a slot, one step behind the other, until the slot is complete.

Columns are lane-major, so that what a step brings goes to as many places of each as there are lanes. To write it there
at once costs more than to copy the rows as they lie and to lay out all steps at the end: rows that lie next to each
other in memory are one copy then, whatever entries they are of, and the layout is one for each entry and slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from swath.envs.rows import as_items

MIN_STEPS = 4
"""For fewer, laying out costs more than it saves."""
MAX_ROWS = 32_768
"""An entry with more bytes, in all lanes, goes to its column at once: it is their number that takes the time."""
MAX_RECORD = 8_388_608
"""So does one with more bytes in all steps: what has left the caches would have to be fetched again."""
MAX_GAP = 128
"""So many bytes between two entries are copied along with them."""


class Copy(NamedTuple):
    """What is copied in each step `t`: `target[t] = row`."""

    target: Any
    row: Any


class Layout(NamedTuple):
    """A column `[N, T]`, and where all its steps are to be found when the slot is complete."""

    column: np.ndarray
    recorded: np.ndarray

    def finish(self, steps: int) -> None:
        """Fill in the first `steps` steps."""
        if steps == self.column.shape[1]:
            self.column[...] = self.recorded
        else:
            self.column[:, :steps] = self.recorded[:, :steps]


def copies_of(
    wanted: Iterable[tuple[Any, Any]], steps: int, pieces: Iterable[np.ndarray | None]
) -> tuple[list[Copy], list[Layout]]:
    """How rows `[N, ...]` get to columns `[N, T, ...]`: what is copied in each step, and what is done at the end.

    `wanted` has pairs of both, arrays or tensors; `pieces` is memory in which several rows may lie.
    """
    copies, staged = list[Copy](), list[tuple[np.ndarray, np.ndarray]]()
    for column, row in wanted:
        may_wait = isinstance(row, np.ndarray) and row.flags.c_contiguous and 0 < row.nbytes <= MAX_ROWS
        if may_wait and steps >= MIN_STEPS and steps * row.nbytes <= MAX_RECORD:
            staged.append((column, row))
        else:
            copies.append(_at_once(column, row))
    layouts = list[Layout]()
    for piece, group in _grouped(staged, [piece for piece in pieces if piece is not None]):
        first, last = group[0][1], group[-1][1]
        begin, size = _begin(first) - _begin(piece), _begin(last) + last.nbytes - _begin(first)
        whole = np.dtype((np.void, size))
        record = np.zeros(steps, whole)
        copies.append(Copy(record, piece[begin : begin + size].view(whole).reshape(())))
        for column, row in group:
            items = as_items(row, 1)
            place, strides = _begin(row) - _begin(first), (size, items.itemsize)
            recorded = np.ndarray((steps, len(row)), items.dtype, record, place, strides).T
            if column.flags.c_contiguous:
                layouts.append(Layout(as_items(column, 2), recorded))
            else:
                shaped = np.ndarray((steps, *row.shape), row.dtype, record, place, (size, *row.strides))
                layouts.append(Layout(column, shaped.swapaxes(0, 1)))
    return copies, layouts


def _at_once(column: Any, row: Any) -> Copy:
    """A copy to the column itself. One lane is copied without its dimension."""
    if len(row) == 1:
        return Copy(column[0], row.reshape(row.shape[1:]))
    if isinstance(column, torch.Tensor):
        return Copy(column.transpose(0, 1), row)
    if row.flags.c_contiguous and column.flags.c_contiguous:
        return Copy(as_items(column, 2).swapaxes(0, 1), as_items(row, 1))
    return Copy(column.swapaxes(0, 1), row)


def _grouped(
    staged: Iterable[tuple[np.ndarray, np.ndarray]], pieces: list[np.ndarray]
) -> list[tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]]:
    """The pairs whose rows are copied together, in the order of their addresses, and the memory that these lie in."""
    groups = list[tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]]()
    for column, row in sorted(staged, key=lambda pair: _begin(pair[1])):
        found = [piece for piece in pieces if 0 <= _begin(row) - _begin(piece) <= len(piece) - row.nbytes]
        piece = found[0] if found else row.reshape(-1).view(np.uint8)
        if groups and groups[-1][0] is piece:
            last = groups[-1][1][-1][1]
            if _begin(row) - (_begin(last) + last.nbytes) <= MAX_GAP:
                groups[-1][1].append((column, row))
                continue
        groups.append((piece, [(column, row)]))
    return groups


def _begin(array: np.ndarray) -> int:
    """At which address it begins."""
    return int(array.__array_interface__["data"][0])
