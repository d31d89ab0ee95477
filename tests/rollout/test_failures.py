"""What goes wrong in an env, a policy or a hook reaches the user as it is, and leaves nothing open behind it."""

import gc
import sys
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from interrupting import at_every_instruction
from tensordict import TensorDictBase

from swath.collectors import Collector
from swath.envs import GymEnv, SerialEnv
from swath.envs.utils import ExplorationType, exploration_type
from swath.errors import ClosedError, NotANumberWarning, ShapeError
from swath.rollout.stats import RECENT_EPISODES
from swath.testing import CountingEnv, CountingGymEnv, FaultyError, FaultyGymEnv

HAS_NOTES = sys.version_info >= (3, 11)


def with_fault(lane: int = 1, lanes: int = 3, **fault: Any) -> tuple[SerialEnv, list[CountingGymEnv]]:
    """Counting envs, of which the one of `lane` goes wrong."""
    envs = [FaultyGymEnv(lane=i, **fault) if i == lane else CountingGymEnv(lane=i) for i in range(lanes)]
    return SerialEnv(lanes, [lambda env=env: GymEnv(env) for env in envs]), envs


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def assert_is_shut_down(collector: Collector, envs: list[CountingGymEnv] = ()) -> None:  # type: ignore[assignment]
    assert collector.closed
    assert collector.env.is_closed
    assert all(env.is_closed for env in envs)
    collector.shutdown()
    for use in (collector.next, collector.rollout, lambda: list(collector)):
        with pytest.raises(ClosedError):
            use()


Drive = Callable[[Collector], Any]
DRIVES: dict[str, Drive] = {
    "for": lambda collector: list(collector),
    "next": lambda collector: [collector.next() for _ in range(9)],
    "rollout": lambda collector: [collector.rollout() for _ in range(9)],
}


@pytest.mark.parametrize("drive", sorted(DRIVES))
@pytest.mark.parametrize("where", ["step", "reset"])
def test_an_env_that_raises(where: str, drive: str) -> None:
    env, envs = with_fault(where=where, at=3)
    collector = Collector(env, None, frames_per_batch=12, total_frames=120)
    with pytest.raises(FaultyError) as caught:
        DRIVES[drive](collector)
    assert caught.value.lane == 1
    assert str(caught.value) == "the env of lane 1 fails at step 3, as it was told"
    if HAS_NOTES:
        assert f"{where}(" in notes(caught.value)
        assert "lane 1" in notes(caught.value)
    assert_is_shut_down(collector, envs)


def test_an_env_that_raises_in_the_first_reset() -> None:
    env, envs = with_fault(where="reset", at=1)
    with pytest.raises(FaultyError) as caught:
        Collector(lambda: env, None, frames_per_batch=12)
    if HAS_NOTES:
        assert "lane 1" in notes(caught.value)
    assert all(env.is_closed for env in envs)


def test_an_env_that_raises_while_it_is_made() -> None:
    with pytest.raises(FaultyError):
        Collector(lambda: GymEnv(FaultyGymEnv(where="init", at=1)), None, frames_per_batch=12)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("drive", sorted(DRIVES))
def test_an_interrupt_inside_a_step(kind: type[BaseException], drive: str) -> None:
    class Interrupted(CountingGymEnv):
        def step(self, action: Any) -> Any:
            if self.count == 2:
                raise kind
            return super().step(action)

    env = Interrupted()
    collector = Collector(GymEnv(env), None, frames_per_batch=12)
    with pytest.raises(kind):
        DRIVES[drive](collector)
    assert_is_shut_down(collector, [env])


class PolicyError(Exception):
    pass


def test_a_policy_that_raises() -> None:
    calls = 0

    def policy(td: TensorDictBase) -> TensorDictBase:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise PolicyError("in call 21")
        return td.set("action", torch.zeros(*td.batch_size, 2))

    env = CountingGymEnv()
    collector = Collector(GymEnv(env), policy, frames_per_batch=12)
    with pytest.raises(PolicyError, match="in call 21"):
        list(collector)
    assert_is_shut_down(collector, [env])


def test_a_policy_that_raises_in_its_first_call() -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        raise PolicyError("at once")

    env = CountingGymEnv()
    with pytest.raises(PolicyError, match="at once"):
        Collector(lambda: GymEnv(env), policy, frames_per_batch=12)
    assert env.is_closed


class HookError(Exception):
    pass


