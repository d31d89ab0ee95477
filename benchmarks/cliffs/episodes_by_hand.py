"""Episodes by hand: what a careful user puts around the loop, to gather whole episodes or to split each batch.

Each batch is copied as a whole, as the next overwrites it, and an episode is a note of which steps of which copies it
is made of. These are written into the padded batch: nothing is concatenated in between, and no tensor is made but those
that are delivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.batch import Run

Arrays = dict[str, np.ndarray]
Piece = tuple[Arrays, int, int, int]
"""Frames of one episode that follow each other: in which batch, in which lane, from which step to which."""


def whole_episodes(run: Run, count: int) -> Run:
    """Batches of `count` whole episodes, in the order in which they end, padded to `[count, longest]` with a mask."""
    pending: dict[int, list[Piece]] = {}
    ready: deque[list[Piece]] = deque()
    last: dict[str, Tensor] = {}

    def collect() -> int:
        while len(ready) < count:
            run()
            arrays = {key: array.copy() for key, array in _arrays(run).items()}
            ended: list[tuple[int, list[Piece]]] = []
            for lane, first, end, is_last in _pieces(arrays):
                episode = [*pending.pop(lane, ()), (arrays, lane, first, end)]
                if is_last:
                    ended.append((end, episode))
                else:
                    pending[lane] = episode
            ready.extend(episode for _, episode in sorted(ended, key=lambda one: one[0]))
        return _padded([ready.popleft() for _ in range(count)], last)

    return Run(collect, lambda: last, close=run.close)


def split_batches(run: Run) -> Run:
    """Each batch as the episodes, or parts of such, that are in it: padded to `[pieces, longest]` with a mask."""
    last: dict[str, Tensor] = {}

    def collect() -> int:
        run()
        arrays = _arrays(run)
        pieces = [[(arrays, lane, first, end)] for lane, first, end, _ in _pieces(arrays)]
        return _padded(pieces, last)

    return Run(collect, lambda: last, close=run.close)


def _arrays(run: Run) -> Arrays:
    assert run.last_batch is not None
    return {key: tensor.numpy() for key, tensor in run.last_batch().items()}  # [N, T, ...]


def _pieces(arrays: Arrays) -> Iterator[tuple[int, int, int, bool]]:
    """Lane, first step, the step after the last, and whether the episode ends there."""
    done = arrays["terminated"] | arrays["truncated"]
    for lane, row in enumerate(done):
        first = 0
        for end in (np.flatnonzero(row) + 1).tolist():
            yield lane, first, end, True
            first = end
        if first < len(row):
            yield lane, first, len(row), False


def _padded(episodes: Sequence[Sequence[Piece]], into: dict[str, Tensor]) -> int:
    """Lay out one episode per row; the frames that are real."""
    lengths = np.array([sum(end - first for _, _, first, end in episode) for episode in episodes])
    shape = (len(episodes), int(lengths.max()))
    example = episodes[0][0][0]
    into.clear()
    for key, values in example.items():
        rows = np.zeros((*shape, *values.shape[2:]), values.dtype)
        for row, episode in zip(rows, episodes, strict=True):
            at = 0
            for arrays, lane, first, end in episode:
                row[at : at + end - first] = arrays[key][lane, first:end]
                at += end - first
        into[key] = torch.from_numpy(rows)
    into["mask"] = torch.from_numpy(np.arange(shape[1]) < lengths[:, None])
    return int(lengths.sum())
