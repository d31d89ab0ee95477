"""NanWatch: looks for NaN in what an env has answered."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from swath.envs.base import EnvBase
from swath.errors import NotANumberWarning
from swath.keys import Key, after
from swath.rollout.record import joined
from swath.rollout.slots import Slot
from swath.runtime.columns import Leaf

FEW = 64
"""So many numbers are added up in less time than it takes to call numpy."""
Looks = list[Callable[[], Any]]
"""What gives NaN if there is any."""


class NanWatch:
    """Warns once for each key: of NaN in what the env answered, and in what it began with."""

    def __init__(self, env: EnvBase, leaves: Mapping[Key, Leaf], told: Sequence[Key], seen: Sequence[Key]) -> None:
        """Watch the columns that steps of `env` write, of the keys `told`, and those that it has `seen` before them."""
        self._env, self._warned = env, set[Key]()
        columns = {after(key): key for key in told} | {key: key for key in env.observation_keys if key in seen}
        self._suspect = {name: key for name, key in columns.items() if _may_be_nan(leaves[name])}
        """Where there may be some: the names of columns, and which keys they are of."""
        self._begun_with = [name for name, key in self._suspect.items() if name == key and key in told]
        """Those in which there can only be NaN where an episode has begun, as what else is seen was told before,"""
        self._others = [name for name in self._suspect if name not in self._begun_with]

    def looks(self, slot: Slot, steps: int) -> tuple[Looks, Looks]:
        """How to look at the first `steps` steps of a slot; and how where an episode may have begun."""
        others = _looks(slot, steps, self._others)
        return others, [*others, *_looks(slot, steps, self._begun_with)]

    def warn(self, slot: Slot, steps: int, by_lane: Callable[[np.ndarray], np.ndarray]) -> None:
        """There is NaN in a slot, of which `by_lane` makes `[N, T]`."""
        for name, key in self._suspect.items():
            if key in self._warned:
                continue
            column = slot.columns[name][:, :steps]
            found = torch.as_tensor(column, device="cpu").reshape(*column.shape[:2], -1).isnan().any(-1).numpy()
            if not found.any():
                continue
            self._warned.add(key)
            lane = int(np.flatnonzero(by_lane(found).any(1))[0])
            warnings.warn(
                f"The env of lane {lane} ({self._env!r}) produced NaN in {key!r}. It is delivered as it is, and this "
                "is said only once; swath.envs.check_env(env) may tell more.",
                NotANumberWarning,
                stacklevel=2,
            )


def _looks(slot: Slot, steps: int, names: Iterable[Key]) -> Looks:
    columns = [slot.columns[name][:, :steps] for name in names]
    if slot.memory.piece is not None and steps == slot.steps:
        columns = joined(columns, slot.memory.piece)
    flat = [column.reshape(-1) for column in columns if steps]
    return [partial(_total, one) if len(one) <= FEW else one.min for one in flat]


def _total(numbers: Any) -> Any:
    """NaN if any is, or if two of them are infinite: then all are looked at once more.

    Few are added up in less time than numpy takes to begin; and numpy would warn where large ones overflow.
    """
    return sum(numbers.tolist())


def _may_be_nan(leaf: Leaf) -> bool:
    return leaf.dtype.is_floating_point and math.prod(leaf.shape) > 0
