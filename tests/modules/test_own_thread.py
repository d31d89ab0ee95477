"""Small policies that are called stay in their thread; everybody else has as many threads as before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from policy_zoo import CHOICES, VECTOR, WaveEnv, mlp
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from swath.collectors import Collector
from swath.modules import own_thread
from swath.modules.own_thread import in_own_thread

THREADS = 3
pytestmark = pytest.mark.skipif(own_thread._numbers() is None, reason="torch was built without OpenMP")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def seen_elsewhere() -> int:
    """How many threads torch has for another one."""
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    return seen[0]


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
