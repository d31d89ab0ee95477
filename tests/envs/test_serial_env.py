"""SerialEnv: several envs as one."""

from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from space_zoo import UnmergedGymEnv

from swath.envs import EnvBase, GymEnv, SerialEnv
from swath.testing import CountingEnv, CountingGymEnv, counting_envs


def test_one_factory_for_all() -> None:
    env = SerialEnv(4, lambda: GymEnv("CartPole-v1"))
    assert env.batch_size == (4,)
    assert env.rollout(50, break_when_any_done=False).shape == (4, 50)
    assert repr(env) == "SerialEnv(4, GymEnv(CartPole-v1, batch_size=[]))"


@pytest.mark.parametrize("inner", [GymEnv, UnmergedGymEnv])
def test_children_with_lanes_of_their_own(inner: type[GymEnv]) -> None:
    def make(first: int) -> EnvBase:
        lanes = iter(range(first, first + 3))
        return inner(lambda: CountingGymEnv(next(lanes), lengths=[[3, 1], [4], [2], [3], [5], [1]]), num_envs=3)

    env = SerialEnv(2, [partial(make, 0), partial(make, 3)])
    assert env.batch_size == (2, 3)
    td = env.rollout(6, break_when_any_done=False)
    assert td.shape == (2, 3, 6)
    assert td["observation"][..., 0, 0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert td["observation"][0, 0, :, 2].tolist() == [0, 1, 2, 0, 0, 1]
    assert td["observation"][1, 1, :, 2].tolist() == [0, 1, 2, 3, 4, 0]


def test_nested_in_each_other() -> None:
    env = SerialEnv(2, lambda: SerialEnv(3, lambda: CountingEnv((2,), lengths=[[2, 3], [4]])))
    assert env.batch_size == (2, 3, 2)
    td = env.rollout(6, break_when_any_done=False)
    steps = td["observation"][..., 2]
    assert steps[:, :, 0].eq(torch.tensor([0.0, 1, 0, 1, 2, 0])).all()
    assert steps[:, :, 1].eq(torch.tensor([0.0, 1, 2, 3, 0, 1])).all()


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_merged_lanes_do_what_separate_envs_do(name: str) -> None:
    def run(inner: type[GymEnv]) -> Any:
        env = SerialEnv(3, lambda: inner(name, max_episode_steps=9))
        assert env.is_merged == (inner is GymEnv)
        env.set_seed(4)
        first = env.rollout(30, break_when_any_done=False)
        env.set_seed(5, static_seed=True)
        return torch.cat([first, env.rollout(12, break_when_any_done=False)], -1)

    assert (run(GymEnv) == run(UnmergedGymEnv)).all()


def test_seeds_belong_to_lanes_however_they_are_spread() -> None:
    def firsts(env: EnvBase) -> torch.Tensor:
        env.set_seed(13)
        return torch.cat([env.reset()["observation"].reshape(4, 4), env.reset()["observation"].reshape(4, 4)])

    expected = firsts(GymEnv("CartPole-v1", num_envs=4))
    assert len(expected.unique(dim=0)) == 8
    for env in (
        SerialEnv(4, lambda: GymEnv("CartPole-v1")),
        SerialEnv(4, lambda: UnmergedGymEnv("CartPole-v1")),
        SerialEnv(2, lambda: GymEnv("CartPole-v1", num_envs=2)),
        SerialEnv(2, lambda: GymEnv(SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2))),
        SerialEnv(2, lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1"))),
    ):
        assert torch.equal(firsts(env), expected), env


def test_a_static_seed_makes_all_lanes_alike() -> None:
    env = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
    assert env.set_seed(2, static_seed=True) == 2
    assert len(env.reset()["observation"].unique(dim=0)) == 1


SHARED = CountingGymEnv()
SHARED_VECTOR = SyncVectorEnv(counting_envs(2))
SHARED_ENV = CountingEnv()


@pytest.mark.parametrize(
    "given",
    [SHARED, lambda: SHARED, lambda: GymEnv(SHARED), lambda: GymEnv(SHARED_VECTOR), SHARED_ENV, lambda: SHARED_ENV],
)
def test_the_same_env_twice_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="same env was given twice"):
        SerialEnv(2, given)


def test_closing_closes_all() -> None:
    inner = [CountingGymEnv(), CountingGymEnv()]
    SerialEnv(2, [partial(GymEnv, one) for one in inner]).close()
    assert all(one.is_closed for one in inner)
