"""Counting envs of every layout and kind are envs like any other, and count as they say."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
from counting_layouts import LAYOUTS

from swath.envs import EnvBase
from swath.testing import CountingGymEnv, EnvConformance, assert_frames_belong, counted
from swath.testing.counting import KINDS, counting_space, length_of


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
class TestEveryLayout(EnvConformance):
    counts_episodes = True

    @pytest.fixture(autouse=True)
    def choose(self, layout: str) -> None:
        self.layout = layout

    def make_env(self) -> EnvBase:
        return LAYOUTS[self.layout](2, lengths=[3, 5])

    def test_partial_reset_touches_only_the_lanes_asked_for(self, env: EnvBase) -> None:
        if self.layout == "idling vector env":
            pytest.skip("lanes are reset only by themselves")
        super().test_partial_reset_touches_only_the_lanes_asked_for(env)


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"idling vector env"}))
@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_of_the_env_itself_belongs(layout: str, kind: str) -> None:
    with LAYOUTS[layout](2, lengths=[3, 5], kind=kind) as env:
        rollout = env.rollout(12, break_when_any_done=False)
    assert_frames_belong(rollout)
    assert counted(rollout).shape == (*rollout.shape, 3)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [(4, [4, 4, 4, 4]), ([1, 2], [1, 2, 1, 2]), ([[1, 2], [3]], [1, 2, 3, 3])],
)
def test_lengths_are_for_all_for_every_lane_or_for_each(lengths: Any, expected: list[int]) -> None:
    assert [length_of(lengths, lane, episode) for lane in (0, 1) for episode in (0, 1)] == expected


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind must be one of"):
        counting_space("words")
    with pytest.raises(ValueError, match="kind must be one of"):
        CountingGymEnv(kind="words")


@pytest.mark.parametrize("kind", KINDS)
def test_observations_lie_in_their_space(kind: str) -> None:
    env = CountingGymEnv(kind=kind)
    observation, _ = env.reset()
    assert observation in env.observation_space
    assert env.step(0)[0] in env.observation_space


def test_envs_come_without_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that only step them took longer to import it than for all the rest of their start."""
    monkeypatch.setattr("swath.testing", sys.modules["swath.testing"])
    for name in [name for name in sys.modules if name.startswith("swath.testing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pytest", None)
    assert importlib.import_module("swath.testing").CountingEnv
