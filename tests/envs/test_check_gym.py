"""check_env on gymnasium envs: sound ones pass, and each mistake is told in a sentence with its cure."""

import re
import warnings
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from forked_envs import ForkedVectorEnv
from gymnasium import spaces as gs
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from space_zoo import SPACES

from swath.envs import GymEnv, SerialEnv, check_env
from swath.errors import EnvCheckError, EnvCheckWarning, SwathError
from swath.testing import CountingGymEnv, CountingVectorEnv


class Sound(gym.Env[Any, Any]):
    """A random walk: nothing is wrong with it."""

    observation_space: gs.Space[Any] = gs.Box(-100, 100, (2,), np.float32)
    action_space: gs.Space[Any] = gs.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.state = self.np_random.normal(size=2).astype(np.float32)
        self.count = 0
        return self.state.copy(), {}

    def step(self, action: Any) -> Any:
        self.state = self.state + self.np_random.normal(size=2).astype(np.float32)
        self.count += 1
        return self.state.copy(), float(self.count), self.count >= 6, False, {}


def problems(env: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EnvCheckWarning)
        with pytest.raises(EnvCheckError) as caught:
            check_env(env, **options)
    assert str(caught.value).count("\n") == len(caught.value.problems)
    return caught.value.problems


SOUND: dict[str, Any] = {
    "custom": Sound,
    "instance": lambda: Sound(),
    "CartPole": partial(gym.make, "CartPole-v1"),
    "Pendulum": partial(gym.make, "Pendulum-v1"),
    "Taxi": partial(gym.make, "Taxi-v4"),
    "Blackjack, with a Tuple": partial(gym.make, "Blackjack-v1"),
    "GymEnv": partial(GymEnv, "CartPole-v1", num_envs=2),
    "SerialEnv": lambda: SerialEnv(2, lambda: GymEnv("Acrobot-v1")),
    "sync, next step": lambda: SyncVectorEnv([Sound] * 2),
    "sync, same step": lambda: SyncVectorEnv([Sound] * 2, autoreset_mode=AutoresetMode.SAME_STEP),
    "sync, disabled": lambda: SyncVectorEnv([Sound] * 2, autoreset_mode=AutoresetMode.DISABLED),
    "async": lambda: ForkedVectorEnv([Sound] * 2),
    "entry point": lambda: gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point"),
}


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_wrong_with_sound_envs(name: str, recwarn: pytest.WarningsRecorder) -> None:
    check_env(SOUND[name], steps=40)
    check_env(SOUND[name], steps=5, seed=3)
    assert [str(w.message) for w in recwarn if w.category is EnvCheckWarning] == []


@pytest.mark.filterwarnings("ignore:.*Casting input x:UserWarning")
@pytest.mark.parametrize("role", ["observation_space", "action_space"])
@pytest.mark.parametrize("name", SPACES)
def test_all_spaces_pass(name: str, role: str) -> None:
    class Sampling(Sound):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            gym.Env.reset(self, seed=seed)
            if seed is not None:
                self.observation_space.seed(seed)
            self.count = 0
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> Any:
            assert self.action_space.contains(action)
            self.count += 1
            return self.observation_space.sample(), 1.0, self.count >= 3, False, {}

    setattr(Sampling, role, SPACES[name])
    check_env(Sampling(), steps=8)


def returning(**parts: Any) -> type[Sound]:
    """A sound env of whose step (or reset) one part is replaced."""

    class Replaced(Sound):
        def reset(self, **options: Any) -> Any:
            observation, info = super().reset(**options)
            return parts.get("observation", lambda o: o)(observation), parts.get("info", info)

        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, info = super().step(action)
            return (
                parts.get("observation", lambda o: o)(observation),
                parts.get("reward", reward),
                parts["terminated"](terminated) if "terminated" in parts else terminated,
                parts.get("truncated", truncated),
                parts.get("info", info),
            )

    return Replaced


