"""Errors of an env keep their type and name the lane."""

import sys
from functools import partial
from typing import Any

import pytest
from space_zoo import UnmergedGymEnv

from swath.envs import EnvBase, GymEnv, SerialEnv, as_env
from swath.errors import UnsupportedEnvError
from swath.testing import CountingEnv, CountingGymEnv, FaultyError, FaultyGymEnv

needs_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before Python 3.11")


def factories(inner: Any, **faults: Any) -> list[Any]:
    return [partial(inner, CountingGymEnv), partial(inner, partial(FaultyGymEnv, **faults))]


def notes(env: EnvBase, steps: int = 6) -> str:
    with pytest.raises(FaultyError) as caught:
        env.rollout(steps, break_when_any_done=False)
    return "\n".join(caught.value.__notes__)


@needs_notes
@pytest.mark.parametrize("where", ["step", "reset"])
@pytest.mark.parametrize(("inner", "lane"), [(GymEnv, 1), (UnmergedGymEnv, 0)])
def test_the_lane_and_the_env_are_named(inner: Any, lane: int, where: str) -> None:
    told = notes(SerialEnv(2, factories(inner, at=2, where=where, lengths=3)))
    for part in (f"Raised in {where}(", f"lane {lane}", "env 1 of SerialEnv(2", "FaultyGymEnv", "check_env"):
        assert part in told


@needs_notes
def test_the_action_is_named() -> None:
    assert "step(np.int64(" in notes(GymEnv(FaultyGymEnv(at=1))) or "step(1)" in notes(GymEnv(FaultyGymEnv(at=1)))


def test_an_env_of_the_old_kind_fails_with_a_hint() -> None:
    class Old(CountingGymEnv):
        def step(self, action: Any) -> Any:
            observation, reward, terminated, _, info = super().step(action)
            return observation, reward, terminated, info

    env = GymEnv(Old())
    with pytest.raises(ValueError, match="not enough values to unpack") as caught:
        env.rand_step(env.reset())
    assert "terminated, truncated" in "".join(getattr(caught.value, "__notes__", caught.value.args))


def test_lanes_go_on_after_a_failure() -> None:
    env = GymEnv(FaultyGymEnv(at=3, lengths=100))
    td = env.rand_action(env.reset())
    for _ in range(2):
        env.step(td)
    with pytest.raises(FaultyError):
        env.step(td)
    assert env.step(td)["next", "observation"][2] == 4


# -- whatever is given as an env


@pytest.mark.parametrize("given", [CountingGymEnv(), CountingGymEnv, CountingEnv, lambda: GymEnv("CartPole-v1")])
def test_envs_and_factories_become_envs(given: Any) -> None:
    assert isinstance(as_env(given), EnvBase)


def test_an_env_is_taken_as_it_is() -> None:
    env = CountingEnv()
    assert as_env(env) is env
    with pytest.raises(RuntimeError, match=r"create_env_kwargs=\{'lane': 1\} can only be given with a factory"):
        as_env(env, {"lane": 1})
    assert as_env(CountingGymEnv, {"lane": 3}).reset()["observation"][0] == 3


@pytest.mark.parametrize("given", ["CartPole-v1", 3, None, [CountingEnv()]])
def test_other_things_are_refused(given: Any) -> None:
    with pytest.raises(UnsupportedEnvError, match=r"got .*GymEnv\('CartPole-v1'\)"):
        as_env(given)


@pytest.mark.parametrize("build", [lambda make: SerialEnv(3, make), lambda make: GymEnv(make, num_envs=3)])
def test_envs_made_before_a_factory_fails_are_closed(build: Any) -> None:
    made: list[CountingGymEnv] = []
    closed: list[CountingGymEnv] = []

    class Closing(CountingGymEnv):
        def close(self) -> None:
            closed.append(self)

    def make() -> CountingGymEnv:
        if len(made) == 2:
            raise FaultyError(2, 0)
        made.append(Closing())
        return made[-1]

    with pytest.raises(FaultyError):
        build(make)
    assert closed == made
    assert len(closed) == 2


def test_a_wrong_dtype_names_key_and_dtypes() -> None:
    with pytest.raises(TypeError, match="lane 0 gave 'observation' of dtype <U6, which cannot be held as float32"):
        GymEnv(FaultyGymEnv("dtype", at=1)).rollout(2)
