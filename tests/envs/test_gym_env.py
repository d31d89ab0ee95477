"""GymEnv: by name, from an instance, from a factory, once or several times."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

from swath.envs import GymEnv
from swath.errors import ShapeError, UnsupportedEnvError
from swath.keys import NEXT
from swath.seeding import lane_seeds
from swath.testing import CountingGymEnv, counting_envs


def test_by_name() -> None:
    with GymEnv("CartPole-v1") as env:
        assert env.batch_size == ()
        td = env.rand_step(env.reset())
        assert td["observation"].shape == (4,)
        assert td["action"].shape == (2,)
        assert td[NEXT, "reward"].shape == (1,)
        assert td["done"].dtype == torch.bool
        assert repr(env) == "GymEnv(CartPole-v1, batch_size=[])"


def test_further_arguments_go_to_make() -> None:
    env = GymEnv("CartPole-v1", max_episode_steps=3, sutton_barto_reward=True)
    td = env.rollout(10)
    assert td.shape == (3,)
    assert td[NEXT, "truncated"][-1]
    assert not td[NEXT, "reward"].any()


def test_an_instance_is_used_as_it_is() -> None:
    inner = gym.make("CartPole-v1")
    env = GymEnv(inner)
    assert env.gym_envs == [inner]
    assert env.vector_env is None
    assert "CartPole-v1" in repr(env)


def test_a_factory_is_called_once_per_lane() -> None:
    made = []

    def make(**options: Any) -> gym.Env[Any, Any]:
        made.append(CountingGymEnv(lane=len(made), **options))
        return made[-1]

    env = GymEnv(make, num_envs=3, lengths=2)
    assert len(made) == 3
    assert env.rollout(5).shape == (3, 2)
    assert env.reset()["observation"][:, 0].tolist() == [0, 1, 2]


def test_a_class_is_a_factory() -> None:
    assert GymEnv(CountingGymEnv, lengths=4).rollout(9).shape == (4,)


@pytest.mark.parametrize(("num_envs", "batch"), [(0, ()), (1, (1,)), (4, (4,))])
def test_num_envs_is_the_batch_dimension(num_envs: int, batch: tuple[int, ...]) -> None:
    env = GymEnv("Pendulum-v1", num_envs=num_envs)
    td = env.rollout(3)
    assert env.batch_size == batch
    assert td.shape == (*batch, 3)
    assert td["action"].shape == (*batch, 3, 1)


def test_lanes_are_what_gymnasium_says_with_the_lanes_seeds() -> None:
    env = GymEnv("CartPole-v1", num_envs=3)
    env.set_seed(11)
    first = env.reset()["observation"]
    for lane, seed in enumerate(lane_seeds(11, 3)):
        expected, _ = gym.make("CartPole-v1").reset(seed=seed)
        np.testing.assert_array_equal(first[lane].numpy(), expected)


def test_one_env_behaves_as_gymnasiums_with_the_same_seed() -> None:
    env = GymEnv("Pendulum-v1")
    env.set_seed(5)
    td = env.rollout(20)
    inner = gym.make("Pendulum-v1")
    seen, _ = inner.reset(seed=5)
    for step in range(20):
        np.testing.assert_array_equal(td["observation"][step].numpy(), seen)
        seen, reward, *_ = inner.step(td["action"][step].numpy())
        np.testing.assert_allclose(td[NEXT, "reward"][step].item(), reward, rtol=1e-6)
        np.testing.assert_array_equal(td[NEXT, "observation"][step].numpy(), seen)


def test_frame_skip_repeats_actions_and_adds_up_rewards() -> None:
    inner = CountingGymEnv(lengths=7)
    td = GymEnv(inner, frame_skip=3).rollout(10)
    assert td["observation"][:, 2].tolist() == [0, 3, 6]
    assert td[NEXT, "observation"][:, 2].tolist() == [3, 6, 7]
    assert td[NEXT, "reward"][:, 0].tolist() == [1 + 2 + 3, 4 + 5 + 6, 7]
    acts = [int(action.argmax()) for action in td["action"]]
    assert inner.actions == [acts[0]] * 3 + [acts[1]] * 3 + [acts[2]]


@pytest.fixture
def without_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


@pytest.mark.usefixtures("without_a_screen")
@pytest.mark.parametrize("only", [False, True])
def test_from_pixels(only: bool) -> None:
    with GymEnv("CartPole-v1", from_pixels=True, pixels_only=only, num_envs=2) as env:
        td = env.rollout(6)
        assert set(env.observation_keys) == ({"pixels"} if only else {"observation", "pixels"})
        assert td["pixels"].shape == (2, 6, 400, 600, 3)
        assert td["pixels"].dtype == torch.uint8
        assert not torch.equal(td["pixels"][:, 0], td[NEXT, "pixels"][:, -1])


@pytest.mark.usefixtures("without_a_screen")
def test_from_pixels_and_frame_skip_show_what_is_there_after_the_last_repetition() -> None:
    with GymEnv("CartPole-v1", from_pixels=True, frame_skip=4) as env:
        td = env.rand_step(env.reset())
        np.testing.assert_array_equal(td[NEXT, "pixels"].numpy(), env.gym_envs[0].render())


def shared() -> gym.Env[Any, Any]:
    return SHARED


def wrapped() -> gym.Env[Any, Any]:
    return gym.wrappers.TimeLimit(SHARED, 10)


SHARED = CountingGymEnv()


@pytest.mark.parametrize("make", [shared, wrapped])
def test_the_same_env_in_two_lanes_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"same env was given twice.*lambda: gymnasium\.make"):
        GymEnv(make, num_envs=2)


def two() -> Any:
    return SyncVectorEnv(counting_envs(2))


@pytest.mark.parametrize(
    ("env", "options", "error", "told"),
    [
        (CountingGymEnv(), {"render_mode": "human"}, TypeError, r"takes no further arguments: \['render_mode'\]"),
        (CountingGymEnv(), {"num_envs": 2}, ValueError, "num_envs=2 needs a name or a factory"),
        ("CartPole-v1", {"num_envs": -1}, ValueError, "num_envs must be 0"),
        ("CartPole-v1", {"frame_skip": 0}, ValueError, "frame_skip must be at least 1"),
        (lambda: 3, {}, UnsupportedEnvError, "must return a gymnasium env, not int"),
        (3, {}, UnsupportedEnvError, "got int"),
        ("NoSuchEnv-v0", {}, gym.error.NameNotFound, "NoSuchEnv"),
        (two, {"num_envs": 3}, ValueError, "num_envs=3 does not fit a vector env of 2"),
        (two, {"frame_skip": 2}, ValueError, "frame_skip and from_pixels"),
        (two(), {"from_pixels": True}, ValueError, "frame_skip and from_pixels"),
    ],
)
def test_wrong_arguments_are_refused(env: Any, options: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        GymEnv(env, **options)


def test_the_number_of_envs_may_be_that_of_a_vector_env() -> None:
    assert GymEnv(two, num_envs=2).batch_size == (2,)


def test_closing_closes_every_env() -> None:
    env = GymEnv(CountingGymEnv, num_envs=3)
    env.close()
    assert all(inner.is_closed for inner in env.gym_envs)  # type: ignore[attr-defined]


class Paying(CountingGymEnv):
    """Gives a certain reward, and flags of numpy's kind."""

    def __init__(self, reward: Any) -> None:
        super().__init__(lengths=3)
        self.reward = reward

    def step(self, action: Any) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, self.reward, np.bool_(terminated), truncated, info


@pytest.mark.parametrize(
    "reward", [2, 2.0, np.float32(2), np.float64(2), np.array(2.0), np.array([2.0]), [2.0], np.array([[2]])]
)
def test_a_reward_is_one_number_however_it_is_given(reward: Any) -> None:
    td = GymEnv(Paying(reward)).rollout(3)
    assert td[NEXT, "reward"].flatten().tolist() == [2.0] * 3
    assert td[NEXT, "terminated"][:, 0].tolist() == [False, False, True]


def test_a_reward_of_several_numbers_or_of_none_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"lane 0 gave 'reward' of shape \(2,\)"):
        GymEnv(Paying(np.ones(2))).rollout(1)
    with pytest.raises(TypeError, match="'much', which is no number"):
        GymEnv(Paying("much")).rollout(1)
