"""Rewards are numbers, or arrays of one number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from swath.envs import GymEnv
from swath.errors import ShapeError
from swath.testing import CountingGymEnv


class Paying(CountingGymEnv):
    """Gives a certain reward."""

    def __init__(self, reward: Any) -> None:
        super().__init__()
        self.reward = reward

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, self.reward, *rest


@pytest.mark.parametrize("reward", [2, 2.0, np.float64(2), np.array(2.0), np.array([2.0]), [2.0], np.array([[2]])])
def test_one_number_however_it_is_given(reward: Any) -> None:
    assert GymEnv(Paying(reward)).rollout(3)["next", "reward"].flatten().tolist() == [2.0] * 3


def test_several_numbers_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"lane 0 gave 'reward' of shape \(2,\)"):
        GymEnv(Paying(np.ones(2))).rollout(1)


def test_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match="'much', which is no number"):
        GymEnv(Paying("much")).rollout(1)
