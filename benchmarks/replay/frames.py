"""The frames that are written, and the check that what is sampled was written so.

Every entry is there that a collector writes. A frame's parts can be told from one another's: the next
observation and the action follow from the observation, so that parts of different frames cannot pass
for one frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from benchmarks.replay.workloads import BATCH

Frames = dict[tuple[str, ...], NDArray[Any]]
"""Arrays `[frames, ...]` by path."""

ACTIONS = 6
_FLAGS = ("done", "terminated", "truncated")


def make(count: int, pixels: bool, first: int = 0) -> Frames:
    """`count` frames in order; small ones have four floats for an observation."""
    observation = _bytes(count, first) if pixels else _floats(count, first)
    frames: Frames = {
        ("observation",): observation,
        ("action",): (observation.reshape(count, -1)[:, 0].astype(np.int64)) % ACTIONS,
        ("next", "observation"): following(observation),
        ("next", "reward"): np.ones((count, 1), np.float32),
        ("collector", "traj_ids"): (first + np.arange(count)) // 20,
    }
    for flag in _FLAGS:
        frames[(flag,)] = np.zeros((count, 1), bool)
        frames[("next", flag)] = np.zeros((count, 1), bool)
    return frames


def _floats(count: int, first: int) -> NDArray[np.float32]:
    number = (first + np.arange(count, dtype=np.float32))[:, None]
    return number + np.zeros((1, 4), np.float32)


def _bytes(count: int, first: int) -> NDArray[np.uint8]:
    return np.random.default_rng(first).integers(0, 256, (count, 4, 84, 84), dtype=np.uint8)


def following(observation: NDArray[Any]) -> NDArray[Any]:
    """The next observation."""
    return 255 - observation if observation.dtype == np.uint8 else observation + np.float32(0.5)


def as_tensordict(frames: Frames) -> TensorDict:
    count = len(frames[("observation",)])
    data = TensorDict({}, [count])
    for path, array in frames.items():
        data.set(path, torch.from_numpy(array))
    return data


def observed_bytes(frames: Frames) -> int:
    """Bytes of both observations of one frame: what a plain copy is compared by."""
    both = (frames[("observation",)], frames[("next", "observation")])
    return sum(array[0].nbytes for array in both)


def check(content: Mapping[str, Any]) -> None:
    """Raise ValueError unless `observation`, `next_observation` and `action` are whole frames."""
    observation, coming, action = (np.asarray(content[k]) for k in ("observation", "next_observation", "action"))
    if len(observation) != BATCH:
        raise ValueError(f"{len(observation)} frames were sampled instead of {BATCH}")
    if not (coming == following(observation)).all():
        raise ValueError("an observation came with another frame's next observation")
    if not (action.reshape(-1) == observation.reshape(BATCH, -1)[:, 0].astype(np.int64) % ACTIONS).all():
        raise ValueError("an observation came with another frame's action")
