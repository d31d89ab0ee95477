"""Every way in which lanes of counting envs can be given to a collector."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from gymnasium.vector import AutoresetMode, SyncVectorEnv

from swath.envs import EnvBase, GymEnv, SerialEnv
from swath.testing.counting import CountingEnv, CountingGymEnv, CountingVectorEnv, counting_envs


def _one(lanes: int, **options: Any) -> EnvBase:
    return GymEnv(CountingGymEnv(**options))


def _custom(lanes: int, **options: Any) -> EnvBase:
    return CountingEnv((lanes,), **options)


def _custom_one(lanes: int, **options: Any) -> EnvBase:
    return CountingEnv((), **options)


def _grid(lanes: int, **options: Any) -> EnvBase:
    return CountingEnv((lanes, 2), **options)


def _serial(lanes: int, **options: Any) -> EnvBase:
    return SerialEnv(lanes, [partial(GymEnv, make) for make in counting_envs(lanes, **options)])


def _serial_of_batches(lanes: int, **options: Any) -> EnvBase:
    def make(first: int) -> EnvBase:
        env = CountingEnv((2,), **options)
        env.first_lane = first
        return env

    return SerialEnv(lanes, [partial(make, 2 * index) for index in range(lanes)])


def _num_envs(lanes: int, **options: Any) -> EnvBase:
    numbers = count()
    return GymEnv(lambda: CountingGymEnv(next(numbers), **options), num_envs=lanes)


def _synchronous(mode: AutoresetMode, lanes: int, **options: Any) -> EnvBase:
    return GymEnv(SyncVectorEnv(counting_envs(lanes, **options), autoreset_mode=mode))


def _idling(lanes: int, **options: Any) -> EnvBase:
    return GymEnv(CountingVectorEnv(lanes, **options))


LAYOUTS: dict[str, Callable[..., EnvBase]] = {
    "one gymnasium env": _one,
    "one custom env": _custom_one,
    "custom batch": _custom,
    "custom grid": _grid,
    "SerialEnv": _serial,
    "SerialEnv of batches": _serial_of_batches,
    "num_envs": _num_envs,
    "SyncVectorEnv, next step": partial(_synchronous, AutoresetMode.NEXT_STEP),
    "SyncVectorEnv, same step": partial(_synchronous, AutoresetMode.SAME_STEP),
    "SyncVectorEnv, disabled": partial(_synchronous, AutoresetMode.DISABLED),
    "idling vector env": _idling,
}
"""By name: functions of `lanes` and the options of the counting envs.

Grids and nested batches have twice as many lanes, those of one env always one.
"""
