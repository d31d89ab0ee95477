"""Stepping some lanes: which envs can, and what their lanes get. The conformance suite tests that it is done well."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from space_zoo import SPACES, UnmergedGymEnv, leaves, several

from swath.envs import EnvBase, GymEnv, Rows, SerialEnv
from swath.errors import UnsupportedEnvError
from swath.testing import CountingEnv, CountingGymEnv, EnvConformance, FaultyError, FaultyGymEnv, counting_envs


def vector(lanes: int) -> GymEnv:
    return GymEnv(SyncVectorEnv([partial(gym.make, "CartPole-v1")] * lanes))


ENVS: dict[str, tuple[Callable[[], EnvBase], bool]] = {
    "one gymnasium env": (partial(GymEnv, "CartPole-v1"), True),
    "separate gymnasium envs": (partial(GymEnv, "CartPole-v1", num_envs=2), True),
    "a vector env": (partial(vector, 2), False),
    "a vector env of one lane": (partial(vector, 1), True),
    "one custom env": (CountingEnv, True),
    "a custom batch": (partial(CountingEnv, (2,)), False),
    "SerialEnv of gymnasium envs": (lambda: SerialEnv(2, CountingGymEnv), True),
    "SerialEnv of custom envs": (lambda: SerialEnv(2, CountingEnv), True),
    "SerialEnv of batches": (lambda: SerialEnv(2, lambda: CountingEnv((2,))), False),
    "SerialEnv of vector envs": (lambda: SerialEnv(2, partial(vector, 2)), False),
}


@pytest.mark.parametrize("name", ENVS)
def test_an_env_says_whether_it_can_step_single_lanes(name: str) -> None:
    make, can = ENVS[name]
    env = make()
    assert env.can_step_lanes == can
    out, action = env.new_out_rows(), Rows(env.actions.leaves, env.batch_size)
    env.reset_into(range(env.num_lanes), out)
    if can:
        assert env.step_lanes_into([0], action, out) is False
        assert out.arrays["reward"][0] == 1
    else:
        with pytest.raises(UnsupportedEnvError, match=r"steps all its lanes at once, so that lanes \[1\] cannot"):
            env.step_lanes_into([1], action, out)


@pytest.mark.filterwarnings("ignore:.*Casting input x:UserWarning")
@pytest.mark.parametrize("lanes", [[2, 0], (1,), range(1, 3), []], ids=str)
@pytest.mark.parametrize("name", SPACES)
def test_each_lane_gets_its_own_action_of_any_space(name: str, lanes: Any) -> None:
    env, playbacks = several(None, SPACES[name])
    out, action = env.new_out_rows(), Rows(env.actions.leaves, env.batch_size)
    for key, values in env.actions.draw(env.actions.leaves, 1, 3, torch.Generator().manual_seed(3)).items():
        action.tensors[key].copy_(values[0])
    env.reset_into(range(3), out)
    env.step_lanes_into(lanes, action, out)
    acts = [list(playback.acts) for playback in playbacks]
    assert [len(own) for own in acts] == [int(lane in lanes) for lane in range(3)]
    env.step_into(action, out)
    for own, playback in zip(acts, playbacks, strict=True):
        for act in own:
            again = leaves(SPACES[name], playback.acts[-1], "action")
            for key, (_, part) in leaves(SPACES[name], act, "action").items():
                np.testing.assert_array_equal(part, again[key][1])


@pytest.mark.parametrize("kind", [GymEnv, UnmergedGymEnv])
def test_an_error_names_the_lane_and_the_env(kind: type[GymEnv]) -> None:
    makers: list[Any] = counting_envs(3)
    makers[2] = partial(FaultyGymEnv, at=2, lane=2)
    env = SerialEnv(3, [partial(kind, make) for make in makers])
    out, action = env.new_out_rows(), Rows(env.actions.leaves, env.batch_size)
    env.reset_into(range(3), out)
    for lanes in ([2, 1], [0, 1]):
        assert not env.step_lanes_into(lanes, action, out)
    assert out.arrays["reward"][:, 0].tolist() == [1, 2, 1]
    with pytest.raises(FaultyError) as caught:
        env.step_lanes_into([1, 2], action, out)
    assert any("env 2 of SerialEnv" in note for note in getattr(caught.value, "__notes__", ["env 2 of SerialEnv"]))


class StepsAll(GymEnv):
    def step_lanes_into(self, lanes: Sequence[int], action: Rows, out: Rows) -> bool:
        return self.step_into(action, out)


class StepsTheWrongOnes(GymEnv):
    def step_lanes_into(self, lanes: Sequence[int], action: Rows, out: Rows) -> bool:
        return super().step_lanes_into([(lane + 1) % self.num_lanes for lane in lanes], action, out)


class ReadsOthersActions(GymEnv):
    def step_lanes_into(self, lanes: Sequence[int], action: Rows, out: Rows) -> bool:
        action.arrays["action"][:] = action.arrays["action"][::-1].copy()
        return super().step_lanes_into(lanes, action, out)


class TellsOfNoEnd(GymEnv):
    def step_lanes_into(self, lanes: Sequence[int], action: Rows, out: Rows) -> bool:
        return super().step_lanes_into(lanes, action, out) and False


@pytest.mark.parametrize("wrong", [StepsAll, StepsTheWrongOnes, ReadsOthersActions, TellsOfNoEnd])
def test_the_conformance_suite_notices(wrong: type[GymEnv]) -> None:
    def suite_of(kind: type[GymEnv]) -> EnvConformance:
        suite = EnvConformance()
        suite.make_env = lambda: kind("Pendulum-v1", num_envs=3, max_episode_steps=7)  # type: ignore[method-assign]
        return suite

    sound = suite_of(GymEnv)
    sound.test_single_lanes_step_as_in_lockstep(sound.make_env())
    with pytest.raises(AssertionError):
        suite_of(GymEnv).test_single_lanes_step_as_in_lockstep(suite_of(wrong).make_env())
