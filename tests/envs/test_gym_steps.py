"""Stepping past gymnasium's own wrappers: nobody can tell the difference."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from swath.envs import GymEnv, SerialEnv
from swath.envs.gym_steps import way_into


class Counting(gym.Env[np.ndarray, np.int64]):
    """Observes how many steps it has made, and which action led there; ends after `last`, if that is not None."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, last: int | None = None) -> None:
        self.last, self.age, self.is_broken = last, 0, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.age = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.is_broken:
            raise RuntimeError("the gripper is jammed")
        self.age += 1
        return np.array([self.age, action], np.float32), float(self.age), self.age == self.last, False, {}


class Doubling(gym.Wrapper[Any, Any, Any, Any]):
    """A user's wrapper."""

    def step(self, action: Any) -> Any:
        observation, reward, *rest = self.env.step(action)
        return observation, 2 * float(reward), *rest


def _as_made(core: gym.Env[Any, Any], limit: int = 5) -> TimeLimit:
    """What `gym.make` makes of an env."""
    return TimeLimit(OrderEnforcing(PassiveEnvChecker(core)), limit)


def _run(env: gym.Env[Any, Any], steps: int, in_swath: bool) -> list[tuple[Any, ...]]:
    """What `steps` steps lead to, in swath or by hand: observation, reward, flags, and the limit's own count."""
    limit = next((one for one in _chain(env) if type(one) is TimeLimit), None)
    actions, told = np.random.default_rng(0).integers(0, 3, steps), []
    if not in_swath:
        env.reset(seed=1)
        for action in actions:
            observation, reward, terminated, truncated, _ = env.step(action)
            told.append((observation.tolist(), reward, terminated, truncated, limit and limit._elapsed_steps))
            if terminated or truncated:
                env.reset()
        return told
    swath = GymEnv(env, categorical_action_encoding=True)
    tensordict = swath.reset()
    for action in actions:
        tensordict = swath.step(tensordict.set("action", torch.tensor(action)))
        after = tensordict["next"]
        flags = bool(after["terminated"]), bool(after["truncated"])
        count = limit and limit._elapsed_steps
        told.append((after["observation"].tolist(), after["reward"].item(), *flags, count))
        tensordict = swath.reset() if any(flags) else after.exclude("reward")
    return told


def _chain(env: Any) -> list[Any]:
    return [env, *_chain(env.env)] if isinstance(env, gym.Wrapper) else [env]


CHAINS = {
    "as made": lambda: _as_made(Counting()),
    "ends by itself": lambda: _as_made(Counting(last=3)),
    "ends at the limit": lambda: _as_made(Counting(last=5)),
    "of one step": lambda: _as_made(Counting(), limit=1),
    "without a checker": lambda: TimeLimit(OrderEnforcing(Counting()), 4),
    "without a limit": lambda: OrderEnforcing(PassiveEnvChecker(Counting(last=4))),
    "two limits": lambda: TimeLimit(_as_made(Counting(), limit=4), 6),
    "two limits, the outer first": lambda: TimeLimit(_as_made(Counting(), limit=6), 4),
    "a wrapper on top": lambda: Doubling(_as_made(Counting())),
    "a wrapper in between": lambda: TimeLimit(Doubling(OrderEnforcing(Counting())), 5),
    "a limit of another class": lambda: type("Mine", (TimeLimit,), {})(Counting(), 5),
    "no wrapper": lambda: Counting(last=4),
}


@pytest.mark.parametrize("name", CHAINS)
def test_the_same_as_through_all_wrappers(name: str) -> None:
    assert _run(CHAINS[name](), 30, in_swath=True) == _run(CHAINS[name](), 30, in_swath=False)


def test_what_is_passed() -> None:
    env = _as_made(core := Counting())
    env.reset()
    assert way_into(env) == (env.env.env, env)  # the checker has its first steps before it
    for _ in range(2):
        env.step(0)
    assert way_into(env) == (core, env)
    assert way_into(on_top := Doubling(env)) == (on_top, None)
    assert way_into(env.env) == (core, None)


