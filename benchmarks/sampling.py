"""Sampling written out, for the loops that do without a library.

`torch.distributions` costs more per call than the small network before it, so a careful author
writes the two cases out: softmax and multinomial, or a reparametrised normal.
"""

from __future__ import annotations

import math

import torch
from tensordict.nn import NormalParamExtractor
from torch import Tensor, nn

from benchmarks.workloads import Workload

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Sampler:
    """The workload's network with its sampling. Call it inside `torch.inference_mode()`."""

    def __init__(self, workload: Workload, net: nn.Module) -> None:
        self.high = workload.action_high or 1.0
        # the same parametrisation of the scale as in the actor, or the work would not be the same
        self.net = net if workload.discrete else nn.Sequential(net, NormalParamExtractor())
        self.sample = self._categorical if workload.discrete else self._tanh_normal

    def _categorical(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        probs = torch.softmax(self.net(observation), -1)
        action = torch.multinomial(probs, 1)
        return action.squeeze(-1), probs.gather(-1, action).log_().squeeze(-1)

    def _tanh_normal(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        loc, scale = self.net(observation)
        noise = torch.randn_like(loc)
        squashed = torch.tanh(torch.addcmul(loc, scale, noise))
        # density of the noise, divided by how far scale, tanh and range stretch it
        stretch = (1.000001 - squashed.square()).mul_(scale).log_()
        log_prob = (noise.square_().mul_(-0.5) - stretch).sum(-1)
        log_prob -= (_HALF_LOG_2PI + math.log(self.high)) * loc.shape[-1]
        return squashed.mul_(self.high), log_prob
