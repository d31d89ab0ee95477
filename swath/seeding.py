"""Seeds belong to lanes: a tree of seeds by global lane index.

The same seed gives the same environments and episodes however the lanes are spread over workers.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np


def checked_seed(seed: Any) -> int:
    """`seed` as a plain number, or an error that names it."""
    try:
        if isinstance(seed, bool):
            raise TypeError
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed must be a whole number, got {seed!r}.") from None
    if number < 0:
        raise ValueError(f"seed must not be negative, got {seed}.")
    return number


def lane_seed(seed: int, lane: int) -> int:
    """The seed of lane `lane`. Lane 0 has the seed itself, so that one env behaves as gymnasium's own."""
    if lane == 0:
        return int(seed)
    return int(np.random.SeedSequence(seed, spawn_key=(lane,)).generate_state(1)[0])


def lane_seeds(seed: int, lanes: int, first: int = 0, static: bool = False) -> list[int]:
    """The seeds of `lanes` lanes beginning at global index `first`; all equal when `static`."""
    if static:
        return [int(seed)] * lanes
    return [lane_seed(seed, first + lane) for lane in range(lanes)]


def next_seed(seed: int, lanes: int, static: bool = False) -> int:
    """A seed that has not been used by `lanes` lanes from `seed`; the same seed when `static`."""
    return int(seed) if static else lane_seed(seed, max(1, lanes))


def policy_seed(seed: int, worker: int = 0) -> int:
    """The seed of a policy's own noise, apart from every lane's."""
    return int(np.random.SeedSequence(seed, spawn_key=(worker, 0)).generate_state(1)[0])
