"""What no buffer can beat by much: the bytes of both observations, copied and nothing else."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.replay import frames
from benchmarks.replay.parts import Buffer, Content
from benchmarks.replay.workloads import BATCH, ROWS

_KEYS = (("observation",), ("next", "observation"))


def buffer(capacity: int, pixels: bool) -> Buffer:
    """Rows divide the capacity, so that a written batch never wraps around."""
    batches = [[frames.make(ROWS, pixels, ROWS * n)[key] for key in _KEYS] for n in range(8)]
    rings = [np.empty((capacity, *array.shape[1:]), array.dtype) for array in batches[0]]
    out = [np.empty((BATCH, *ring.shape[1:]), ring.dtype) for ring in rings]
    places = cycle(range(0, capacity, ROWS))
    coming = cycle(batches)
    rng = np.random.default_rng(0)

    def extend() -> None:
        place = next(places)
        for ring, array in zip(rings, next(coming), strict=True):
            np.copyto(ring[place : place + ROWS], array)

    def sample() -> list[NDArray[Any]]:
        index = rng.integers(capacity, size=BATCH)
        for ring, rows in zip(rings, out, strict=True):
            np.take(ring, index, axis=0, out=rows, mode="clip")  # with "raise" it would copy once more
        return out

    for _ in range(capacity // ROWS):
        extend()
    return Buffer(extend, sample, _content)


def _content(rows: list[NDArray[Any]]) -> Content:
    observation, coming = rows
    action = observation.reshape(BATCH, -1)[:, 0].astype(np.int64) % frames.ACTIONS
    return {"observation": observation, "next_observation": coming, "action": action}
