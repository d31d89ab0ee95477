"""Records: the rows of all steps of a slot, one step behind the other, until the slot is complete.

Columns are lane-major, so that what a step brings goes to as many places of each as there are lanes. To write it there
at once costs more than to copy the rows as they lie and to lay out all steps at the end: rows that lie next to each
other in memory are one copy then, whatever entries they are of, and the layout is one for each entry and slot. The
columns of a single step are as large as its rows: where they lie next to each other too, nothing has to be laid out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from swath.envs.rows import as_items
from swath.runtime.memory import line_aligned

MIN_STEPS = 4
"""For fewer, laying out costs more than it saves."""
MAX_ROWS = 32_768
"""An entry with more bytes, in all lanes, goes to its column at once: it is their number that takes the time."""
MAX_RECORD = 8_388_608
"""So does one with more bytes in all steps: what has left the caches would have to be fetched again."""
MAX_GAP = 128
"""So many bytes between two entries are copied along with them."""

Pair = tuple[Any, Any]
"""A column `[N, T, ...]`, and the rows `[N, ...]` of a step."""


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
    wanted: Iterable[Pair], steps: int, pieces: Iterable[np.ndarray | None], whole: np.ndarray | None = None
) -> tuple[list[Copy], list[Layout]]:
    """How rows `[N, ...]` get to columns `[N, T, ...]`: what is copied in each step, and what is done at the end.

    `wanted` has pairs of both, arrays or tensors; `pieces` is memory in which several rows may lie, and `whole` that in
    which all columns do.
    """
    copies, staged = list[Copy](), list[Pair]()
    for column, row in wanted:
        may_wait = isinstance(row, np.ndarray) and row.flags.c_contiguous and 0 < row.nbytes <= MAX_ROWS
        is_recorded = steps >= MIN_STEPS or (steps == 1 and whole is not None)
        if may_wait and is_recorded and steps * row.nbytes <= MAX_RECORD:
            staged.append((column, row))
        else:
            copies.append(_at_once(column, row))
    layouts = list[Layout]()
    for piece, group in _grouped(staged, [piece for piece in pieces if piece is not None], is_one_step=steps == 1):
        (lowest, first), (highest, last) = group[0], group[-1]
        together = between(first, last, piece)
        size = len(together)
        item = np.dtype((np.void, size))
        row = together.view(item).reshape(())
        if steps == 1 and whole is not None:
            copies.append(Copy(between(lowest, highest, whole).view(item), row))
            continue
        record = np.zeros(steps, item)
        copies.append(Copy(record, row))
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
    staged: Iterable[Pair], pieces: list[np.ndarray], is_one_step: bool
) -> list[tuple[np.ndarray, list[Pair]]]:
    """The pairs whose rows are copied together, in the order of their addresses, and the memory that these lie in.

    For one step, the columns have to follow each other as the rows do: nothing lies between them then.
    """
    groups = list[tuple[np.ndarray, list[Pair]]]()
    for column, row in sorted(staged, key=lambda pair: _begin(pair[1])):
        found = [piece for piece in pieces if 0 <= _begin(row) - _begin(piece) <= len(piece) - row.nbytes]
        piece = found[0] if found else row.reshape(-1).view(np.uint8)
        if groups and groups[-1][0] is piece:
            before = groups[-1][1][-1]
            is_next = _follows(column, before[0]) and _follows(row, before[1])
            if is_next if is_one_step else _gap(row, before[1]) <= MAX_GAP:
                groups[-1][1].append((column, row))
                continue
        groups.append((piece, [(column, row)]))
    return groups


def _gap(array: np.ndarray, before: np.ndarray) -> int:
    """How many bytes lie between the end of the one and the other."""
    return _begin(array) - _begin(before) - before.nbytes


def _follows(array: np.ndarray, before: np.ndarray) -> bool:
    """Whether it begins where the next one can that lies behind `before`; see `Columns`."""
    return _begin(array) == line_aligned(_begin(before) + before.nbytes)


def between(first: np.ndarray, last: np.ndarray, piece: np.ndarray) -> np.ndarray:
    """The bytes of `piece` from where `first` begins to where `last` ends."""
    begin = _begin(first) - _begin(piece)
    return piece[begin : _begin(last) - _begin(piece) + last.nbytes]


def joined(columns: Iterable[np.ndarray], piece: np.ndarray) -> list[np.ndarray]:
    """`columns` of `piece`, where those are one that follow each other and have the same type.

    Between them there are zeros.
    """
    groups = list[list[np.ndarray]]()
    for column in sorted(columns, key=_begin):
        if groups and column.dtype == groups[-1][-1].dtype and _follows(column, groups[-1][-1]):
            groups[-1].append(column)
        else:
            groups.append([column])
    return [between(group[0], group[-1], piece).view(group[0].dtype) for group in groups]


def _begin(array: np.ndarray) -> int:
    """At which address it begins."""
    return int(array.__array_interface__["data"][0])
