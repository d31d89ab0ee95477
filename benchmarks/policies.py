"""The networks, and the ordinary tensordict actor built around them.

The collectors are given the actor as a user would write it, with no hint of what is inside. The
loops written by hand call the same network and sample on their own (see `sampling.py`).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn


def mlp(inputs: int, outputs: int, hidden: int = 64, layers: int = 2) -> nn.Module:
    """obs-hidden-hidden-out with tanh."""
    sizes = [inputs, *[hidden] * layers]
    inner = [part for before, after in itertools.pairwise(sizes) for part in (nn.Linear(before, after), nn.Tanh())]
    return nn.Sequential(*inner, nn.Linear(hidden, outputs))


class _ToUnit(nn.Module):
    """Bytes to floats in 0..1, in the network: stored frames stay uint8."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.float() / 255.0


def cnn(channels: int, outputs: int) -> nn.Module:
    """Two convolutions and a hidden layer, half the width of the well-known Atari network."""
    return nn.Sequential(
        _ToUnit(),
        nn.Conv2d(channels, 16, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.Flatten(-3),
        nn.Linear(32 * 9 * 9, 256),
        nn.ReLU(),
        nn.Linear(256, outputs),
    )


def actor(net: nn.Module, action_high: float | None, tanh_normal: type | None) -> ProbabilisticTensorDictSequential:
    """Network, distribution, sample and log-prob as one tensordict actor.

    `tanh_normal` is the contestant's own class, as each library ships one: with it the peer is
    judged on its own code. It is not needed for discrete actions.
    """
    if action_high is None:
        return _probabilistic(
            TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
            in_keys=["logits"],
            distribution_class=torch.distributions.Categorical,
        )
    if tanh_normal is None:
        raise ValueError("continuous actions need a tanh-normal class")
    return _probabilistic(
        TensorDictModule(
            nn.Sequential(net, NormalParamExtractor()),
            in_keys=["observation"],
            out_keys=["loc", "scale"],
        ),
        in_keys=["loc", "scale"],
        distribution_class=tanh_normal,
        distribution_kwargs={"low": -action_high, "high": action_high},
    )


def _probabilistic(
    params: TensorDictModule, in_keys: list[str], distribution_class: type, **kwargs: Any
) -> ProbabilisticTensorDictSequential:
    head = ProbabilisticTensorDictModule(
        in_keys=in_keys,
        out_keys=["action"],
        distribution_class=distribution_class,
        return_log_prob=True,
        **kwargs,
    )
    return ProbabilisticTensorDictSequential(params, head)