def test_the_first_steps_are_checked() -> None:
    core = Counting()
    core.step = lambda action: (np.zeros(2, np.float64), "much", False, False, {})  # type: ignore[method-assign]
    env = GymEnv(_as_made(core), categorical_action_encoding=True)
    tensordict = env.reset().set("action", torch.tensor(0))
    with pytest.warns(UserWarning, match="reward returned by"), pytest.raises(TypeError, match="'much'"):
        env.step(tensordict)


def test_a_limit_that_is_changed_counts_at_once() -> None:
    env = GymEnv(chain := _as_made(Counting(), limit=50), categorical_action_encoding=True)
    for limit in (50, 3):
        tensordict = env.reset()
        for step in range(1, 4):
            chain._max_episode_steps = limit
            tensordict = env.step(tensordict.set("action", torch.tensor(0)))["next"]
            assert tensordict["truncated"].item() == (step >= limit)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_step_that_was_exchanged_is_called(place: int) -> None:
    env = GymEnv(chain := _as_made(Counting(), limit=3), categorical_action_encoding=True)
    act = torch.tensor(0)
    for _ in range(2):
        tensordict = env.reset()
        for _ in range(3):
            tensordict = env.step(tensordict.set("action", act))["next"]
    changed = _chain(chain)[place]
    own, seen = changed.step, list[Any]()
    changed.step = lambda action: (seen.append(action), own(action))[1]
    env.step(env.reset().set("action", act))
    assert len(seen) == 1


def test_a_core_that_was_patched_in_the_middle_of_an_episode() -> None:
    env = GymEnv(_as_made(core := Counting(), limit=3), categorical_action_encoding=True)
    for _ in range(2):
        tensordict = env.reset()
        for _ in range(3):
            tensordict = env.step(tensordict.set("action", torch.tensor(0)))["next"]
    tensordict = env.reset()
    core.step = lambda action: (np.full(2, 7, np.float32), 0.0, True, False, {})  # type: ignore[method-assign]
    assert env.step(tensordict.set("action", torch.tensor(0)))["next", "observation"].tolist() == [7, 7]


def test_an_inner_env_that_was_exchanged_is_stepped() -> None:
    env = GymEnv(chain := _as_made(Counting(), limit=3), categorical_action_encoding=True)
    for _ in range(2):
        tensordict = env.reset()
        for _ in range(3):
            tensordict = env.step(tensordict.set("action", torch.tensor(0)))["next"]
    chain.env = Doubling(chain.env)
    assert env.step(env.reset().set("action", torch.tensor(0)))["next", "reward"].item() == 2


def test_errors_name_the_lane_and_the_whole_env() -> None:
    cores = [Counting(), Counting()]
    env = SerialEnv(2, [lambda core=core: GymEnv(_as_made(core), categorical_action_encoding=True) for core in cores])
    for _ in range(2):
        tensordict = env.reset()
        for _ in range(3):
            tensordict = env.step(tensordict.set("action", torch.zeros(2, dtype=torch.int64)))["next"]
    cores[1].is_broken = True
    tensordict = env.reset().set("action", torch.zeros(2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="jammed") as caught:
        env.step(tensordict)
    notes = " ".join(caught.value.__notes__)
    assert "of lane 1, <TimeLimit<OrderEnforcing<PassiveEnvChecker<Counting" in notes


@pytest.mark.parametrize("kind", [np.float64, np.int32, list])
def test_observations_of_another_type_are_converted(kind: Any) -> None:
    core = Counting()
    own = core.step
    core.step = lambda action: (_as(kind, (told := own(action))[0]), *told[1:])  # type: ignore[method-assign]
    env = GymEnv(core, num_envs=1, categorical_action_encoding=True)
    tensordict = env.reset()
    for age in range(1, 4):
        tensordict = env.step(tensordict.set("action", torch.tensor([2])))["next"]
        assert tensordict["observation"].tolist() == [[age, 2]]


def _as(kind: Any, observation: np.ndarray) -> Any:
    return observation.tolist() if kind is list else observation.astype(kind)


def test_a_wrong_shape_is_refused() -> None:
    core = Counting()
    core.step = lambda action: (np.zeros(1, np.float32), 0.0, False, False, {})  # type: ignore[method-assign]
    env = GymEnv(core, categorical_action_encoding=True)
    with pytest.raises(ValueError, match="observation"):
        env.step(env.reset().set("action", torch.tensor(0)))
