"""Stepping past gymnasium's own wrappers where they have nothing to do.

NOTE [Past wrappers]: `gym.make` puts three wrappers around an env. PassiveEnvChecker looks at the first steps,
OrderEnforcing wants a reset before them, and TimeLimit counts. Once an env was reset and its first steps were looked
at, only the counting is left, and yet each step goes through all three: half a microsecond, which is much beside an env
that takes six. So lanes step what is inside, and count in TimeLimit's stead, in TimeLimit's own attributes: whoever
asks the env finds the same in it. Resets go through all wrappers, and with each of them it is looked at anew what can
be passed: not the checker in an env's first episode, nor wrappers of anybody else, nor what is inside of those.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

STEPS: dict[type, Any] = {kind: kind.step for kind in (OrderEnforcing, PassiveEnvChecker, TimeLimit)}
"""The wrappers that can be passed, and what their steps do, unless they are given others."""


def way_into(env: gym.Env[Any, Any]) -> tuple[gym.Env[Any, Any], Any]:
    """What to step instead of `env`, which was just reset, and the TimeLimit whose steps have to be counted, if any."""
    inside: Any = env
    limit: Any = None
    # The bound method tells of a step that the wrapper, or its class, was given. (To look into the wrapper's `__dict__`
    # would make Python store its attributes in another way, which is slower from then on.)
    while (known := STEPS.get(type(inside))) is not None and getattr(inside.step, "__func__", None) is known:
        if type(inside) is TimeLimit:
            if limit is not None:
                break
            limit = inside
        elif type(inside) is PassiveEnvChecker:
            # `checked_data_reuse` came with gymnasium 1.3.
            if not inside.checked_step or not getattr(inside, "checked_data_reuse", True):
                break
        elif not inside._has_reset:
            break
        inside = inside.env
    return inside, limit


def is_gymnasiums(env: Any) -> bool:
    """Whether `env` is one of those that come with gymnasium, as `gym.make` makes it, and steps as these do."""
    while (known := STEPS.get(type(env))) is not None and getattr(env.step, "__func__", None) is known:
        env = env.env
    step = getattr(env.step, "__func__", None)
    if step is not type(env).step or not type(env).__module__.startswith("gymnasium.envs."):
        return False
    home = getattr(step, "__globals__", {}).get("__name__", "")
    return str(home).startswith("gymnasium.envs.")  # it was not put there by somebody else
