"""Envs that go wrong on command."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

from swath.testing.counting import CountingGymEnv

FAULTS = ("raise", "hang", "nan", "nan_reward", "shape", "dtype", "exit", "kill")


class FaultyError(RuntimeError):
    """What a `FaultyGymEnv` raises; its arguments are not a plain message, as those of many errors are not."""

    def __init__(self, lane: int, step: int) -> None:
        super().__init__(lane, step)
        self.lane, self.step = lane, step

    def __str__(self) -> str:
        return f"the env of lane {self.lane} fails at step {self.step}, as it was told"


class FaultyGymEnv(CountingGymEnv):
    """A counting env that fails once, in its `at`-th step (or reset, counted from 1) altogether.

    Args:
        fault: "raise" an error; "hang" for `seconds`; give "nan" in the observation or "nan_reward"; an observation of
            another "shape" or "dtype"; "exit" the process; "kill" it by SIGKILL.
        at: in which call.
        where: "step", "reset" or "init".
        seconds: how long to hang.
        options: as for `CountingGymEnv`.
    """

    def __init__(
        self, fault: str = "raise", at: int = 3, where: str = "step", seconds: float = 3600.0, **options: Any
    ) -> None:
        if fault not in FAULTS:
            raise ValueError(f"fault must be one of {FAULTS}, got {fault!r}.")
        super().__init__(**options)
        self.fault, self.at, self.where, self.seconds = fault, at, where, seconds
        self.calls = {"step": 0, "reset": 0, "init": 0}
        self._is_due("init")

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Reset, or fail."""
        observation, info = super().reset(**options)
        return self._spoil(observation) if self._is_due("reset") else observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step, or fail."""
        observation, reward, terminated, truncated, info = super().step(action)
        if self._is_due("step"):
            reward = float("nan") if self.fault == "nan_reward" else reward
            observation = self._spoil(observation)
        return observation, reward, terminated, truncated, info

    def _is_due(self, where: str) -> bool:
        """Count the call; do what ends it, and tell whether its result must be spoilt."""
        self.calls[where] += 1
        if where != self.where or self.calls[where] != self.at:
            return False
        if self.fault == "raise":
            raise FaultyError(self.lane, self.calls[where])
        if self.fault == "hang":
            time.sleep(self.seconds)
        elif self.fault == "exit":
            os._exit(3)
        elif self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    def _spoil(self, observation: Any) -> Any:
        if self.fault == "nan":
            return np.full_like(observation, np.nan)
        if self.fault == "shape":
            return np.zeros((observation.shape[0] + 1,), observation.dtype)
        if self.fault == "dtype":
            return np.array(["not", "a", "number"])
        return observation
