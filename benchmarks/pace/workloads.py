"""What is measured of envs whose steps take long or vary, the same for every contestant.

W7: envs that sleep a random 1 to 10 ms in each step, 16, 64 and 256 of them. They cost no processor while they wait, so
that the limit is known: `envs / 5.5 ms`. W7b: envs that compute, most of their steps a little and some of them forty
times as long; the limit is what the cores can do.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.figures import FRAMES, Figure

SHORTEST_S, LONGEST_S = 0.001, 0.010
MEAN_S = (SHORTEST_S + LONGEST_S) / 2
SCALES = (16, 64, 256)
LIMIT = Figure("share_of_limit", "of the limit", 3)
FILL = Figure("batch_fill", "envs per policy call", 1)


class WaitingEnv(gym.Env[Any, Any]):
    """An env that only waits; episodes of 100 steps. The observation counts them, so that a batch can be checked."""

    def __init__(self, lane: int = 0) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self._pace, self._lane, self._steps = random.Random(lane), lane, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._wait()
        self._steps += 1
        return self._observe(), 1.0, False, self._steps >= 100, {}

    def _observe(self) -> Any:
        return np.array([self._lane, self._steps, 0.0, 0.0], np.float32)

    def _wait(self) -> None:
        time.sleep(self._pace.uniform(SHORTEST_S, LONGEST_S))


class ComputingEnv(WaitingEnv):
    """An env that computes: 0.1 ms, and in one step of twenty 4 ms."""

    def _wait(self) -> None:
        until = time.thread_time() + (0.004 if self._pace.random() < 0.05 else 0.0001)
        while time.thread_time() < until:
            pass


@dataclass(frozen=True)
class PaceWorkload:
    """One setting."""

    name: str
    title: str
    envs: int
    env: type[WaitingEnv]
    contestants: tuple[str, ...]
    family: str = ""

    @property
    def limit(self) -> float | None:
        """Frames per second, if nothing but waiting took time."""
        return self.envs / MEAN_S if self.env is WaitingEnv else None

    @property
    def figures(self) -> tuple[Figure, ...]:
        return (FRAMES, LIMIT, FILL) if self.limit else (FRAMES, FILL)

    @property
    def frames_per_batch(self) -> int:
        """About a quarter of a second."""
        return max(64, int((self.limit or 4000.0) / 4))


_ALL = (
    "swath", "swath_processes", "swath_lockstep", "peer_threads", "peer_processes", "handwritten",
)  # fmt: skip
WORKLOADS: dict[str, PaceWorkload] = {
    w.name: w
    for w in (
        *(
            PaceWorkload(
                f"W7x{envs}", f"{envs} envs that sleep 1 to 10 ms per step", envs, WaitingEnv, _ALL,
                "W7: envs that sleep a random 1 to 10 ms per step",
            )
            for envs in SCALES
        ),
        PaceWorkload("W7b", "16 envs that compute 0.1 ms per step, and 4 ms in one of twenty", 16, ComputingEnv, _ALL),
    )
}  # fmt: skip
