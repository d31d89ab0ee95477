"""All envs do what the conformance suite asks."""

from collections.abc import Callable
from functools import partial

import gymnasium as gym
import pytest
import torch
from forked_envs import ForkedVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from space_zoo import UnmergedGymEnv

from swath.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv
from swath.testing import CountingEnv, CountingGymEnv, EnvConformance, counting_envs

short = partial(gym.make, "CartPole-v1", max_episode_steps=6)

ENVS: dict[str, Callable[[], EnvBase]] = {
    "one gymnasium env": lambda: GymEnv("CartPole-v1"),
    "categorical actions": lambda: GymEnv("CartPole-v1", categorical_action_encoding=True),
    "continuous actions": lambda: GymEnv("Pendulum-v1", max_episode_steps=8),
    "several lanes": lambda: GymEnv("CartPole-v1", num_envs=3),
    "discrete observations": lambda: GymEnv("Taxi-v4", num_envs=2, max_episode_steps=7),
    "SerialEnv": lambda: SerialEnv(3, lambda: GymEnv("Pendulum-v1", max_episode_steps=7)),
    "SerialEnv of other envs": lambda: SerialEnv(2, lambda: UnmergedGymEnv("CartPole-v1", num_envs=2)),
    "vector env, next step": lambda: GymEnv(SyncVectorEnv([short] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)),
    "vector env, same step": lambda: GymEnv(SyncVectorEnv([short] * 3, autoreset_mode=AutoresetMode.SAME_STEP)),
    "vector env, disabled": lambda: GymEnv(SyncVectorEnv([short] * 3, autoreset_mode=AutoresetMode.DISABLED)),
    "async vector env": lambda: GymEnv(ForkedVectorEnv([short] * 2)),
    "ParallelEnv": lambda: ParallelEnv(3, lambda: GymEnv("Pendulum-v1", max_episode_steps=7)),
    "ParallelEnv with shared processes": lambda: ParallelEnv(
        3, lambda: UnmergedGymEnv("CartPole-v1", num_envs=2), envs_per_worker=2
    ),
}
COUNTING: dict[str, Callable[[], EnvBase]] = {
    "counting env": CountingEnv,
    "counting batch": lambda: CountingEnv((3,)),
    "counting grid": lambda: CountingEnv((2, 3), kind="dict"),
    "dict observations": lambda: SerialEnv(2, counting_envs(2, kind="dict")),
    "pixels": lambda: GymEnv(partial(CountingGymEnv, kind="pixels", truncate=True), num_envs=2),
    "SerialEnv of custom envs": lambda: SerialEnv(3, lambda: CountingEnv(lengths=[3, 1, 4])),
    "ParallelEnv of custom envs": lambda: ParallelEnv(2, lambda: CountingEnv((2,), kind="dict")),
}


@pytest.mark.parametrize("name", [*ENVS, *COUNTING])
class TestEveryEnv(EnvConformance):
    @pytest.fixture(autouse=True)
    def choose(self, name: str) -> None:
        self.name, self.counts_episodes = name, name in COUNTING

    def make_env(self) -> EnvBase:
        return {**ENVS, **COUNTING}[self.name]()


def test_pixels_stay_bytes() -> None:
    assert COUNTING["pixels"]().reset()["observation"].dtype == torch.uint8
