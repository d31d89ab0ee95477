"""The ids of trajectories."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from swath.keys import WORKER_BITS

FEW = 8
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
        lanes, steps = done.shape
        (ends,) = done.T.reshape(-1).nonzero()
        if len(ends) <= FEW:
            out[:] = self.current[:, None]
            for end in ends.tolist():
                at, one = divmod(end, lanes)
                self.renew((one,))
                out[one, at + 1 :] = self.current[one]
            return
        ids = np.zeros((lanes, steps + 1), dtype=np.int64)
        ids[:, 0] = self.current
        ids[ends % lanes, ends // lanes + 1] = self._worker + self.count + np.arange(len(ends))
        np.maximum.accumulate(ids, 1, out=ids)  # each is larger than those before
        out[:], self.current = ids[:, :-1], ids[:, -1].copy()
        self.count += len(ends)
