"""Stages that call what has to be called: what it is given, and what is left for the end of the slot."""

from __future__ import annotations

from typing import Any
from unittest import mock

import policy_zoo as zoo
import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch import distributions as D

from swath.collectors import Collector


class Changing(nn.Module):
    """Changes what it is given, and keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = zoo.mlp(zoo.CHOICES)

    def forward(self, observation: Tensor) -> Tensor:
        wanted = self.net(observation.clone())
        observation.mul_(0.0)
        return wanted.softmax(-1).multinomial(1).squeeze(-1) * 0 + wanted.argmax(-1)


class Reshaping(nn.Module):
    """Gives what it is given another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.net = zoo.mlp(zoo.CHOICES)

    def forward(self, observation: Tensor) -> Tensor:
        observation.unsqueeze_(0)
        return self.net(observation).argmax(-1).squeeze(0)


def changing_function(tensordict: TensorDictBase) -> TensorDictBase:
    observation = tensordict["observation"]
    action = observation[..., : zoo.CHOICES].argmax(-1)
    observation.zero_()
    return tensordict.set("action", action)


@pytest.mark.parametrize("make", [Changing, Reshaping, lambda: changing_function])
def test_what_is_changed_by_the_policy_stays_as_it_was_for_all_others(make: Any) -> None:
    env = zoo.WaveEnv()
    policy = make()
    collector = Collector(env, policy, frames_per_batch=18, total_frames=54)
    for batch in collector:
        assert (batch["observation"] != 0).any(-1).all()
        if isinstance(policy, nn.Module):
            expected = policy.net(batch["observation"]).argmax(-1)
        else:
            expected = batch["observation"][..., : zoo.CHOICES].argmax(-1)
        assert torch.equal(batch["action"], expected)


def test_who_keeps_what_it_is_given_gets_copies_of_its_own() -> None:
    kept: list[Tensor] = []

    def policy(observation: Tensor) -> Tensor:
        kept.append(observation)
        return observation[..., : zoo.CHOICES].argmax(-1)

    for batch in Collector(zoo.WaveEnv(), policy, frames_per_batch=18, total_frames=18):
        assert torch.equal(torch.stack(kept[-6:], 1), batch["observation"])


# -- distributions that are looked at when the slot is complete -------------------------------------------------------


def _collector(policy: Any, steps: int = 6) -> Collector:
    space = zoo.CONTINUOUS if "loc" in policy.out_keys else zoo.DISCRETE
    frames = 3 * steps
    return Collector(zoo.WaveEnv(space), policy, frames_per_batch=frames, total_frames=3 * frames, fast_policy=False)


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("make", [zoo.discrete, lambda: zoo.continuous(D.Normal), lambda: zoo.continuous(D.Laplace)])
def test_log_probs_are_those_of_the_distribution(make: Any, steps: int) -> None:
    policy = make()
    collector = _collector(policy, steps)
    for batch in collector:
        params = {key: batch[key] for key in policy[-1].in_keys}
        expected = policy[-1].distribution_class(**params).log_prob(batch["action"])
        torch.testing.assert_close(batch["action_log_prob"], expected)
        assert not batch["action_log_prob"].is_inference()
    assert collector.policy_stages[-1] == "DistributionStage"


@pytest.mark.parametrize("steps", [1, 6])
def test_seeds_decide_as_they_do_for_the_module(steps: int) -> None:
    policy, frames = zoo.discrete(), 3 * steps
    actions = []
    for options in ({"fast_policy": False}, {"trust_policy": True}):
        torch.manual_seed(3)
        collector = Collector(zoo.WaveEnv(), policy, frames_per_batch=frames, total_frames=frames, **options)
        torch.manual_seed(3)
        actions += [batch["action"] for batch in collector]
    assert torch.equal(*actions)


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("make", [zoo.discrete, lambda: zoo.continuous(D.Normal)])
def test_parameters_that_cannot_be_are_refused(make: Any, steps: int) -> None:
    policy = make()
    collector = _collector(policy, steps)
    batches, env = iter(collector), collector.env
    next(batches)
    with torch.no_grad():
        next(policy.parameters()).fill_(float("nan"))
    is_spared = mock.patch.object(env, "step_into", side_effect=AssertionError("the env is given what cannot be"))
    with is_spared, pytest.raises(ValueError, match=r"[Ee]xpected parameter (logits|loc)"):
        next(batches)


def test_who_wants_no_check_gets_none() -> None:
    policy = zoo.continuous(D.Normal, distribution_kwargs={"validate_args": False})
    collector = _collector(policy)
    batches = iter(collector)
    next(batches)
    with torch.no_grad():
        policy[0].module[0].weight.fill_(float("nan"))
    assert next(batches)["action"].isnan().all()
