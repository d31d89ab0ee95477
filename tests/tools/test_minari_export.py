"""Minari datasets, read back with Minari itself: every value is what the env said or was told."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from tensordict import TensorDict, TensorDictBase

from swath.collectors import Collector
from swath.envs import EnvBase, GymEnv, SerialEnv
from swath.errors import ClosedError, ShapeError, UnsupportedEnvError, UnsupportedSpaceError
from swath.testing import CountingEnv, CountingGymEnv
from swath.tools import MinariWriter, minari_export, write_minari

minari = pytest.importorskip("minari")

SPACES: dict[str, gs.Space[Any]] = {
    "Box": gs.Box(-1, 1, (2,), np.float32),
    "Box float64": gs.Box(-np.inf, np.inf, (2, 3), np.float64),
    "Box of no dimension": gs.Box(-1, 1, (), np.float32),
    "Box uint8 vector": gs.Box(0, 255, (3,), np.uint8),
    "Box bool": gs.Box(0, 1, (2,), np.bool_),
    "Discrete": gs.Discrete(4),
    "Discrete from -2": gs.Discrete(3, start=-2),
    "Discrete of one": gs.Discrete(1, start=7),
    "MultiDiscrete": gs.MultiDiscrete([3, 2, 4]),
    "MultiDiscrete 2-D": gs.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, -3]]),
    "MultiDiscrete of ones": gs.MultiDiscrete([1, 1], start=[4, 5]),
    "MultiBinary": gs.MultiBinary(5),
    "MultiBinary 2-D": gs.MultiBinary((2, 3)),
    "Dict": gs.Dict({"position": gs.Box(-1, 1, (2,), np.float32), "mode": gs.Discrete(3, start=1)}),
    "Dict in Dict": gs.Dict({"arm": gs.Dict({"grip": gs.MultiBinary(2)}), "left": gs.Discrete(2)}),
    "Tuple": gs.Tuple((gs.Discrete(3, start=1), gs.Box(0, 9, (2,), np.int32))),
    "Dict in Tuple": gs.Tuple((gs.Dict({"a": gs.Discrete(2)}), gs.MultiBinary(2))),
    "Tuple in Dict": gs.Dict({"pair": gs.Tuple((gs.Discrete(2), gs.MultiDiscrete([2, 3])))}),
}
LENGTH = 4


class SamplesEnv(gym.Env[Any, Any]):
    """Gives samples of its observation space, and remembers them and the actions."""

    def __init__(self, observation_space: gs.Space[Any], action_space: gs.Space[Any]) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.told: list[list[Any]] = []
        self.acts: list[list[Any]] = []

    def _tell(self) -> Any:
        self.observation_space.seed(sum(map(len, self.told)))
        self.told[-1].append(self.observation_space.sample())
        return self.told[-1][-1]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.told.append([])
        self.acts.append([])
        return self._tell(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.acts[-1].append(action)
        count = len(self.acts[-1])
        return self._tell(), count / 3, count == LENGTH, False, {}


def episodes_from(env: Any, frames: int = 60, **options: Any) -> Collector:
    """A collector that gives one episode `[T]` at a time."""
    return Collector(env, frames_per_batch=20, total_frames=frames, trajs_per_batch=1, traj_format="cat", **options)


def step_of(space: gs.Space[Any], values: Any, at: int) -> Any:
    """The value of one step, from arrays of all steps."""
    if isinstance(space, gs.Dict):
        return {name: step_of(child, values[name], at) for name, child in space.spaces.items()}
    if isinstance(space, gs.Tuple):
        return tuple(step_of(child, values[i], at) for i, child in enumerate(space.spaces))
    return values[at]


def assert_same(space: gs.Space[Any], found: Any, expected: Any) -> None:
    """Equal values, of the dtype that the space says."""
    if isinstance(space, gs.Dict):
        for name, child in space.spaces.items():
            assert_same(child, found[name], expected[name])
    elif isinstance(space, gs.Tuple):
        for child, a, b in zip(space.spaces, found, expected, strict=True):
            assert_same(child, a, b)
    else:
        assert np.asarray(found).dtype == space.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("categorical", [False, True], ids=["one-hot", "categorical"])
@pytest.mark.parametrize("name", SPACES)
def test_any_space_comes_back_as_the_env_has_it(name: str, categorical: bool) -> None:
    # A Dict's names would clash if it were both.
    other = gs.Discrete(2) if "Dict" in name else SPACES[name]
    for observed, acted in ((SPACES[name], other), (gs.Box(-1, 1, (1,)), SPACES[name])):
        env = SamplesEnv(observed, acted)
        collector = episodes_from(GymEnv(env, categorical_action_encoding=categorical))
        dataset_id = f"samples/{'obs' if observed is SPACES[name] else 'act'}-v0"
        write_minari(collector, dataset_id, env)
        dataset = minari.load_dataset(dataset_id)
        assert (dataset.observation_space, dataset.action_space) == (observed, acted)
        assert dataset.total_episodes == 15
        for number, episode in enumerate(dataset):
            for at in range(LENGTH + 1):
                assert_same(observed, step_of(observed, episode.observations, at), env.told[number][at])
            for at in range(LENGTH):
                assert_same(acted, step_of(acted, episode.actions, at), env.acts[number][at])
            np.testing.assert_array_equal(episode.rewards, np.arange(1, 5, dtype=np.float32) / np.float32(3))
            assert episode.terminations.tolist() == [False] * 3 + [True]
            assert not episode.truncations.any()
            assert "EpisodeData" in repr(episode)


@pytest.mark.parametrize("kind", ["vector", "dict", "pixels"])
@pytest.mark.parametrize("truncate", [False, True])
def test_episodes_have_their_lengths_and_ends(kind: str, truncate: bool) -> None:
    env = CountingEnv(lengths=[3, 5], kind=kind, truncate=truncate)
    dataset = write_minari(episodes_from(env), "counting-v0", env)
    assert [len(episode) for episode in dataset] == [3, 5] * 7 + [3]
    assert (dataset.total_episodes, dataset.total_steps) == (15, 59)
    for number, episode in enumerate(dataset):
        length, seen = len(episode), episode.observations
        expected = [[0, number, step] for step in range(length + 1)]
        if kind == "dict":
            assert seen["inner"]["step"].tolist() == [[step] for step in range(length + 1)]
            seen = seen["count"]
        elif kind == "pixels":
            assert (seen[..., :3] == seen[:, :1, :1, :3]).all()
            seen = seen[:, 0, 0, :3]
        assert seen.tolist() == expected
        assert episode.rewards.tolist() == list(range(1, length + 1))
        ends = [False] * (length - 1) + [True]
        assert episode.terminations.tolist() == ([False] * length if truncate else ends)
        assert episode.truncations.tolist() == (ends if truncate else [False] * length)


def test_scores_are_the_action_that_they_stand_for() -> None:
    env = CountingGymEnv()
    collector = episodes_from(GymEnv(env), policy=lambda observation: observation[..., 1:] - 2.5)
    for episode in write_minari(collector, "scores-v0", env):
        assert episode.actions.tolist() == [int(step > episode.observations[0, 1]) for step in range(5)]


@pytest.mark.parametrize("jpeg", [False, True])
def test_images_are_kept_exactly_unless_asked_otherwise(jpeg: bool) -> None:
    env = SamplesEnv(gs.Box(0, 255, (40, 40, 3), np.uint8), gs.Discrete(2))
    options = {"jpeg_encoding": True} if jpeg else {}
    dataset = write_minari(episodes_from(GymEnv(env), 20), "images-v0", env, **options)
    assert np.array_equal(dataset[0].observations, np.stack(env.told[0])) is not jpeg
    assert dataset[0].observations.shape == (5, 40, 40, 3)


ENVS: dict[str, Any] = {
    "gymnasium": lambda: gym.make("CartPole-v1", sutton_barto_reward=True),
    "GymEnv": lambda: GymEnv("CartPole-v1", sutton_barto_reward=True),
    "lanes": lambda: GymEnv("CartPole-v1", num_envs=2, sutton_barto_reward=True),
    "SerialEnv": lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1", sutton_barto_reward=True)),
    "vector": lambda: gym.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point", sutton_barto_reward=True),
    "vector in GymEnv": lambda: GymEnv(
        gym.make_vec("CartPole-v1", 2, vectorization_mode="sync", sutton_barto_reward=True)
    ),
}


@pytest.mark.parametrize("make", ENVS.values(), ids=ENVS.keys())
def test_the_environment_can_be_recovered(make: Any) -> None:
    env = make()
    write_minari(episodes_from(env, 300), "cartpole/random-v0", env, author="a", algorithm_name="random")
    dataset = minari.load_dataset("cartpole/random-v0")
    recovered = dataset.recover_environment()
    assert recovered.spec.id == "CartPole-v1"
    assert recovered.spec.max_episode_steps == 500
    assert recovered.spec.kwargs == {"sutton_barto_reward": True}
    assert recovered.observation_space == dataset.observation_space
    assert dataset.storage.metadata["author"] == {"a"}
    episode = dataset[0]
    recovered.reset()
    for at, action in enumerate(episode.actions):  # the same actions from the same state lead the same way
        recovered.unwrapped.state = episode.observations[at].astype(np.float64)
        following, reward, *_ = recovered.step(action)
        np.testing.assert_allclose(following, episode.observations[at + 1], atol=1e-5)
        assert reward == episode.rewards[at]
    assert gym.spec("CartPole-v1").kwargs == {}


def test_an_env_of_ones_own_cannot_be_recovered() -> None:
    env = CountingEnv()
    with pytest.raises(ValueError, match="env_spec is None"):
        write_minari(episodes_from(env), "counting-v0", env).recover_environment()


def test_a_spec_that_no_file_can_hold_is_told() -> None:
    env = gym.make("CartPole-v1")
    env.unwrapped.spec.kwargs = {"callback": lambda: None}
    with pytest.warns(UserWarning, match=r"recover_environment\(\) will not work"):
        dataset = write_minari(episodes_from(GymEnv("CartPole-v1"), 300), "callback-v0", env)
    assert dataset.env_spec is None


def test_spaces_can_be_given_instead_of_an_env() -> None:
    env = CountingEnv()
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    dataset = write_minari(episodes_from(env), "counting-v0", None, **spaces)
    assert dataset.total_episodes == 12


@pytest.mark.torchrl
def test_an_env_of_torchrl_needs_the_spaces() -> None:
    envs = pytest.importorskip("torchrl.envs")
    own = gym.make("CartPole-v1")
    env = envs.GymEnv("CartPole-v1")
    with Collector(env, frames_per_batch=20, trajs_per_batch=1, traj_format="cat") as collector:
        with pytest.raises(ShapeError, match="pass observation_space="):
            write_minari(collector, "peer-v0", collector.env)
        spaces = {"observation_space": own.observation_space, "action_space": own.action_space}
        dataset = write_minari([collector.next()], "peer-v0", collector.env, **spaces)
    assert dataset[0].actions.dtype == np.int64


def test_other_entries_become_infos() -> None:
    env = CountingEnv(lengths=3)
    collector = episodes_from(env, max_frames_per_traj=9)
    dataset = write_minari(collector, "tracked-v0", env, track=["step_count", ("next", "step_count")])
    for episode in dataset:
        assert episode.infos["step_count"].reshape(-1).tolist() == [0, 1, 2]
        assert episode.infos["next"]["step_count"].reshape(-1).tolist() == [1, 2, 3]


# -- streaming -----------------------------------------------------------------------------------------------------


def counted_episode(number: int, length: int = 3) -> TensorDict:
    numbers = torch.tensor([[0.0, number, step] for step in range(length + 1)])
    over = (torch.arange(length) == length - 1).unsqueeze(-1)
    return TensorDict(
        {
            "observation": numbers[:-1],
            "action": torch.zeros(length, dtype=torch.int64),
            "next": {
                "observation": numbers[1:],
                "reward": torch.ones(length, 1),
                "terminated": over,
                "truncated": torch.zeros_like(over),
            },
        },
        batch_size=[length],
    )


def test_no_episode_is_held_and_few_wait() -> None:
    made_so_far: list[weakref.ref[TensorDictBase]] = []
    written = []

    def made() -> Iterator[TensorDictBase]:
        for number in range(35):
            assert sum(ref() is not None for ref in made_so_far) <= 2
            episode = counted_episode(number)
            made_so_far.append(weakref.ref(episode))
            yield episode
            if number % 10 == 9:
                written.append(minari.load_dataset("stream-v0").total_episodes)

    dataset = write_minari(made(), "stream-v0", CountingEnv(), episodes_per_write=10)
    assert written == [10, 20, 30]
    assert dataset.total_episodes == minari.load_dataset("stream-v0").total_episodes == 35
    assert [int(episode.observations[0, 1]) for episode in dataset] == list(range(35))


def test_large_episodes_are_written_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minari_export, "WRITE_BYTES", 1000)
    writer = MinariWriter("large-v0", CountingEnv())
    writer.add(counted_episode(0))
    assert writer.dataset is None
    writer.add(counted_episode(1, length=50))
    assert writer.dataset.total_episodes == 2
    assert (writer.episodes, writer.frames) == (2, 53)


def test_what_is_added_may_be_overwritten_at_once() -> None:
    writer = MinariWriter("copies-v0", CountingEnv(), track=["action"])
    episode = counted_episode(7)
    writer.add(episode)
    for leaf in episode.values(True, True):
        leaf.zero_()
    found = writer.close()[0]
    assert found.observations.tolist() == [[0, 7, step] for step in range(4)]
    assert found.rewards.tolist() == [1, 1, 1]
    assert found.terminations.tolist() == [False, False, True]


def test_a_closed_writer_takes_nothing_more() -> None:
    writer = MinariWriter("closed-v0", CountingEnv())
    assert writer.close() is writer.close() is None
    with pytest.raises(ClosedError, match="update_dataset_from_buffer"):
        writer.add(counted_episode(0))


# -- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"dataset_id": "counting"}, ValueError, "must be like"),
        ({"dataset_id": "count ing-v0"}, ValueError, "must be like"),
        ({"colour": "red"}, TypeError, "colour"),
        ({"env": None}, ValueError, "needs both"),
        ({"env": "CartPole-v1"}, UnsupportedEnvError, "str"),
        ({"episodes_per_write": 0}, ValueError, "at least 1"),
        ({"track": ["action"], "data_format": "arrow"}, ValueError, "needs data_format='hdf5'"),
    ],
)
def test_wrong_arguments_are_found_before_any_episode(
    options: dict[str, Any], error: type[Exception], text: str, datasets: Path
) -> None:
    with pytest.raises(error, match=text):
        MinariWriter(**{"dataset_id": "counting-v0", "env": CountingEnv(), **options})
    assert not list(datasets.iterdir())


def test_a_dataset_is_never_overwritten() -> None:
    write_minari([counted_episode(0)], "counting-v0", CountingEnv())
    with pytest.raises(FileExistsError, match=r"delete_dataset\('counting-v0'\)"):
        MinariWriter("counting-v0", CountingEnv())


@pytest.mark.parametrize("name", ["minari", "h5py", "PIL"])
def test_without_minari_the_error_names_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf'need {name}: pip install "swath\[minari\]"'):
        write_minari([], "counting-v0", CountingEnv())


def test_nothing_to_write() -> None:
    with pytest.raises(ValueError, match="no episode to write"):
        write_minari([], "counting-v0", CountingEnv())


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda e: e[:2], ValueError, "it does not end"),
        (lambda e: torch.cat([e, e]), ValueError, "ends at step 3"),
        (lambda e: e.unsqueeze(0), ValueError, r"got \[1, 3\]"),
        (lambda e: e[:0], ValueError, r"got \[0\]"),
        (lambda e: e.exclude(("next", "observation")), KeyError, "compact_obs"),
        (lambda e: e.exclude("action"), KeyError, "which the dataset needs"),
        (lambda e: e.set("action", torch.zeros(3, 5)), ShapeError, "no value of Discrete"),
        (lambda e: e.set("action", torch.zeros(3)), ShapeError, "no value of Discrete"),
        (lambda e: e.set(("next", "reward"), torch.zeros(3, 2)), ShapeError, "one reward per step"),
    ],
)
def test_what_is_no_episode_is_refused(change: Any, error: type[Exception], text: str, datasets: Path) -> None:
    with pytest.raises(error, match=text):
        write_minari([change(counted_episode(0))], "broken-v0", CountingEnv())
    assert not list(datasets.iterdir())


def test_a_space_without_tensors_is_refused() -> None:
    env: EnvBase = CountingEnv()
    with pytest.raises(UnsupportedSpaceError, match="Text"):
        write_minari([counted_episode(0)], "text-v0", env, observation_space=gs.Text(5))
