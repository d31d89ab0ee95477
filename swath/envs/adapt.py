"""Making an EnvBase of whatever a user hands over."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

from swath.envs.base import EnvBase
from swath.envs.gym import GymEnv
from swath.errors import UnsupportedEnvError


def as_env(given: Any, kwargs: dict[str, Any] | None = None) -> EnvBase:
    """`given` as an EnvBase: an EnvBase, a gymnasium env, a TorchRL env, or a factory of one of these."""
    if isinstance(given, EnvBase):
        env = given
    elif isinstance(given, gym.Env | VectorEnv):
        env = GymEnv(given)
    elif (torchrl := sys.modules.get("torchrl.envs")) is not None and isinstance(given, torchrl.EnvBase):
        # TorchRL is not imported for the question: one who has an env of it has done so.
        from swath.envs.torchrl import TorchRLEnv

        env = TorchRLEnv(given)
    elif callable(given):
        return as_env(given(**(kwargs or {})))
    else:
        raise UnsupportedEnvError(
            f"Expected an environment or a function that returns one, got {type(given).__name__}: {given!r}. "
            "Pass GymEnv('CartPole-v1'), a gymnasium env, or lambda: GymEnv('CartPole-v1')."
        )
    if kwargs:
        raise RuntimeError(
            f"create_env_kwargs={kwargs!r} can only be given with a factory, not with an env that is made already "
            f"({env!r}). Pass a function that takes them."
        )
    return env
