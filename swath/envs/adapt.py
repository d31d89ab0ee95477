"""Making an EnvBase of whatever a user hands over."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv
from torch import nn

from swath.envs.base import EnvBase
from swath.envs.gym import GymEnv, no_env
from swath.errors import UnsupportedEnvError, annotate


def as_env(given: Any, kwargs: dict[str, Any] | None = None) -> EnvBase:
    """`given` as an EnvBase: an EnvBase, a gymnasium env, a TorchRL env, or a factory of one of these."""
    if isinstance(given, EnvBase):
        env = given
    elif isinstance(given, gym.Env | VectorEnv):
        env = GymEnv(given)
    elif is_env(given):
        from swath.envs.torchrl import TorchRLEnv

        env = TorchRLEnv(given)
    elif callable(given):
        must_be_maker(given)
        return as_env(_made(given, kwargs or {}))
    else:
        cure = " Pass GymEnv('CartPole-v1'), a gymnasium env, or lambda: GymEnv('CartPole-v1')."
        raise no_env(given, "Expected an environment or a function that returns one, got", cure)
    if kwargs:
        raise RuntimeError(
            f"create_env_kwargs={kwargs!r} can only be given with a factory, not with an env that is made already "
            f"({env!r}). Pass a function that takes them."
        )
    return env


def is_env(given: Any) -> bool:
    """Whether `given` is an env that is made already."""
    if isinstance(given, EnvBase | gym.Env | VectorEnv):
        return True
    torchrl = sys.modules.get("torchrl.envs")  # not imported for the question: one who has an env of it has done so
    return torchrl is not None and isinstance(given, torchrl.EnvBase)


def must_be_maker(given: Any, policy: Any = None) -> None:
    """Refuse a policy where an env belongs, or an env where the policy does."""
    if (isinstance(given, nn.Module) and not is_env(given)) or is_env(policy):
        other = "" if policy is None else f", and policy {type(policy).__name__}"
        raise UnsupportedEnvError(
            "The env comes first, then the policy, as in Collector(make_env, policy, frames_per_batch=1000); here "
            f"create_env_fn is {type(given).__name__}{other}."
        )


def _made(make: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    try:
        return make(**kwargs)
    except TypeError as error:
        with contextlib.suppress(ValueError):  # a builtin without a signature
            try:
                inspect.signature(make).bind(**kwargs)
            except TypeError:
                given = f"create_env_kwargs={kwargs!r}" if kwargs else "no arguments"
                place = f"The env's factory {make!r} is called with {given}. The env comes first, then the policy."
                annotate(error, place)
        raise
