"""Policies as the loop by hand calls them, for exactly one setting each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor
from torch import Tensor, distributions, nn

from benchmarks.cliffs.actors import (
    EPSILON,
    HIDDEN,
    POLICIES,
    SIGMA,
    Agent,
    Bounded,
    OwnForward,
    Strange,
    drawn,
    written_out,
)
from benchmarks.cliffs.workloads import Cliff
from benchmarks.sampling import Sampler

Sample = Callable[[Tensor], tuple[Tensor, Tensor]]


def sampler(cliff: Cliff, net: nn.Module) -> Sample:
    """What draws an action for observations, and says how likely it was."""
    if cliff.policy == "cleanrl":
        agent, kept = Agent(net), torch.empty(cliff.envs, 1).numpy()

        def acted(observation: Tensor) -> tuple[Tensor, Tensor]:
            action, log_prob, value = agent(observation)
            kept[:] = value.numpy()
            return action, log_prob

        return acted
    if cliff.policy == "random":
        nothing = torch.zeros(cliff.envs)
        return lambda observation: (torch.randint(2, (cliff.envs,)), nothing)
    if cliff.policy == "independent_normal":
        head = nn.Sequential(net, NormalParamExtractor())

        def normal(observation: Tensor) -> tuple[Tensor, Tensor]:
            loc, scale = head(observation)
            noise = torch.randn_like(loc)
            return torch.addcmul(loc, scale, noise), (noise.square().mul_(-0.5) - scale.log() - 0.9189385).sum(-1)

        return normal
    if cliff.policy == "lstm":
        return Remembering(cliff.envs)
    if cliff.policy == "q_values":
        return partial(_q_values, net, torch.zeros(cliff.envs))
    if cliff.policy == "additive":
        return partial(_additive, Bounded(net), torch.zeros(cliff.envs))
    if is_called(cliff):
        return _called(POLICIES[cliff.policy](net), cliff.envs)
    if cliff.options.get("fast_policy") is False:
        return lambda observation: drawn(distributions.Categorical(logits=net(observation)))
    if cliff.policy == "own_forward":
        net = OwnForward(net)
    if cliff.policy == "foreign_value":
        known, head = Sampler(cliff.collected, net).sample, Strange()
        values = torch.empty(cliff.envs, 1).numpy()

        def valued(observation: Tensor) -> tuple[Tensor, Tensor]:
            values[:] = head(observation).numpy()
            return known(observation)

        return valued
    return Sampler(cliff.collected, net).sample


def is_called(cliff: Cliff) -> bool:
    return bool(cliff.options.get("trust_policy")) or cliff.policy in ("function", "hooked")


def _called(policy: Any, lanes: int) -> Sample:
    """A policy on TensorDicts that cannot be looked into is called, by hand too: with one TensorDict that stays."""
    request = TensorDict({}, [lanes])

    def sample(observation: Tensor) -> tuple[Tensor, Tensor]:
        answer = policy(request.set("observation", observation))
        return answer.get("action"), answer.get("action_log_prob")

    return sample


class Remembering:
    """An LSTM that is called for one step at a time; its memory is cleared where an episode begins."""

    def __init__(self, lanes: int) -> None:
        self.lstm, self.head = nn.LSTM(4, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 2)
        self.memory = torch.zeros(1, lanes, HIDDEN), torch.zeros(1, lanes, HIDDEN)

    def __call__(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        seen, self.memory = self.lstm(observation.unsqueeze(1), self.memory)
        return written_out(self.head, seen.squeeze(1))

    def forget(self, lane: int) -> None:
        for one in self.memory:
            one[:, lane] = 0.0


def _q_values(net: nn.Module, nothing: Tensor, observation: Tensor) -> tuple[Tensor, Tensor]:
    values = net(observation)
    is_random = torch.rand(len(values)) < EPSILON
    return torch.where(is_random, torch.randint(2, (len(values),)), values.argmax(-1)), nothing


def _additive(net: nn.Module, nothing: Tensor, observation: Tensor) -> tuple[Tensor, Tensor]:
    loc = net(observation)
    return (loc + SIGMA * torch.randn_like(loc)).clamp_(-2.0, 2.0), nothing
