"""Small policies that are called stay in their thread; everybody else has as many threads as before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest
import torch
from policy_zoo import CHOICES, THREADS, VECTOR, WaveEnv, mlp
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from swath.collectors import Collector
from swath.envs import EnvBase, GymEnv, SerialEnv
from swath.modules import call_context
from swath.modules.call_context import CallContext

pytestmark = [
    pytest.mark.skipif(call_context._numbers() is None, reason="torch was built without OpenMP"),
    pytest.mark.usefixtures("several_threads"),
]


def seen_elsewhere() -> int:
    """How many threads torch has for another one."""
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    return seen[0]


def in_own_thread(calls: list[Callable[..., object]]) -> list[Callable[..., object]]:
    return CallContext(one_thread=True, infers=False).of(calls)


def test_calls_have_one_thread_and_others_as_many_as_before() -> None:
    seen: list[Any] = []
    (call,) = in_own_thread([lambda: seen.append(torch.get_num_threads()), lambda: seen.append(seen_elsewhere())])
    call()
    assert seen == [1, THREADS]
    assert torch.get_num_threads() == THREADS


def test_what_a_call_is_given_reaches_each() -> None:
    seen: list[Any] = []
    (call,) = in_own_thread([lambda *given: seen.append(given)] * 2)
    call(1, 2)
    assert seen == [(1, 2), (1, 2)]


def test_the_number_comes_back_after_an_error_and_a_call_within() -> None:
    def fail() -> None:
        inner()
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError

    (inner,), (call,) = in_own_thread([lambda: None]), in_own_thread([fail])
    with pytest.raises(ZeroDivisionError):
        call()
    assert torch.get_num_threads() == THREADS


def test_nothing_is_done_about_one_thread() -> None:
    torch.set_num_threads(1)
    calls = [lambda: None]
    assert in_own_thread(calls) == calls


class Watching(nn.Module):
    """Notes how many threads it is called with; it counts, and so has to be called."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.seen = net, list[int]()

    def forward(self, observation: Tensor) -> Tensor:
        self.seen.append(torch.get_num_threads())
        return self.net(observation).argmax(-1)


def collected(policy: Any, lanes: int = 2, **options: Any) -> None:
    env = WaveEnv(observation_space=VECTOR, lengths=[7] * lanes)
    with Collector(env, policy, frames_per_batch=4 * lanes, total_frames=12 * lanes, **options) as collector:
        for _ in collector:
            assert torch.get_num_threads() == THREADS


@pytest.mark.parametrize("options", [{}, {"fast_policy": False}, {"trust_policy": True}], ids=str)
def test_a_small_policy_that_is_called_has_one_thread(options: dict[str, Any]) -> None:
    policy = Watching(mlp(CHOICES))
    collected(TensorDictModule(policy, ["observation"], ["action"]), **options)
    assert set(policy.seen[1:]) == {1}  # the first call finds out what it reads and writes


def test_so_has_a_function_that_uses_a_small_network() -> None:
    net, seen = mlp(CHOICES), list[int]()

    def act(tensordict: TensorDictBase) -> TensorDictBase:
        seen.append(torch.get_num_threads())
        return tensordict.set("action", net(tensordict["observation"]).argmax(-1))

    collected(act)
    assert set(seen[1:]) == {1}


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.net = nn.Conv1d(1, 2, 3, padding=1), mlp(CHOICES)

    def forward(self, observation: Tensor) -> Tensor:
        return self.net(self.conv(observation.float().unsqueeze(-2)).sum(-2))


@pytest.mark.parametrize(
    "make", [lambda: nn.Sequential(mlp(600), nn.Linear(600, CHOICES)), Convolving], ids=["wide", "conv"]
)
def test_what_may_be_more_work_has_all_threads(make: Callable[[], nn.Module]) -> None:
    policy = Watching(make())
    collected(policy, lanes=64)
    assert set(policy.seen) == {THREADS}


