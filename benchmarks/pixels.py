"""A pixel environment that costs next to nothing.

W6 asks what moving frames costs, so the env must not be where the time goes: it slides a window of
four frames over a fixed pool of random images, and every observation is a read-only view of it.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

ENV_ID = "SwathBenchPixels-v0"
SIDE, DEPTH, ACTIONS, POOL = 84, 4, 6, 64


def _make_pool() -> NDArray[np.uint8]:
    pool = np.random.default_rng(0).integers(0, 256, (POOL + DEPTH, SIDE, SIDE), dtype=np.uint8)
    pool.flags.writeable = False  # all envs share it: nobody may scribble on another's frames
    return pool


_FRAMES = _make_pool()


class PixelEnv(gym.Env[NDArray[np.uint8], np.int64]):
    """84x84x4 uint8 (channels first, as a torch CNN reads them), six actions, about 200 steps.

    Episode lengths are drawn from 150..249, so that eight envs do not all end in the same step.
    """

    observation_space = gym.spaces.Box(0, 255, (DEPTH, SIDE, SIDE), np.uint8)
    action_space = gym.spaces.Discrete(ACTIONS)

    def __init__(self) -> None:
        # a signature of its own: the peer tries `frameskip=` first and reads the answer in the
        # error
        self._at = self._left = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed)
        self._at = int(self.np_random.integers(POOL))
        self._left = int(self.np_random.integers(150, 250))
        return _FRAMES[self._at : self._at + DEPTH], {}

    def step(self, action: np.int64) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        reward = 1.0 if action == self._at % ACTIONS else 0.0
        at = self._at = (self._at + 1) % POOL
        self._left -= 1
        return _FRAMES[at : at + DEPTH], reward, self._left == 0, False, {}


def register() -> None:
    """Let every contestant make the env by name, as it would any other."""
    if ENV_ID not in gym.registry:
        gym.register(ENV_ID, entry_point=f"{__name__}:{PixelEnv.__name__}")
