"""All envs do what the conformance suite asks."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from forked_envs import ForkedVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from swath.envs import EnvBase, GymEnv, SerialEnv
from swath.testing import CountingEnv, CountingGymEnv, EnvConformance, counting_envs


class TestOneGymEnv(EnvConformance):
    def make_env(self) -> EnvBase:
        return GymEnv("CartPole-v1")


class TestCategoricalActions(EnvConformance):
    def make_env(self) -> EnvBase:
        return GymEnv("CartPole-v1", categorical_action_encoding=True)


class TestContinuousActions(EnvConformance):
    def make_env(self) -> EnvBase:
        return GymEnv("Pendulum-v1", max_episode_steps=8)


class TestSeveralLanes(EnvConformance):
    def make_env(self) -> EnvBase:
        return GymEnv("CartPole-v1", num_envs=3)


class TestDiscreteObservations(EnvConformance):
    def make_env(self) -> EnvBase:
        return GymEnv("Taxi-v4", num_envs=2, max_episode_steps=7)


class TestSerialEnv(EnvConformance):
    def make_env(self) -> EnvBase:
        return SerialEnv(3, lambda: GymEnv("Pendulum-v1", max_episode_steps=7))


class OtherGymEnv(GymEnv):
    """One that SerialEnv does not look into."""


class TestSerialEnvOfOtherEnvs(EnvConformance):
    def make_env(self) -> EnvBase:
        return SerialEnv(2, lambda: OtherGymEnv("CartPole-v1", num_envs=2))


def short() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1", max_episode_steps=6)


class TestVectorEnvNextStep(EnvConformance):
    def make_env(self) -> EnvBase:
        return GymEnv(SyncVectorEnv([short] * 3, autoreset_mode=AutoresetMode.NEXT_STEP))


class TestVectorEnvSameStep(EnvConformance):
    def make_env(self) -> EnvBase:
        return GymEnv(SyncVectorEnv([short] * 3, autoreset_mode=AutoresetMode.SAME_STEP))


class TestVectorEnvDisabled(EnvConformance):
    def make_env(self) -> EnvBase:
        return GymEnv(SyncVectorEnv([short] * 3, autoreset_mode=AutoresetMode.DISABLED))


class TestAsyncVectorEnv(EnvConformance):
    def make_env(self) -> EnvBase:
        return GymEnv(ForkedVectorEnv([short] * 2))


class TestCountingEnv(EnvConformance):
    counts_episodes = True

    def make_env(self) -> EnvBase:
        return CountingEnv()


class TestCountingBatch(EnvConformance):
    counts_episodes = True

    def make_env(self) -> EnvBase:
        return CountingEnv((3,))


class TestCountingGrid(EnvConformance):
    counts_episodes = True

    def make_env(self) -> EnvBase:
        return CountingEnv((2, 3), kind="dict")


class TestDictObservations(EnvConformance):
    counts_episodes = True

    def make_env(self) -> EnvBase:
        return SerialEnv(2, counting_envs(2, kind="dict"))


class TestPixels(EnvConformance):
    counts_episodes = True

    def make_env(self) -> EnvBase:
        return GymEnv(partial(CountingGymEnv, kind="pixels", truncate=True), num_envs=2)

    def test_pixels_stay_bytes(self, env: EnvBase) -> None:
        assert env.reset()["observation"].numpy().dtype == np.uint8
