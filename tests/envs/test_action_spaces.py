"""Every space as an action: what the policy wrote is what the env gets."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from space_zoo import SPACES, leaves, one, several, slowly_encoded, vector
from tensordict import TensorDict

from swath.envs import EnvBase
from swath.errors import ShapeError

pytestmark = pytest.mark.filterwarnings("ignore:.*Casting input x:UserWarning")


def write(td: TensorDict, env: EnvBase, values: dict[Any, list[Any]], dtypes: dict[Any, torch.dtype]) -> None:
    """Set each key to the lanes' encoded values."""
    for key, lanes in values.items():
        td.set(key, torch.tensor(lanes if env.batch_size else lanes[0], dtype=dtypes[key]))


@pytest.mark.parametrize("make", [one, several, vector])
@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("name", SPACES)
def test_what_the_policy_wrote_is_what_the_env_gets(name: str, categorical: bool, make: Any) -> None:
    space = SPACES[name]
    env, playbacks = make(None, space, categorical_action_encoding=categorical)
    dtypes = {key: leaf.dtype for key, leaf in env.actions.leaves.items()}
    td = env.reset()
    space.seed(5)
    for _ in range(3):
        samples = [space.sample() for _ in playbacks]
        encoded: dict[Any, list[Any]] = {}
        for sample in samples:
            for key, (leaf, part) in leaves(space, sample, "action").items():
                encoded.setdefault(key, []).append(slowly_encoded(leaf, part, one_hot=not categorical))
        write(td, env, encoded, dtypes)
        env.step(td)
        for playback, sample in zip(playbacks, samples, strict=True):
            given = playback.acts[-1]
            assert space.contains(given), given
            for key, (_, part) in leaves(space, given, "action").items():
                np.testing.assert_array_equal(part, leaves(space, sample, "action")[key][1])


@pytest.mark.parametrize("make", [one, several, vector])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("start", [0, 4])
def test_scores_are_taken_by_the_largest(make: Any, dtype: torch.dtype, start: int) -> None:
    env, playbacks = make(None, gs.Discrete(5, start=start))
    scores = (100 * torch.randn(len(playbacks), 5, generator=torch.Generator().manual_seed(1))).to(dtype)
    td = env.reset().set("action", scores if env.batch_size else scores[0])
    env.step(td)
    for row, playback in zip(scores.tolist(), playbacks, strict=True):
        assert playback.acts[0] == start + max(range(5), key=lambda i: row[i])


@pytest.mark.parametrize("make", [one, several, vector])
def test_scores_of_several_discrete_values(make: Any) -> None:
    space = gs.MultiDiscrete([[2, 3], [1, 4]], start=[[5, 0], [1, -1]])
    env, playbacks = make(None, space)
    scores = torch.randn(len(playbacks), 10, generator=torch.Generator().manual_seed(2))
    env.step(env.reset().set("action", scores if env.batch_size else scores[0]))
    for row, playback in zip(scores.tolist(), playbacks, strict=True):
        blocks = [row[0:2], row[2:5], row[5:6], row[6:10]]
        picked = [max(range(len(block)), key=lambda i, block=block: block[i]) for block in blocks]
        np.testing.assert_array_equal(playback.acts[0], np.array(picked).reshape(2, 2) + space.start)


@pytest.mark.parametrize("make", [one, several, vector])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("trailing", [(), (1,)])
@pytest.mark.parametrize("start", [0, -3])
def test_integers_are_indices(make: Any, dtype: torch.dtype, trailing: tuple[int, ...], start: int) -> None:
    env, playbacks = make(None, gs.Discrete(4, start=start))
    indices = torch.tensor([1, 0, 1][: len(playbacks)]).to(dtype)
    env.step(env.reset().set("action", indices.view((*env.batch_size, *trailing))))
    assert [playback.acts[0] for playback in playbacks] == [start + int(i) for i in indices]


@pytest.mark.parametrize("encoded", [[0], [1]])
def test_the_only_action_is_always_meant(encoded: list[int]) -> None:
    env, [playback] = one(None, gs.Discrete(1, start=7))
    env.step(env.reset().set("action", torch.tensor(encoded)))
    assert playback.acts == [7]


@pytest.mark.parametrize(
    ("space", "expected", "given"),
    [
        (gs.Discrete(4), (4,), (3,)),
        (gs.Discrete(4), (4,), (4, 1)),
        (gs.MultiDiscrete([2, 3]), (5,), (4,)),
        (gs.MultiDiscrete([2, 3]), (5,), (5, 1)),
        (gs.MultiBinary(3), (3,), (2,)),
        (gs.Box(-1, 1, (2,)), (2,), ()),
        (gs.Box(-1, 1, (2,)), (2,), (1,)),
        (gs.Box(-1, 1, (2,)), (2,), (2, 1)),
    ],
)
@pytest.mark.parametrize("make", [one, several, vector])
def test_a_wrong_shape_names_key_expected_and_given(make: Any, space: Any, expected: Any, given: Any) -> None:
    env, _ = make(None, space)
    td = env.reset().set("action", torch.zeros((*env.batch_size, *given)))
    with pytest.raises(ShapeError) as caught:
        env.step(td)
    for part in ("'action'", str(expected), str(given), str(space)):
        assert part in str(caught.value)


@pytest.mark.parametrize("categorical", [False, True])
def test_floats_are_no_indices(categorical: bool) -> None:
    env, _ = one(None, gs.Discrete(4), categorical_action_encoding=categorical)
    with pytest.raises(ShapeError, match=r"'action' as float32 of shape \(1,\): .*action\.long\(\), or .* \(4,\)"):
        env.step(env.reset().set("action", torch.tensor([2.0])))


def test_the_encoding_may_change_between_steps() -> None:
    env, [playback] = one(None, gs.Discrete(3))
    td = env.reset()
    for action in (torch.tensor([0, 0, 1]), torch.tensor(1), torch.tensor([9.0, 0.0, 3.0]), torch.tensor([2])):
        env.step(td.set("action", action))
    assert playback.acts == [2, 1, 0, 2]


def test_discrete_actions_are_one_hot_unless_asked_otherwise() -> None:
    space = gs.Dict({"go": gs.Discrete(3), "how": gs.MultiDiscrete([2, 2])})
    plain, _ = one(None, space)
    categorical, _ = one(None, space, categorical_action_encoding=True)
    assert {key: leaf.shape for key, leaf in plain.actions.leaves.items()} == {"go": (3,), "how": (4,)}
    assert {key: leaf.shape for key, leaf in categorical.actions.leaves.items()} == {"go": (), "how": (2,)}
    assert {leaf.dtype for leaf in plain.actions.leaves.values()} == {torch.int64}
