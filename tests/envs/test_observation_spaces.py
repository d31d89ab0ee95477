"""Every space as an observation: what the env told arrives, encoded as promised."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from space_zoo import SPACES, PlaybackEnv, leaves, one, several, slowly_encoded, vector

from swath.envs import GymEnv, SerialEnv
from swath.errors import ShapeError, UnsupportedSpaceError
from swath.keys import NEXT


@pytest.mark.parametrize("make", [one, several, vector])
@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("name", SPACES)
def test_what_the_env_told_arrives(name: str, categorical: bool, make: Any) -> None:
    space = SPACES[name]
    env, playbacks = make(space, categorical_action_encoding=categorical)
    td = env.rollout(7, break_when_any_done=False)  # over the end of an episode of 4
    for lane, playback in enumerate(playbacks):
        seen = td[lane] if env.batch_size else td
        roots = [*playback.told[:4], *playback.told[5:8]]
        nexts = [*playback.told[1:5], *playback.told[6:9]]
        for source, values in ((seen, roots), (seen.get(NEXT), nexts)):
            for step, value in enumerate(values):
                for key, (leaf, part) in leaves(space, value, "observation").items():
                    expected = slowly_encoded(leaf, part, one_hot=not categorical)
                    assert source.get(key)[step].tolist() == expected, (key, step)
                    if isinstance(leaf, gs.Box):
                        assert source.get(key).dtype == torch.from_numpy(np.empty(0, leaf.dtype)).dtype


@pytest.mark.parametrize(
    ("space", "key"),
    [
        (gs.Box(0, 255, (8, 9, 3), np.uint8), "pixels"),
        (gs.Box(0, 255, (8, 9, 4), np.uint8), "observation"),
        (gs.Box(0, 255, (3, 8, 9), np.uint8), "observation"),
        (gs.Box(0, 254, (8, 9, 3), np.uint8), "observation"),
        (gs.Box(0, 255, (8, 3), np.uint8), "observation"),
        (gs.Box(-1, 1, (4,), np.float32), "observation"),
        (gs.Dict({"camera": gs.Box(0, 255, (8, 9, 3), np.uint8)}), "camera"),
    ],
)
def test_rgb_images_are_pixels(space: gs.Space[Any], key: str) -> None:
    env, [playback] = one(space)
    assert env.observation_keys == [key]
    td = env.reset()
    assert td[key].dtype == (torch.float32 if key == "observation" and td[key].ndim == 1 else torch.uint8)
    told = playback.told[0]["camera"] if isinstance(space, gs.Dict) else playback.told[0]
    np.testing.assert_array_equal(td[key].numpy(), told)


@pytest.mark.parametrize(
    "space",
    [
        gs.Text(5),
        gs.Graph(gs.Box(0, 1, (2,)), gs.Discrete(3)),
        gs.Sequence(gs.Discrete(3)),
        gs.OneOf((gs.Discrete(2), gs.Box(0, 1, (2,)))),
        gs.Box(0, 1, (2,), np.longdouble),
    ],
    ids=lambda space: type(space).__name__,
)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("role", ["observation_space", "action_space"])
def test_spaces_that_no_tensor_holds_are_refused(space: gs.Space[Any], inside: bool, role: str) -> None:
    if inside:
        space = gs.Dict({"plain": gs.Discrete(2), "odd": space})
    with pytest.raises(UnsupportedSpaceError) as caught:
        GymEnv(PlaybackEnv(**{role: space}))
    text = str(caught.value)
    assert ("odd" if inside else role.split("_")[0]) in text
    assert "gymnasium.wrappers" in text


def test_an_empty_space_is_refused() -> None:
    with pytest.raises(UnsupportedSpaceError, match="empty"):
        GymEnv(PlaybackEnv(gs.Dict({})))


def test_an_array_of_another_byte_order_is_refused() -> None:
    with pytest.raises(UnsupportedSpaceError, match="DtypeObservation"):
        GymEnv(PlaybackEnv(gs.Box(0, 1, (2,), np.dtype(">f4"))))


@pytest.mark.parametrize("name", ["reward", "done", "terminated", "next", "collector", "_reset", "action"])
def test_names_that_would_overwrite_each_other_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedSpaceError, match=f"'{name}'.*another name"):
        GymEnv(PlaybackEnv(gs.Dict({name: gs.Discrete(2), "fine": gs.Discrete(2)})))


def test_an_entry_inside_the_place_of_another_is_refused() -> None:
    with pytest.raises(UnsupportedSpaceError, match=r"'arm/grip' of the action space.*'arm' of the observation space"):
        GymEnv(PlaybackEnv(gs.Dict({"arm": gs.Discrete(2)}), gs.Dict({"arm": gs.Dict({"grip": gs.Discrete(2)})})))


class Spoilt(PlaybackEnv):
    """Tells something else from its second observation on."""

    spoilt: Any = None

    def _tell(self) -> Any:
        value = super()._tell()
        return self.spoilt if len(self.told) > 1 else value


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (gs.Discrete(3, start=1), 0),
        (gs.Discrete(3, start=1), 4),
        (gs.MultiDiscrete([2, 2]), np.array([0, 2])),
        (gs.MultiDiscrete([2, 2]), np.array([-1, 0])),
    ],
)
@pytest.mark.parametrize("categorical", [False, True])
def test_discrete_values_outside_of_the_space_do_not_wrap_around(space: Any, value: Any, categorical: bool) -> None:
    playback = Spoilt(space)
    playback.spoilt = value
    env = GymEnv(playback, categorical_action_encoding=categorical)
    with pytest.raises(ValueError, match=r"'observation' = .* not in its space"):
        env.rand_step(env.reset())


@pytest.mark.parametrize("space", [gs.Box(-1, 1, (3,)), gs.MultiDiscrete([2, 2, 2])])
@pytest.mark.parametrize("given", [(4,), (3, 1), (1, 3), ()])
def test_a_wrong_shape_names_key_expected_and_given(space: gs.Space[Any], given: tuple[int, ...]) -> None:
    playback = Spoilt(space)
    playback.spoilt = np.zeros(given, space.dtype)
    env = SerialEnv(2, [lambda: GymEnv(PlaybackEnv(space)), lambda: GymEnv(playback)])
    td = env.rand_action(env.reset())
    with pytest.raises(ShapeError) as caught:
        env.step(td)
    for part in ("lane 1", "'observation'", str(given), "(3,)"):
        assert part in str(caught.value)
