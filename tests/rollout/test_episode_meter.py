"""EpisodeMeter against adding up one frame after the other."""

from typing import Any
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from swath.rollout import stats as rollout_stats
from swath.rollout.stats import RECENT_EPISODES, SMALL, EpisodeMeter, RolloutStats


class OneByOne:
    """The same, frame by frame."""

    def __init__(self, lanes: int) -> None:
        self.running = [(0.0, 0)] * lanes
        self.ended: list[tuple[float, int]] = []

    def measure(self, reward: np.ndarray, done: np.ndarray, real: np.ndarray) -> None:
        for t in range(done.shape[1]):
            for lane in range(len(done)):
                if real[lane, t]:
                    total, length = self.running[lane]
                    self.running[lane] = (total + float(reward[lane, t]), length + 1)
                if done[lane, t]:
                    self.ended.append(self.running[lane])
                    self.running[lane] = (0.0, 0)


@st.composite
def slots(draw: Any, lanes: int, idles: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whole rewards, so that sums are exact in any order; idle places only where nothing ends."""
    steps = draw(st.integers(1, 6))
    size = lanes * steps

    def array(element: st.SearchStrategy[Any]) -> np.ndarray:
        return np.array(draw(st.lists(element, min_size=size, max_size=size))).reshape(lanes, steps)

    rewards = array(st.integers(-99, 99) | st.sampled_from([float("nan"), float("inf"), 1e30])).astype(np.float32)
    done = array(st.booleans())
    real = array(st.booleans()) | done if idles else np.ones((lanes, steps), dtype=bool)
    return rewards, done, real


@settings(max_examples=100, deadline=None)
@given(data=st.data(), lanes=st.integers(1, 4), idles=st.booleans(), small=st.sampled_from([0, 8, SMALL]))
def test_returns_and_lengths_are_those_added_up_one_by_one(data: Any, lanes: int, idles: bool, small: int) -> None:
    """For slots that count as `small`, and for those that do not."""
    meter, plain, stats = EpisodeMeter(lanes), OneByOne(lanes), RolloutStats()
    for _ in range(data.draw(st.integers(1, 4))):
        reward, done, real = data.draw(slots(lanes, idles))
        with mock.patch.object(rollout_stats, "SMALL", small):
            meter.measure(reward, done, real if idles else None, stats)
        plain.measure(reward, done, real)
        if data.draw(st.booleans()):
            chosen = data.draw(st.lists(st.integers(0, lanes - 1), unique=True))
            meter.forget(chosen)
            for lane in chosen:
                plain.running[lane] = (0.0, 0)
        np.testing.assert_array_equal(meter.lengths, [length for _, length in plain.running])
        np.testing.assert_allclose(meter.returns, [total for total, _ in plain.running], rtol=1e-12)
    assert stats.episodes == len(plain.ended)
    np.testing.assert_array_equal(stats.lengths, [length for _, length in plain.ended][-RECENT_EPISODES:])
    np.testing.assert_allclose(stats.returns, [total for total, _ in plain.ended][-RECENT_EPISODES:], rtol=1e-12)


def test_a_nan_or_a_huge_reward_spoils_only_its_own_episode() -> None:
    meter, stats = EpisodeMeter(1), RolloutStats()
    reward = np.array([[1, np.nan, 1, 1, 1e30, 1, 1, np.inf, 2, 1]], dtype=np.float32)
    done = np.array([[0, 1, 0, 1, 1, 0, 1, 1, 0, 0]], dtype=bool)
    meter.measure(reward, done, None, stats)
    meter.measure(np.ones((1, 1)), np.ones((1, 1), dtype=bool), None, stats)
    assert np.isnan(stats.returns[0])
    assert [float(np.float32(r)) for r in list(stats.returns)[1:]] == [2, float(np.float32(1e30)), 2, np.inf, 4]


def test_the_summary_is_over_recent_episodes() -> None:
    meter, stats = EpisodeMeter(1), RolloutStats()
    assert "mean_return" not in stats.summary()
    for reward in (5.0, 1.0):
        meter.measure(np.full((1, RECENT_EPISODES), reward), np.ones((1, RECENT_EPISODES), dtype=bool), None, stats)
    summary = stats.summary()
    assert summary["mean_return"] == 1.0
    assert summary["mean_length"] == 1.0
    assert summary["episodes"] == 2 * RECENT_EPISODES
