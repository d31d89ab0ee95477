"""Random actions lie in their space, cover it evenly, and follow the seed."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from space_zoo import SPACES, PlaybackEnv

from swath.envs import GymEnv
from swath.envs.spaces import ActionCodec

MANY = 20_000

pytestmark = pytest.mark.filterwarnings("ignore:.*Casting input x:UserWarning")


def drawn(space: gs.Space[Any], *, categorical: bool = True, seed: int = 0, count: int = MANY) -> dict[Any, np.ndarray]:
    codec = ActionCodec(space, categorical)
    generator = torch.Generator().manual_seed(seed)
    values = codec.draw(codec.leaves, count // 2, 2, generator)
    return {key: value.reshape(count, *value.shape[2:]).numpy() for key, value in values.items()}


def assert_even(counts: np.ndarray) -> None:
    """A chi-square test at one in a thousand (Wilson and Hilferty's formula for the limit)."""
    expected = counts.sum() / len(counts)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit, (statistic, limit, counts)


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("name", SPACES)
def test_random_actions_are_accepted(name: str, categorical: bool) -> None:
    playback = PlaybackEnv(action_space=SPACES[name])
    env = GymEnv(playback, categorical_action_encoding=categorical)
    env.set_seed(0)
    env.rollout(30, break_when_any_done=False)
    assert len(playback.acts) == 30
    assert all(SPACES[name].contains(act) for act in playback.acts)


@pytest.mark.parametrize("categorical", [False, True])
def test_discrete_values_are_even(categorical: bool) -> None:
    values = drawn(gs.Discrete(7, start=2), categorical=categorical)["action"]
    indices = values if categorical else values.argmax(1)
    assert categorical or (values.sum(1) == 1).all()
    assert_even(np.bincount(indices, minlength=7))


@pytest.mark.parametrize("categorical", [False, True])
def test_each_of_several_discrete_values_is_even_and_independent(categorical: bool) -> None:
    values = drawn(gs.MultiDiscrete([3, 4]), categorical=categorical)["action"]
    if not categorical:
        values = np.stack([values[:, :3].argmax(1), values[:, 3:].argmax(1)], 1)
    assert_even(np.bincount(4 * values[:, 0] + values[:, 1], minlength=12))


def test_binary_values_are_even_and_independent() -> None:
    values = drawn(gs.MultiBinary(3))["action"].astype(int)
    assert_even(np.bincount(values @ [1, 2, 4], minlength=8))


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        (-3, 4, np.int8),
        (0, 9, np.uint8),
        (-5, -1, np.int64),
        (0, 1, np.bool_),
        (250, 255, np.uint8),
        (0, 255, np.uint8),
    ],
)
def test_integers_between_bounds_are_even(low: int, high: int, dtype: Any) -> None:
    space = gs.Box(low, high, (2,), dtype)
    values = drawn(space)["action"]
    assert values.dtype == dtype
    for component in values.astype(np.int64).T:
        assert_even(np.bincount(component - low, minlength=high - low + 1))


def test_reals_between_bounds_are_even() -> None:
    values = drawn(gs.Box(np.array([-2.0, 10.0], np.float32), np.array([2.0, 11.0], np.float32)))["action"]
    for component, low, high in zip(values.T, (-2, 10), (2, 11), strict=True):
        assert_even(np.histogram(component, bins=20, range=(low, high))[0])


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int32, np.int64])
@pytest.mark.parametrize(("low", "high"), [(-np.inf, np.inf), (2, np.inf), (-np.inf, -3), (-1, 1)])
def test_without_bounds_gymnasiums_distributions_are_used(kind: Any, low: float, high: float) -> None:
    space = gs.Box(low, high, (2,), dtype=kind)
    values = drawn(space)["action"]
    assert all(space.contains(row) for row in values[:100])
    expected = gs.Box(low, high, (MANY,), dtype=kind, seed=0).sample()
    scale = float(expected.std())
    np.testing.assert_allclose(values.mean(0), expected.mean(), atol=5 * scale / math.sqrt(MANY))
    np.testing.assert_allclose(values.std(0), scale, rtol=0.05)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_the_whole_range_of_an_integer_type(dtype: Any) -> None:
    info = np.iinfo(dtype)
    values = drawn(gs.Box(info.min, info.max, (1,), dtype))["action"][:, 0]
    quarters = (values.astype(np.float64) - float(info.min)) / (float(info.max) - float(info.min)) * 4
    assert_even(np.bincount(quarters.astype(int).clip(0, 3), minlength=4))


def test_a_box_of_one_point() -> None:
    assert (drawn(gs.Box(0.1, 0.1, (2,), np.float64), count=100)["action"] == 0.1).all()


def test_the_seed_decides() -> None:
    def acts(seed: int | None) -> torch.Tensor:
        env = GymEnv("Pendulum-v1", num_envs=3)
        if seed is not None:
            env.set_seed(seed)
        return torch.stack([env.rand_action()["action"] for _ in range(5)])

    assert torch.equal(acts(1), acts(1))
    assert not torch.equal(acts(1), acts(2))
    torch.manual_seed(7)
    first = acts(None)
    torch.manual_seed(7)
    assert torch.equal(first, acts(None))
    assert len(acts(1).flatten().unique()) == 15, "lanes or steps share their numbers"