def test_the_number_comes_back_when_a_policy_fails() -> None:
    class Failing(Watching):
        def forward(self, observation: Tensor) -> Tensor:
            if len(self.seen) > 5:
                raise ZeroDivisionError
            return super().forward(observation)

    with pytest.raises(ZeroDivisionError):
        collected(Failing(mlp(CHOICES)))
    assert torch.get_num_threads() == THREADS


# -- around a slot -----------------------------------------------------------------------------------------------------


class Torchy(gym.Wrapper):  # type: ignore[type-arg]
    """Runs torch in its steps, and keeps what comes of it."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.seen, self.total = list[tuple[int, bool]](), torch.zeros(())

    def step(self, action: Any) -> Any:
        self.seen.append((torch.get_num_threads(), torch.is_inference_mode_enabled()))
        self.total = self.total + 1
        return super().step(action)


class Telling(nn.Module):
    """Tells in its results how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2, inputs=4)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        made = self.net(observation)
        return made.argmax(-1), torch.full(made.shape[:-1], torch.get_num_threads())


def entered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each time that a thread or torch's mode was changed."""
    times: list[int] = []
    enter = CallContext.__enter__
    monkeypatch.setattr(CallContext, "__enter__", lambda self: (times.append(1), enter(self))[1])
    return times


def telling() -> TensorDictModule:
    return TensorDictModule(Telling(), ["observation"], ["action", "threads"])


@pytest.mark.parametrize("make", [lambda: GymEnv("CartPole-v1"), lambda: SerialEnv(3, lambda: GymEnv("CartPole-v1"))])
def test_beside_envs_without_torch_they_are_changed_once_for_a_slot(
    make: Callable[[], EnvBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = entered(monkeypatch)
    with Collector(make(), telling(), frames_per_batch=30, total_frames=90) as collector:
        for number, batch in enumerate(collector):
            assert batch["threads"].eq(1).all()
            assert not any(entry.is_inference() for entry in batch.values(True, True))
            assert torch.get_num_threads() == THREADS
            assert not torch.is_inference_mode_enabled()
            assert len(times) == number + 1


def test_an_env_that_may_run_torch_is_not_concerned() -> None:
    inner = Torchy(gym.make("CartPole-v1"))
    env = GymEnv(inner)
    assert env.runs_torch
    with Collector(env, telling(), frames_per_batch=30, total_frames=90) as collector:
        for batch in collector:
            assert batch["threads"].eq(1).all()
    assert set(inner.seen) == {(THREADS, False)}
    assert not inner.total.is_inference()


def test_which_envs_may_run_torch() -> None:
    class Own(GymEnv):
        pass

    patched = gym.make("CartPole-v1")
    patched.unwrapped.step = lambda action: None  # type: ignore[method-assign]
    limited = gym.make("CartPole-v1")
    limited.step = lambda action: None  # type: ignore[method-assign, assignment, return-value]
    assert not GymEnv("CartPole-v1").runs_torch
    assert not GymEnv("CartPole-v1", num_envs=2).runs_torch
    assert not GymEnv(gym.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point")).runs_torch
    assert GymEnv(gym.make_vec("CartPole-v1", 2, vectorization_mode="sync")).runs_torch
    assert GymEnv(patched).runs_torch
    assert GymEnv(limited).runs_torch
    assert Own("CartPole-v1").runs_torch
    assert SerialEnv(2, [lambda: GymEnv("CartPole-v1"), lambda: Own("CartPole-v1")]).runs_torch
    assert WaveEnv(observation_space=VECTOR, lengths=[7]).runs_torch


def test_both_come_back_when_a_step_fails() -> None:
    class Failing(Telling):
        def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
            result = super().forward(observation)
            if bool(observation.abs().sum() > 1e-9) and self.fails:
                raise ZeroDivisionError
            return result

        fails = False

    policy = Failing()
    wrapped = TensorDictModule(policy, ["observation"], ["action", "threads"])
    with Collector(GymEnv("CartPole-v1"), wrapped, frames_per_batch=30, total_frames=-1) as collector:
        collector.next()
        policy.fails = True
        with pytest.raises(ZeroDivisionError):
            collector.next()
    assert torch.get_num_threads() == THREADS
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
