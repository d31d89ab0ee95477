"""EagerResets: the first observations of episodes that workers have begun before the reset was asked for.

NOTE [Eager resets]: a reset costs a round of its own. With many lanes and short episodes that would be every second or
third step. But a collector resets each lane that has finished before it steps it again, always, and says so in its rows
(`Rows.restarts`). A worker that steps on such rows resets a lane in the round in which it finishes: it hands out the
final observation as ever, and puts the first one of the next episode aside, in memory that both sides map. To reset
the lane is then to copy it from there.

The caller that steps the env sees no difference. What an eager reset raises is kept until the reset is asked for. Seeds
that come before that, and a step without a reset, make an unused first observation void; then the env has been reset
once more than it would have been otherwise. Envs with several lanes and one random generator are not reset eagerly:
with which other lanes a lane is reset decides what they draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from swath.envs.base import EnvBase
from swath.envs.rows import Leaf, Rows
from swath.keys import TERMINATED, TRUNCATED, Key

READY: Key = "_ready"


def eager_leaves(observations: Mapping[Key, Leaf]) -> dict[Key, Leaf]:
    """What has to be kept for each lane: its first observation, and whether there is one."""
    return {**observations, READY: Leaf((), torch.bool)}


class EagerResets:
    """Resets made while stepping on the rows `out`. The worker makes them, either side hands them out."""

    def __init__(self, kept: Rows, out: Rows) -> None:
        """Keep first observations in `kept`, which has the `eager_leaves`."""
        self._out = out
        self._ready = kept.arrays[READY]
        self._any_made = False
        """Whether some may be left of the last step; known to the side that makes them."""
        self._kept = {key: array for key, array in kept.arrays.items() if key != READY}

    def make(self, env: EnvBase, ended: np.ndarray) -> None:
        """Reset the lanes `ended` of `env`, whose rows `out` stay as they are."""
        arrays = self._out.arrays
        final = [(array, array[ended]) for array in arrays.values()]
        try:
            env.reset_into(ended.tolist(), self._out)
            for key, kept in self._kept.items():
                kept[ended] = arrays[key][ended]
            self._ready[ended] = self._any_made = True
        finally:
            for array, values in final:
                array[ended] = values

    def ended(self) -> np.ndarray:
        """The lanes that have finished."""
        return np.flatnonzero(self._out.arrays[TERMINATED] | self._out.arrays[TRUNCATED])

    def drop(self) -> None:
        """Forget them: they were passed over."""
        if self._any_made:
            self._ready[:] = self._any_made = False

    def drop_lanes(self, lanes: np.ndarray) -> None:
        """Forget those of some lanes."""
        self._ready[lanes] = False

    def hand_out(self, lanes: Sequence[int], out: Rows) -> Sequence[int]:
        """Write those of `lanes` that there are into `out`; returns the lanes that have none."""
        begun = [lane for lane in lanes if self._ready[lane]]
        if not begun:
            return lanes
        others = [] if len(begun) == len(lanes) else [lane for lane in lanes if not self._ready[lane]]
        for key, kept in self._kept.items():
            out.arrays[key][begun] = kept[begun]
        self._ready[begun] = False
        return others
