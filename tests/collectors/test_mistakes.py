"""Mistakes that a new user makes: each is answered with what is wrong, by name, and with the line to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from common import net
from gymnasium import spaces as gs
from kinds import AS_READY, HERE, MIXED, SYNC, SYNC_HERE, Kind, Make, over
from torch import Tensor, nn

from swath.collectors import AsyncBatchedCollector, Collector, MultiSyncCollector
from swath.envs import AsyncEnvPool, GymEnv, ParallelEnv, SerialEnv
from swath.modules.stages import RangeStage
from swath.testing import CountingEnv, CountingGymEnv


def told(caught: Any) -> str:
    """The message and the notes of an error, and of what it was raised from."""
    error, words = caught.value, ""
    while error is not None:
        words += " ".join([str(error), *getattr(error, "__notes__", ()), ""])
        error = error.__cause__
    return words


def assert_told(call: Callable[[], Any], kind: type[Exception], *patterns: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    for pattern in patterns:
        assert re.search(pattern, told(caught)), told(caught)


# -- the policy's answers -------------------------------------------------------------------------------------------


class Gives(nn.Module):
    """Always gives the same action: of the shape of the lanes, or not."""

    def __init__(self, *values: float, dtype: torch.dtype = torch.int64, rows: bool = True) -> None:
        super().__init__()
        self.values, self.dtype, self.rows = values, dtype, rows

    def forward(self, observation: Tensor) -> Tensor:
        value = torch.tensor(self.values, dtype=self.dtype).squeeze()
        return value.expand((*observation.shape[:-1], *value.shape)) if self.rows else value[None]


@pytest.mark.parametrize("categorical", [True, False])
@over(HERE)
def test_a_float_names_no_action(make: Make, categorical: bool) -> None:
    def env() -> GymEnv:
        return GymEnv(CountingGymEnv, categorical_action_encoding=categorical)

    collector = make(env, Gives(1.0, dtype=torch.float32))
    assert_told(
        collector.next, ValueError, r"'action' as float32 of shape \(\)", r"action\.long\(\)", r"scores of shape \(2,\)"
    )


@over(HERE)
def test_one_row_for_three_lanes(make: Make, kind: Kind) -> None:
    def env() -> GymEnv:
        return GymEnv(CountingGymEnv, num_envs=3)

    answer = r"answer of shape \[1, 2\] has not a row for each lane of .*begin with \[(1, )?3\]"
    assert_told(lambda: make(env, Gives(0.0, 1.0, rows=False), lanes=3), RuntimeError, answer, "observation.shape")


class Turns(nn.Module):
    """Numbers actions rightly for some steps, and then gives `value` in the last lane."""

    def __init__(self, value: int, steps: int) -> None:
        super().__init__()
        self.value, self.left = value, steps

    def forward(self, observation: Tensor) -> Tensor:
        action = torch.zeros(observation.shape[:-1], dtype=torch.int64)
        self.left -= 1
        if self.left < 0:
            action.view(-1)[-1] = self.value
        return action


@pytest.mark.parametrize("value", [2, -1])
@over(MIXED)
def test_an_integer_outside_the_action_space_is_refused_by_key_and_lane(make: Make, kind: Kind, value: int) -> None:
    """An env may take it for another action, or crash: it does not get to see it."""
    lanes = 0 if kind is AS_READY else 2
    collector = make(None, Turns(value, 4), lanes=lanes, workers=min(1, kind.workers))
    words = rf"'action' = {value} in lane {max(0, lanes - 1)}, .* action space Discrete\(2\): .* from 0, up to 1"
    assert_told(collector.next, ValueError, words)


def test_integers_of_many_parts_are_refused_likewise(make: Make) -> None:
    class Many(CountingGymEnv):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = gs.MultiDiscrete([2, 3])

    assert_told(make(Many, Gives(1, 3)).next, ValueError, r"'action' = \[1, 3\] in lane 0", r"up to \[1, 2\]")
    assert make(Many, Gives(1, 2)).next() is not None


@over(HERE)
def test_actions_are_looked_at_in_the_first_batch_only(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """After that it costs nothing."""
    collector = make(None, Turns(7, 10_000), steps=5)
    checked = list[int]()
    monkeypatch.setattr(RangeStage, "run_on", lambda self, lanes, times: checked.append(len(lanes)))
    for _ in range(4):
        collector.next()
    assert len(checked) == 5 * collector.num_workers


# -- the env --------------------------------------------------------------------------------------------------------


class Four(CountingGymEnv):
    def step(self, action: Any) -> Any:
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


class Seedless(CountingGymEnv):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class Lonely(CountingGymEnv):
    def reset(self, **options: Any) -> Any:
        return super().reset(**options)[0]


class Homeless:
    """Has all that an env has but its class."""

    observation_space, action_space = gs.Box(-1, 1, (3,)), gs.Discrete(2)

    def reset(self, **options: Any) -> Any:
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(3, np.float32), 0.0, False, False, {}


class Stops(CountingGymEnv):
    def step(self, action: Any) -> Any:
        if self.episode == 1:
            raise StopIteration("no more data")
        return super().step(action)


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: gym.wrappers.TimeLimit(env, 9)], ids=["bare", "wrapped"])
@over(MIXED)
def test_the_old_step_of_four_values(make: Make, wrap: Any) -> None:
    collector = make(lambda: wrap(Four()))
    line = r"return observation, reward, terminated, truncated, info"
    assert_told(collector.next, ValueError, r"lane 0, .*Four", "five values", line)


@over(HERE)
def test_a_reset_without_seed(make: Make) -> None:
    line = r"reset\(self, \*, seed=None, options=None\)"
    assert_told(lambda: make(Seedless), TypeError, r"lane 0, <Seedless", line)


@over(HERE)
def test_a_reset_that_returns_the_observation_alone(make: Make) -> None:
    assert_told(lambda: make(Lonely), ValueError, r"lane 0, <Lonely", r"return observation, info")


@over(HERE)
def test_what_only_looks_like_an_env(make: Make) -> None:
    line = r"no gymnasium\.Env: write class Homeless\(gymnasium\.Env\)"
    assert_told(lambda: make(Homeless), TypeError, line)
    assert_told(lambda: make(lambda: GymEnv(Homeless)), TypeError, line)


def test_an_env_of_the_old_gym() -> None:
    old = type("Old", (Homeless,), {"__module__": "gym.envs.classic"})
    assert_told(lambda: GymEnv(old), TypeError, r"old gym: gymnasium\.make\('GymV26Environment-v0', env=env\)")


@over((*MIXED, SYNC))
def test_stop_iteration_of_an_env_is_no_end(make: Make) -> None:
    collector = make(Stops)
    words = [r"Stops.*StopIteration\('no more data'\)", r"terminated=True or truncated=True", r"lane 0"]
    assert_told(lambda: list(collector), RuntimeError, *words)


# -- the constructors -----------------------------------------------------------------------------------------------


def policies() -> list[Any]:
    return [net(), nn.Linear(3, 2)]


@pytest.mark.parametrize(
    "env", [CountingEnv, CountingEnv(), CountingGymEnv(), None], ids=["class", "env", "gym", "none"]
)
@over(MIXED)
def test_env_and_policy_in_the_wrong_order(kind: Kind, env: Any) -> None:
    for policy in policies():
        for first in (policy, [policy]):
            line = r"env comes first, then the policy, as in Collector\(make_env, policy"
            assert_told(lambda first=first: kind.of(first, env, frames_per_batch=10), TypeError, line)  # type: ignore[misc]


def test_a_function_in_the_place_of_the_env() -> None:
    def act(observation: Tensor) -> Tensor:
        return observation

    words = [r"act.* is called with no arguments", "env comes first, then the policy"]
    assert_told(lambda: Collector(act, CountingEnv, frames_per_batch=10), TypeError, *words)
    assert_told(lambda: Collector(act, CountingEnv(), frames_per_batch=10), TypeError, "policy CountingEnv")


def test_workers_of_a_collector_that_has_none() -> None:
    line = r"num_workers=2.*MultiSyncCollector\(make_env, policy, num_workers=.*SerialEnv\(4, make_env\)"
    assert_told(lambda: Collector(CountingEnv, frames_per_batch=10, num_workers=2), TypeError, line)  # type: ignore[call-arg]


@pytest.mark.parametrize("of", [SerialEnv, ParallelEnv])
@pytest.mark.parametrize("given", [CountingEnv, [CountingEnv] * 4], ids=["function", "list"])
def test_number_and_factory_in_the_wrong_order(of: Any, given: Any) -> None:
    assert_told(lambda: of(given, 4), TypeError, r"num_workers comes first.*SerialEnv\(4, make_env\)")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: SerialEnv(0, []), "create_env_fn"),
        (lambda: SerialEnv(2, []), "create_env_fn"),
        (lambda: ParallelEnv(2, []), "create_env_fn"),
        (lambda: AsyncEnvPool([]), "env_makers"),
        (lambda: Collector([], frames_per_batch=10), "create_env_fn"),
        (lambda: MultiSyncCollector([], frames_per_batch=10), "create_env_fn"),
        (lambda: AsyncBatchedCollector([], None, frames_per_batch=10), "create_env_fn"),
    ],
)
def test_no_factory_at_all(call: Callable[[], Any], name: str) -> None:
    assert_told(call, (TypeError, ValueError), rf"{name} (is an empty list|must be a list).*(\[.*\] \* \d|SerialEnv)")  # type: ignore[arg-type]


# -- layouts --------------------------------------------------------------------------------------------------------


class Wide(CountingGymEnv):
    """Differs in one entry of its observation."""

    def __init__(self, width: int, **names: Any) -> None:
        super().__init__()
        same = gs.Box(-1, 1, (2,))
        self.observation_space = gs.Dict({"same": same, "wide": gs.Box(-1, 1, (width,)), **dict.fromkeys(names, same)})

    def _observe(self) -> Any:
        return {name: np.zeros(space.shape, np.float32) for name, space in self.observation_space.spaces.items()}  # type: ignore[attr-defined]


def test_lanes_that_differ_name_the_entry() -> None:
    with pytest.raises(ValueError, match=r"env 1 .*: 'wide' is torch.float32 \[4\] instead of torch.float32 \[3\]\.$"):
        SerialEnv(2, [lambda: Wide(3), lambda: Wide(4)])
    with pytest.raises(ValueError, match=r": 'more' is torch.float32 \[2\] instead of missing\.$"):
        SerialEnv(2, [lambda: Wide(3), lambda: Wide(3, more=1)])


@over([SYNC_HERE])
def test_workers_that_differ_name_the_entries(make: Make) -> None:
    with pytest.raises(ValueError, match=r"worker 1 .*entries: 'wide' is .*, \('next', 'wide'\) is [^,]*\.$"):
        make([lambda: Wide(3), lambda: Wide(4)])