class Third:
    """A hook, or an interruptor, that raises in its third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: Any = None) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise HookError("in the third call")
        return batch

    def collection_stopped(self) -> bool:
        return bool(self())


@pytest.mark.parametrize("name", ["pre_collect_hook", "post_collect_hook", "postproc", "interruptor"])
@pytest.mark.parametrize("drive", ["for", "next"])
def test_a_hook_that_raises(name: str, drive: str) -> None:
    env = CountingGymEnv()
    collector = Collector(GymEnv(env), None, frames_per_batch=4, total_frames=40, **{name: Third()})
    with pytest.raises(HookError, match="in the third call"):
        DRIVES[drive](collector)
    assert_is_shut_down(collector, [env])


def test_an_env_that_fails_to_close_does_not_hide_why_it_was_closed() -> None:
    class Stubborn(FaultyGymEnv):
        def close(self) -> None:
            raise OSError("will not close")

    collector = Collector(GymEnv(Stubborn(at=3)), None, frames_per_batch=4)
    with pytest.raises(FaultyError):
        list(collector)
    assert collector.closed
    collector.shutdown()
    honest = Collector(GymEnv(Stubborn(at=10**9)), None, frames_per_batch=4)
    with pytest.raises(OSError, match="will not close"):
        honest.shutdown()
    honest.shutdown()


def test_random_generators_are_put_back_after_an_error() -> None:
    env, _ = with_fault(at=3)
    collector = Collector(env, None, frames_per_batch=12)
    collector.set_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(FaultyError):
        list(collector)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("uses_next", [False, True])
def test_the_env_of_a_forgotten_collector_is_closed_with_it(uses_next: bool) -> None:
    collector = Collector(GymEnv(CountingGymEnv, num_envs=2), None, frames_per_batch=4)
    env = collector.env.gym_envs[0]
    if uses_next:
        collector.next()
    else:
        for _ in collector:
            break
    del collector
    gc.collect()
    assert env.is_closed


def test_leaving_a_loop_by_an_error_of_ones_own_leaves_the_collector_usable() -> None:
    env = CountingGymEnv(lengths=100)
    collector = Collector(GymEnv(env), None, frames_per_batch=4)

    def train() -> None:
        for _ in collector:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert not env.is_closed
    batch = collector.next()
    assert batch.get("observation")[:, 2].tolist() == [4, 5, 6, 7]
    collector.shutdown()


# -- wrong values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "key"), [("nan", "observation"), ("nan_reward", "reward")])
@pytest.mark.parametrize("options", [{}, {"compact_obs": True}], ids=["", "compact_obs"])
def test_nan_is_told_once_with_key_and_lane(fault: str, key: str, options: dict[str, Any]) -> None:
    class Again(FaultyGymEnv):
        """Fails in every episode."""

        def reset(self, **options: Any) -> Any:
            self.calls["step"] = 0
            return super().reset(**options)

    envs = [CountingGymEnv(0), Again(lane=1, fault=fault, at=3)]
    collector = Collector(
        SerialEnv(2, [lambda env=env: GymEnv(env) for env in envs]),
        None,
        frames_per_batch=8,
        total_frames=200,
        **options,
    )
    with pytest.warns(NotANumberWarning) as caught:
        batches = list(collector)
    (warning,) = [w for w in caught if w.category is NotANumberWarning]
    assert "lane 1" in str(warning.message)
    assert repr(key) in str(warning.message)
    assert len(batches) == 25, "it is delivered as it is"
    assert collector.stats()["frames"] == 200


@pytest.mark.parametrize("steps", [1, 2, 10])
@pytest.mark.parametrize("options", [{}, {"compact_obs": True}, {"set_truncated": True}], ids=str)
def test_nan_in_the_first_observation_of_an_episode_is_told(steps: int, options: dict[str, Any]) -> None:
    """Whether the episode begins in the middle of a batch or with it."""
    env, _ = with_fault(lane=2, fault="nan", where="reset", at=2)
    with pytest.warns(NotANumberWarning, match="lane 2"):
        list(Collector(env, None, frames_per_batch=3 * steps, total_frames=60, **options))


@pytest.mark.parametrize("steps", [1, 4])
def test_nan_in_the_first_observation_after_a_reset_by_hand_is_told(steps: int) -> None:
    env, _ = with_fault(lane=2, fault="nan", where="reset", at=2, lengths=100)
    collector = Collector(env, None, frames_per_batch=3 * steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collector.next()
        collector.next()
        collector.reset()
    with pytest.warns(NotANumberWarning, match="lane 2"):
        collector.next()
    collector.shutdown()


@pytest.mark.parametrize("steps", [1, 4, 3000])
@pytest.mark.parametrize(("dtype", "value"), [(np.float16, 6e4), (np.float32, 1e30), (np.float64, 1e300)])
@pytest.mark.filterwarnings("error")
def test_nothing_is_said_of_large_numbers(dtype: Any, value: float, steps: int) -> None:
    env = CountingGymEnv(0, lengths=50)
    large = gym.wrappers.TransformObservation(
        env, lambda seen: np.full(3, value, dtype), gym.spaces.Box(-np.inf, np.inf, (3,), dtype)
    )
    with Collector(GymEnv(large), None, frames_per_batch=steps) as collector:
        for _ in range(2):
            assert (collector.next()["observation"] == dtype(value)).all()


def test_nan_in_two_keys_is_told_for_each() -> None:
    envs = [FaultyGymEnv(lane=0, fault="nan", at=3), FaultyGymEnv(lane=1, fault="nan_reward", at=20)]
    collector = Collector(
        SerialEnv(2, [lambda env=env: GymEnv(env) for env in envs]), None, frames_per_batch=8, total_frames=80
    )
    with pytest.warns(NotANumberWarning) as caught:
        list(collector)
    told = [str(w.message) for w in caught if w.category is NotANumberWarning]
    assert ["lane 0" in told[0], "lane 1" in told[1], len(told)] == [True, True, 2]


def test_a_nan_reward_spoils_only_its_own_episode() -> None:
    env, _ = with_fault(lane=0, lanes=1, fault="nan_reward", at=3)
    collector = Collector(env, None, frames_per_batch=5, total_frames=5 * (RECENT_EPISODES + 1))
    with pytest.warns(NotANumberWarning):
        means = [collector.stats()["mean_return"] for _ in collector]
    assert np.isnan(means[:-1]).all()
    assert means[-1] == 15.0, "the mean of the last ones, of which it is none"


def test_honest_envs_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(Collector(CountingEnv((2,)), None, frames_per_batch=8, total_frames=40))


@pytest.mark.parametrize("where", ["step", "reset"])
@pytest.mark.parametrize(
    ("fault", "error", "told"),
    [("shape", ShapeError, r"lane 1 .*'observation'.*\(4,\).*\(3,\)"), ("dtype", (TypeError, ValueError), None)],
)
def test_a_wrong_observation_is_an_error(fault: str, error: Any, told: str | None, where: str) -> None:
    env, envs = with_fault(fault=fault, where=where, at=3)
    collector = Collector(env, None, frames_per_batch=12, total_frames=120)
    with pytest.raises(error, match=told) as caught:
        list(collector)
    if HAS_NOTES:
        assert "lane 1" in str(caught.value) + notes(caught.value)
    assert_is_shut_down(collector, envs)


def test_an_interrupt_at_any_instruction_leaves_gradients_and_exploration_as_they_were() -> None:
    made: list[Collector] = []

    def make() -> None:
        made[:] = [Collector(GymEnv(CountingGymEnv(0, lengths=5)), torch.nn.Linear(3, 2), frames_per_batch=1)]
        made[0].next()

    def check() -> None:
        assert torch.is_grad_enabled()
        assert exploration_type() is before
        made[0].shutdown()
        make()

    before = exploration_type()
    make()
    assert at_every_instruction(lambda: made[0].next(), check) > 150
    made[0].shutdown()


class Looking(gym.Wrapper[Any, Any, Any, Any]):
    """Has observations made by a network, which it did not have when it was given to the collector."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.net, self.inner = torch.nn.Linear(4, 4), env.unwrapped.reset

    def seen(self, **options: Any) -> Any:
        observation, info = self.inner(**options)
        return self.net(torch.as_tensor(observation)).numpy(), info


@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_that_was_put_in_the_place_of_gymnasiums_knows_how_to_explore(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, step = list[Any](), CartPoleEnv.step

    def watched(self: Any, action: Any) -> Any:
        seen.append(exploration_type())
        return step(self, action)

    monkeypatch.setattr(CartPoleEnv, "step", watched)
    with Collector(GymEnv("CartPole-v1"), torch.nn.Linear(4, 2), frames_per_batch=steps) as collector:
        for _ in range(4):
            collector.next()
    assert set(seen) == {ExplorationType.RANDOM}


@pytest.mark.parametrize("steps", [1, 3])
def test_the_code_of_an_env_runs_without_gradients_whatever_it_is_replaced_by(steps: int) -> None:
    env = gym.make("CartPole-v1", disable_env_checker=True)
    with Collector(GymEnv(env), torch.nn.Linear(4, 2), frames_per_batch=steps) as collector:
        for _ in range(4):
            collector.next()
        env.unwrapped.reset = Looking(env).seen  # type: ignore[method-assign]
        episodes = collector.stats()["episodes"]
        while collector.stats()["episodes"] < episodes + 3:
            assert not collector.next()["observation"].requires_grad
