"""Uses that are unusual but legitimate, and mistakes that must not pass silently."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from swath.collectors import Collector, PolicyVersion
from swath.envs import GymEnv, SerialEnv
from swath.errors import ClosedError, PolicyError
from swath.testing import CountingEnv, CountingGymEnv, assert_frames_belong


def test_whole_episodes_do_without_frames_that_were_taken_by_rollout() -> None:
    collector = Collector(CountingEnv(lengths=7), None, frames_per_batch=3, total_frames=42, trajs_per_batch=1)
    taken = collector.rollout()
    episodes = [int(batch["observation"][0, 0, 1]) for batch in collector]
    assert taken["observation"][:, 2].tolist() == [0, 1, 2]
    assert episodes == [1, 2, 3, 4, 5]
    stats = collector.stats()
    assert stats["dropped_frames"] == 4
    assert stats["frames"] == 42 == 3 + 4 + 5 * 7
    assert stats["pending_frames"] == 0


def test_an_episode_that_ends_in_frames_that_were_taken_is_given_up() -> None:
    collector = Collector(CountingEnv(lengths=4), None, frames_per_batch=3, total_frames=24, trajs_per_batch=1)
    polled = iter(collector)
    first = next(polled)  # polls steps 0-2 and 3 of episode 0, then 0 and 1 of episode 1
    collector.rollout()  # takes the rest of episode 1, and the first of episode 2
    rest = [int(batch["observation"][0, 0, 1]) for batch in polled]
    assert int(first["observation"][0, 0, 1]) == 0
    assert rest == [3, 4, 5]


def test_an_env_used_in_between_begins_anew_with_new_ids() -> None:
    env = CountingEnv((2,), lengths=100)
    collector = Collector(env, None, frames_per_batch=6)
    first = collector.next()
    env.rollout(4)
    with pytest.warns(UserWarning, match="used by somebody else"):
        second = collector.next()
    assert_frames_belong(second)
    assert (second["observation"][:, 0, 2] == 0).all()
    assert not set(first["collector", "traj_ids"].unique().tolist()) & set(second["collector", "traj_ids"].tolist()[0])


def test_two_collectors_on_one_env_do_not_mix_their_frames() -> None:
    env = CountingEnv((2,), lengths=100)
    one, other = Collector(env, None, frames_per_batch=6), Collector(env, None, frames_per_batch=6)
    other.next()
    for collector in (one, other, one, other):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert_frames_belong(collector.next())
        assert ["used by somebody else" in str(warning.message) for warning in told] == [True]


def test_a_forgotten_collector_leaves_the_users_env_open_and_closes_its_own() -> None:
    env = GymEnv(CountingGymEnv())
    Collector(env, None, frames_per_batch=5).next()
    gc.collect()
    assert not env.is_closed
    made: list[CountingGymEnv] = []

    def make() -> CountingGymEnv:
        made.append(CountingGymEnv())
        return made[-1]

    Collector(lambda: GymEnv(make), None, frames_per_batch=5).next()
    gc.collect()
    assert made[0].is_closed


def test_a_closed_env_is_refused() -> None:
    env = GymEnv(CountingGymEnv())
    env.close()
    with pytest.raises(ClosedError):
        Collector(env, None, frames_per_batch=5)


def test_inference_mode_around_it_leaves_ordinary_batches() -> None:
    with torch.inference_mode():
        collector = Collector(GymEnv(CountingGymEnv, num_envs=2), None, frames_per_batch=4)
        inside = collector.next()
    outside = collector.next()
    weight = torch.ones(3, requires_grad=True)
    for batch in (inside, outside):
        assert not batch["observation"].is_inference()
        (batch["observation"] * weight).sum().backward()


@pytest.mark.parametrize(("seed", "error"), [(-1, ValueError), (None, TypeError), (1.5, TypeError), (True, TypeError)])
def test_seeds_that_are_none_are_refused_by_name(seed: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="seed must"):
        Collector(CountingEnv(), None, frames_per_batch=5).set_seed(seed)


def test_a_numpy_seed_is_saved_as_a_plain_number(tmp_path: Any) -> None:
    collector = Collector(CountingEnv(), None, frames_per_batch=5)
    collector.set_seed(np.int64(3))
    torch.save(collector.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["frames"] == 0


def test_a_policy_that_changes_its_kind_of_numbers_is_told() -> None:
    calls = []

    def policy(observation: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.tensor([1, 0]) if len(calls) == 1 else torch.tensor([0.2, 0.9])

    with pytest.raises(TypeError, match=r"'action' as torch\.float32, but torch\.int64 was expected") as caught:
        Collector(GymEnv(CountingGymEnv()), policy, frames_per_batch=5).next()
    if hasattr(caught.value, "__notes__"):
        assert "step 0 of a batch" in caught.value.__notes__[-1]


def test_arguments_of_which_only_some_are_observations_are_refused() -> None:
    env = GymEnv(CountingGymEnv(kind="dict"))  # count and inner/step
    with pytest.raises(PolicyError, match="cannot be matched"):
        Collector(env, lambda step, other: torch.tensor([1, 0]), frames_per_batch=5)


@pytest.mark.parametrize("given", [0.7, -1.0, 300.0])
def test_observations_that_the_dtype_has_not_are_refused(given: float) -> None:
    class Odd(gym.Env[Any, Any]):
        observation_space, action_space = gs.Box(0, 255, (2,), np.uint8), gs.Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return np.zeros(2), {}  # float zeros are bytes too

        def step(self, action: Any) -> Any:
            return np.full(2, given), 0.0, False, False, {}

    with pytest.raises(TypeError, match="uint8 does not have"):
        Collector(GymEnv(Odd()), None, frames_per_batch=5).next()


def test_a_collector_is_true_though_it_has_no_length() -> None:
    assert Collector(CountingEnv(), None, frames_per_batch=5)


def test_set_truncated_asks_the_envs_of_a_serial_env() -> None:
    def make() -> CountingEnv:
        env = CountingEnv()
        env.has_truncated = False
        return env

    with pytest.raises(RuntimeError, match="truncated"):
        Collector(SerialEnv(2, make), None, frames_per_batch=4, set_truncated=True)


def test_policy_version_requests_are_equal() -> None:
    assert PolicyVersion() == PolicyVersion()


def test_what_a_policy_writes_for_itself_comes_back_to_it() -> None:
    """As noise processes do it: under private names, absent at first."""

    def policy(td: Any) -> Any:
        count = td.get("_count", None)
        count = torch.zeros(*td.batch_size, 1) if count is None else count + 1
        return td.update({"_count": count, "action": torch.tensor([1, 0]), "seen": count.clone()})

    batch = Collector(GymEnv(CountingGymEnv(lengths=100)), policy, frames_per_batch=5).next()
    assert batch["seen"].flatten().tolist() == [0, 1, 2, 3, 4]
    assert batch.get("_count", None) is None


def test_the_stages_tell_how_a_policy_ran() -> None:
    env = GymEnv("CartPole-v1")
    collector = Collector(env, torch.nn.Sequential(torch.nn.Linear(4, 2)), frames_per_batch=5)
    collector.next()
    assert collector.policy_stages == ["MLPStage"]
    slow = Collector(GymEnv("CartPole-v1"), lambda td: td.set("action", torch.tensor([1, 0])), frames_per_batch=5)
    slow.next()
    assert slow.policy_stages == ["TensorDictStage"]


def test_rounding_of_total_frames_is_said() -> None:
    with pytest.warns(UserWarning, match="total_frames=3 is rounded up"):
        collector = Collector(CountingEnv((4,)), None, frames_per_batch=4, total_frames=3)
    assert sum(batch.numel() for batch in collector) == 4
