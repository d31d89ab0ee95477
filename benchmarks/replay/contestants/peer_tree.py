"""The floor of the peer's priorities: two calls of its C++ sum tree, with prepared random numbers."""

from __future__ import annotations

from itertools import cycle

import numpy as np

from benchmarks.replay import peer_tree
from benchmarks.replay.parts import Prioritized
from benchmarks.replay.workloads import BATCH


def prioritized(capacity: int) -> Prioritized:
    tree = peer_tree.load().SumSegmentTreeFp32(capacity)
    rng = np.random.default_rng(0)
    tree[np.arange(capacity)] = rng.random(capacity, np.float32) + np.float32(0.01)
    chances = cycle(rng.random((64, BATCH), np.float32))
    priorities = cycle(rng.random((64, BATCH), np.float32) + np.float32(0.01))

    def turn() -> None:
        index = tree.scan_lower_bound(next(chances) * np.float32(tree.query(0, capacity)))
        tree[np.minimum(index, capacity - 1)] = next(priorities)

    return Prioritized(turn)
