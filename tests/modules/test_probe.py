"""A policy is called once before the first batch, to see what it writes. Nothing else tells of that call."""

import random
from typing import Any

import numpy as np
import policy_zoo as zoo
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn

from swath.collectors import Collector
from swath.envs import EnvBase


class Restless(nn.Module):
    """Uses up random numbers of all kinds, counts its calls, and changes its buffers in place and by replacing them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))
        self.register_buffer("grown", torch.zeros(0))
        self.register_buffer("none", None)

    def forward(self, observation: Tensor) -> Tensor:
        self.calls += 1
        self.total += 1
        self.last = torch.tensor(float(self.calls))
        self.grown = torch.ones(self.calls)
        noise = torch.rand(()) + np.random.rand() + random.random()
        return observation[..., : zoo.CHOICES] * noise


def random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]


@pytest.mark.parametrize("way", [{}, {"trust_policy": True}], ids=["ordinary", "trusted"])
def test_the_call_leaves_no_trace(way: dict[str, Any]) -> None:
    net = Restless()
    before = random_states()
    Collector(zoo.WaveEnv(), zoo.module(net), frames_per_batch=18, **way)
    assert random_states() == before
    assert net.calls == 1
    assert (net.total, net.last) == (0, 0)
    assert net.grown.shape == (0,)


def test_the_call_is_the_only_one_beside_those_of_the_steps() -> None:
    net = Restless()
    collector = Collector(zoo.WaveEnv(), zoo.module(net), frames_per_batch=18)
    for number in (1, 2, 3):
        collector.next()
        assert net.calls == 1 + 6 * number
        assert net.total == 6 * number


def test_buffers_of_batch_norm_stay() -> None:
    policy = zoo.module(nn.Sequential(nn.Linear(zoo.SIZE, 8), nn.BatchNorm1d(8), nn.Linear(8, zoo.CHOICES)))
    before = {name: buffer.clone() for name, buffer in policy.named_buffers()}
    Collector(zoo.WaveEnv(), policy, frames_per_batch=18)
    assert all(torch.equal(buffer, before[name]) for name, buffer in policy.named_buffers())


@pytest.mark.skipif(not zoo.HAS_GENERATORS, reason="an older tensordict")
def test_a_generator_of_the_policys_own_stays() -> None:
    generator = torch.Generator().manual_seed(5)
    policy = zoo.discrete(generator=generator)
    before = generator.get_state()
    Collector(zoo.WaveEnv(), policy, frames_per_batch=18)
    assert torch.equal(generator.get_state(), before)


def test_a_lazy_module_is_materialised_and_runs_fast() -> None:
    policy = zoo.discrete(net=nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(zoo.CHOICES)))
    collector = Collector(zoo.WaveEnv(), policy, frames_per_batch=18)
    assert policy[0].module[0].weight.shape == (8, zoo.SIZE)
    zoo.assert_agrees(policy, collector.next())
    assert zoo.stages_of(collector) == ("MLPStage", "CategoricalStage")


def test_a_lazy_module_with_buffers() -> None:
    policy = zoo.module(nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(zoo.CHOICES)))
    collector = Collector(zoo.WaveEnv(), policy, frames_per_batch=18)
    assert not policy.module[1].running_mean.any()
    collector.next()
    assert policy.module[1].running_mean.any()
    assert policy.module[1].num_batches_tracked == 6


def test_no_gradients_are_recorded() -> None:
    seen: list[bool] = []

    def policy(observation: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return observation[..., : zoo.CHOICES]

    batch = zoo.collect(policy)
    assert seen == [False] * 7
    assert not any(value.requires_grad for value in batch.values(True, True))


def test_a_policy_sees_the_first_observation() -> None:
    seen: list[Tensor] = []

    def policy(td: TensorDictBase) -> TensorDictBase:
        seen.append(td["observation"].clone())
        return td.set("action", td["observation"][..., : zoo.CHOICES])

    batch = zoo.collect(policy)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[1], batch["observation"][:, 0])


class Hoarder(nn.Module):
    """Keeps what it is given, and acts on the difference: what it keeps must not change behind its back."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, observation: Tensor) -> Tensor:
        self.kept.append(observation)
        return (observation - self.kept[max(0, len(self.kept) - 2)])[..., : zoo.CHOICES]


@pytest.mark.parametrize("way", [{}, {"trust_policy": True}], ids=["ordinary", "trusted"])
def test_what_a_policy_keeps_does_not_change(way: dict[str, Any]) -> None:
    hoarder = Hoarder()
    batch = zoo.collect(zoo.module(hoarder), **way)
    assert torch.equal(torch.stack(hoarder.kept[1:], 1), batch["observation"])
    assert torch.equal(batch["action"][:, 1:], batch["observation"].diff(dim=1)[..., : zoo.CHOICES])


class Stateless(EnvBase):
    """Knows nothing but the observation that it is given: each step adds one to it."""

    def __init__(self) -> None:
        super().__init__(zoo.VECTOR, zoo.DISCRETE, batch_size=(3,))

    def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        return TensorDict({"observation": torch.zeros(3, zoo.SIZE)}, [3])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        flags = torch.zeros(3, 1, dtype=torch.bool)
        return TensorDict(
            {"observation": tensordict["observation"] + 1, "reward": torch.zeros(3, 1), "done": flags}, [3]
        )


@pytest.mark.parametrize("way", [{}, {"trust_policy": True}], ids=["ordinary", "trusted"])
def test_what_a_policy_changes_in_place_is_its_own(way: dict[str, Any]) -> None:
    """The env's observation, which the next step may begin from, stays as it is."""
    batch = zoo.collect(zoo.module(lambda x: x.mul_(0)[..., : zoo.CHOICES]), Stateless(), **way)
    assert batch["observation"][0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert not batch["action"].any()


def test_the_probe_calls_a_sequence_as_a_whole() -> None:
    """So that whatever is done around its parts is seen."""
    policy = ProbabilisticTensorDictSequential(
        zoo.module(zoo.mlp(zoo.CHOICES), "logits"), zoo.sampler(torch.distributions.Categorical)
    )
    calls: list[str] = []
    policy.register_forward_hook(lambda *_: calls.append("whole"))
    policy[0].register_forward_hook(lambda *_: calls.append("part"))
    Collector(zoo.WaveEnv(), policy, frames_per_batch=18)
    assert calls == ["part", "whole"]
