"""The ids of trajectories."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from swath.keys import WORKER_BITS

FEW = 16
"""So many ends of trajectories are seen to one by one in less time than all at once."""


class TrajectoryIds:
    """Gives every trajectory of every lane its number."""

    def __init__(self, lanes: int, worker: int = 0) -> None:
        self._worker = worker << WORKER_BITS
        self.count = lanes
        """How many ids were ever given out."""
        self.current = self._worker + np.arange(lanes, dtype=np.int64)
        """The id of each lane's running trajectory."""

    def renew(self, lanes: Iterable[int]) -> None:
        """Give new ids to `lanes`, whose trajectories were cut off."""
        for lane in lanes:
            self.current[lane] = self._worker + self.count
            self.count += 1

    def renumber(self, worker: int) -> None:
        """Number the lanes' trajectories as another worker's, from the first on."""
        self._worker, self.count = worker << WORKER_BITS, 0
        self.renew(range(len(self.current)))

    def restore(self, count: int) -> None:
        """Go on after `count` ids given out elsewhere: none of them is used again."""
        self.count = count
        self.renew(range(len(self.current)))

    def assign(self, done: np.ndarray, out: np.ndarray) -> None:
        """Write the id of every frame to `out` `[N, T]`, where `done` `[N, T]` marks last frames.

        New trajectories are numbered in the order in which they begin, lanes in order where they begin together.
        """
        out[:] = self.current[:, None]
        if done.shape[1] == 1:  # as is quicker
            self.renew(done.nonzero()[0].tolist())
            return
        last = np.argwhere(done.T)
        if len(last) <= FEW:
            for at, one in last.tolist():
                self.renew((one,))
                out[one, at + 1 :] = self.current[one]
            return
        ends = np.cumsum(done, axis=1)
        before = ends - done  # how many trajectories of this lane have ended before each frame
        counts = ends[:, -1]
        first = np.cumsum(counts + 1) - (counts + 1)  # where each lane's ids begin in the table
        lane, step = np.nonzero(done)
        order = np.lexsort((lane, step))
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        table = np.empty(len(order) + len(done), dtype=np.int64)
        table[first] = self.current
        table[first[lane] + ends[lane, step]] = self._worker + self.count + rank
        out[:] = table[first[:, None] + before]
        self.current = table[first + counts]
        self.count += len(order)