class Unseeded(Sound):
    def reset(self, **options: Any) -> Any:
        super().reset(**options)
        self.state = np.random.default_rng().normal(size=2).astype(np.float32)
        return self.state.copy(), {}


class RandomElsewhere(Sound):
    def step(self, action: Any) -> Any:
        if self.count == 3:
            self.state += np.random.default_rng().normal(size=2).astype(np.float32)
        return super().step(action)


class Picky(Sound):
    def step(self, action: Any) -> Any:
        assert action != 1, "no such action"
        return super().step(action)


def answering(answer: Any) -> type[Sound]:
    """An env whose step returns something else."""
    return type("Strange", (Sound,), {"step": lambda self, action: answer})


def with_space(env: type[Sound], space: Any, name: str = "observation_space") -> Any:
    return type("Spaced", (env,), {name: space})


DICT = gs.Dict({"a": gs.Box(-100, 100, (2,), np.float32), "b": gs.Discrete(3)})
MISTAKES: dict[str, tuple[Any, str]] = {
    "shape": (returning(observation=lambda o: o[:1]), r"observation of shape \(1,\).*has the shape \(2,\).*correct"),
    "float64": (
        returning(observation=lambda o: o.astype(np.float64)),
        r"dtype float64.*has float32.*astype\(np\.float32",
    ),
    "float for int": (
        with_space(Sound, gs.Box(-100, 100, (2,), np.int64)),
        r"dtype float32.*has int64.*without loss.*correct the space's dtype",
    ),
    "bounds": (
        with_space(Sound, gs.Box(-0.1, 0.1, (2,))),
        r"outside of its space Box.*: .* at \(\d,\), (below|above) the limit",
    ),
    "nan": (
        returning(observation=lambda o: o * np.nan),
        r"NaN in observation, at \(0,\)\. Look for a division by zero",
    ),
    "not a dict": (with_space(Sound, DICT), r"must be a dict, actual type: <class 'numpy\.ndarray'>"),
    "missing key": (
        with_space(returning(observation=lambda o: {"a": o}), DICT),
        r"keys is not same.*obs keys: \['a'\], space keys: \['a', 'b'\]",
    ),
    "further key": (
        with_space(returning(observation=lambda o: {"a": o, "b": 1, "c": 2}), DICT),
        r"keys is not same.*obs keys: \['a', 'b', 'c'\], space keys: \['a', 'b'\]",
    ),
    "value in dict": (
        with_space(returning(observation=lambda o: {"a": o, "b": 3}), DICT),
        r"observation\['b'\] outside of its space Discrete\(3\): 3 at \(\), above the limit 2",
    ),
    "not an integer": (
        with_space(returning(observation=lambda o: 1.0), gs.Discrete(2)),
        r"dtype float64, but its space Discrete\(2\) has int64.*without loss",
    ),
    "not a tuple": (
        with_space(Sound, gs.Tuple((gs.Discrete(2), gs.Discrete(2)))),
        r"was expecting a tuple, actual type: <class 'numpy\.ndarray'>",
    ),
    "multi-discrete": (
        with_space(returning(observation=lambda o: np.array([0, 5])), gs.MultiDiscrete([2, 2])),
        r"5 at \(1,\), above the limit 1",
    ),
    "multi-binary": (
        with_space(returning(observation=lambda o: np.array([0, -1], np.int8)), gs.MultiBinary(2)),
        r"-1 at \(1,\), below the limit 0",
    ),
    "reward of shape 1": (returning(reward=np.ones(1)), r"reward.* must be a float.*actual type: .*ndarray"),
    "no reward": (returning(reward=None), r"reward.* must be a float.*actual type: <class 'NoneType'>"),
    "reward nan": (returning(reward=float("nan")), r"The reward is a NaN value"),
    "reward infinite": (returning(reward=float("inf")), r"The reward is an inf value"),
    "terminated": (returning(terminated=int), r"`terminated` signal to be a boolean, actual type: <class 'int'>"),
    "truncated": (returning(truncated=None), r"`truncated` signal to be a boolean, actual type: <class 'NoneType'>"),
    "info": (returning(info=[]), r"env\.reset\(\)` was not a dictionary, actual type: <class 'list'>"),
    "three parts": (answering((1, 2, 3)), "number of elements returned: 3"),
    "no parts": (answering(None), "to be a tuple, actual type: <class 'None"),
    "no observation space": (with_space(Sound, None), "observation_space is None, not a gymnasium space"),
    "no action space": (with_space(Sound, None, "action_space"), "action_space is None, not a gymnasium space"),
    "observations of text": (with_space(Sound, gs.Text(3)), "cannot be held in tensors"),
    "actions of text": (with_space(Sound, gs.Text(3), "action_space"), "cannot be held in tensors"),
    "seed": (Unseeded, r"Two resets with seed 7 gave different observations.*self\.np_random"),
    "random elsewhere": (RandomElsewhere, "Two runs with seed 7 and the same actions differ from step 4 on"),
    "action": (Picky, r"AssertionError.*step\(\) must accept every action of action_space"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_told_once(name: str) -> None:
    env, told = MISTAKES[name]
    found = problems(env, seed=7)
    assert len([problem for problem in found if re.search(told, problem)]) == 1, found
    assert all(problem.endswith((".", ")")) for problem in found)
    assert len(found) == 1, found


def test_an_env_of_the_old_gym_hears_all_at_once() -> None:
    class Old(gym.Env[Any, Any]):
        observation_space = gs.Box(-1, 1, (2,), np.float32)
        action_space = gs.Discrete(2)

        def reset(self) -> Any:  # type: ignore[override]
            return np.zeros(2, np.float32)

        def step(self, action: Any) -> Any:
            return np.zeros(2, np.float32), 0.0, False, {}

    found = "\n".join(problems(Old()))
    assert "reset(seed=0) raised TypeError" in found
    assert "Declare reset(self, *, seed=None, options=None)" in found
    assert "`env.reset()` was not a tuple of the form `(obs, info)`" in found
    assert "old step API which returns one bool instead of two" in found


def test_counting_envs_remember_earlier_episodes() -> None:
    assert "different observations" in problems(CountingGymEnv())[0]


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_exception_is_told_with_its_place(where: str) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise ZeroDivisionError("by nothing")

    env = Sound()
    setattr(env, where, fail)
    with pytest.raises(EnvCheckError) as caught:
        check_env(env)
    [found] = caught.value.problems
    assert f"{where}(" in found
    assert "raised ZeroDivisionError" in found
    assert "test_check_gym.py" in found
    assert "by nothing" in found
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_end_that_is_not_taken_back() -> None:
    class Ended(Sound):
        over = False

        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, info = super().step(action)
            self.over = self.over or terminated
            return observation, reward, self.over, truncated, info

    assert any("The first episode took 6 steps, but each of the" in found for found in problems(Ended))


class Aliasing(Sound):
    def reset(self, **options: Any) -> Any:
        super().reset(**options)
        self.buffer = self.state.copy()
        return self.buffer, {}

    def step(self, action: Any) -> Any:
        self.buffer[:], *rest = super().step(action)
        return self.buffer, *rest


class Unprepared(Sound):
    """Nothing is wrong with it for swath; only gymnasium minds."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count, self.state = 0, np.zeros(2, np.float32)
        return self.state, {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return np.full(2, self.count, np.float32), np.array(1.0), self.count >= 6, np.bool_(False), {}


class Grabbing(Sound):
    action_space = gs.Box(-1, 1, (2,), np.float32)

    def step(self, action: Any) -> Any:
        action *= 2
        return super().step(action)


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (Aliasing, "returns the same array every time"),
        (Grabbing, "changed the action it was given"),
        (returning(observation=list), "was expecting a numpy array, actual type: <class 'list'>"),
        (returning(observation=lambda o: o.astype(np.float16)), "dtype to be float32, actual type: float16"),
        (Unprepared, "does not call `super"),
    ],
)
def test_what_is_only_doubtful_is_warned_of(env: Any, told: str) -> None:
    with pytest.warns(EnvCheckWarning, match=told) as caught:
        check_env(env)
    assert len([w for w in caught if w.category is EnvCheckWarning]) == 1


def test_the_error_lists_all_problems_by_number() -> None:
    env = returning(reward=None, info=3, observation=lambda o: o[:1])
    with pytest.raises(EnvCheckError) as caught:
        check_env(env)
    assert isinstance(caught.value, SwathError)
    assert isinstance(caught.value, ValueError)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("check_env found 3 problems in <Replaced")
    assert [line[:3] for line in lines[1:]] == ["1. ", "2. ", "3. "]


def test_what_a_factory_made_is_closed() -> None:
    made = []

    def make() -> Any:
        made.append(CountingGymEnv())
        return made[-1]

    with pytest.raises(EnvCheckError):
        check_env(make)
    assert [env.is_closed for env in made] == [True]
    env = CountingGymEnv()
    with pytest.raises(EnvCheckError):
        check_env(env)
    assert not env.is_closed


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="steps must be at least 1"):
        check_env(Sound, steps=0)
    with pytest.raises(TypeError, match="got str"):
        check_env("CartPole-v1")


# -- vector envs


class Vector(CountingVectorEnv):
    """A counting vector env that can be seeded: it counts from episode 0 again."""

    answer: Any = staticmethod(lambda *parts: parts)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self._episode[:] = -1
        return super().reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        return self.answer(*super().step(actions))


def vector_with(answer: Any, **metadata: Any) -> Any:
    body = {"answer": staticmethod(answer), "metadata": {"autoreset_mode": AutoresetMode.NEXT_STEP, **metadata}}
    return type("Changed", (Vector,), body)(2, lengths=[[3], [4]])


def test_a_sound_vector_env_passes() -> None:
    check_env(vector_with(lambda *parts: parts))


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (vector_with(lambda o, r, *rest: (o, r[:, None], *rest)), "reward.* must be a float.*ndarray"),
        (
            vector_with(lambda o, r, t, *rest: (o, r, t.astype(int), *rest)),
            "`terminated` signal to be a boolean.*int64",
        ),
        (vector_with(lambda o, *rest: (o[:1], *rest)), "without a lane 1 .*leading dimension num_envs=2"),
        (vector_with(lambda o, *rest: (o[:, :2], *rest)), r"observation of shape \(2,\)"),
        (vector_with(lambda o, r, t, *rest: (o, r, t[:, None], *rest)), "`terminated` signal to be a boolean.*ndarray"),
        (vector_with(lambda o, r, t, *rest: (o, r, np.r_[t, t], *rest)), "step.* raised ValueError.*broadcast"),
        (vector_with(lambda o, r, *rest: (o, r * np.nan, *rest)), "The reward is a NaN value"),
        (vector_with(lambda *parts: parts[:4]), "old step API which returns one bool"),
        (vector_with(lambda o, r, *rest: (o, r + 1, *rest)), "says NEXT_STEP, but .*gave a reward"),
        (vector_with(lambda *parts: parts, autoreset_mode=AutoresetMode.SAME_STEP), "no 'final_obs'"),
        (Vector.__mro__[1](2), "Two resets with seed 0"),
    ],
)
def test_mistakes_of_vector_envs(env: Any, told: str) -> None:
    found = problems(env)
    assert re.search(told, found[0]), found


def test_a_vector_env_that_says_no_mode_is_doubtful() -> None:
    env = vector_with(lambda *parts: parts)
    env.metadata = {}
    with pytest.warns(EnvCheckWarning, match="no 'autoreset_mode'"):
        check_env(env)
