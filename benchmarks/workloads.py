"""What is collected: the workloads, each the same for every contestant.

W1 and W2 differ only in the number of envs: one env shows the cost of a step's overhead bare, eight
show how far it is shared. W3 adds continuous actions (float actions, tanh-normal sampling) and an
env that is itself slower. W6 moves 28 kB per observation through a network that matters. Several
processes are measured in `processes/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gymnasium as gym
from torch import nn

from benchmarks import pixels, policies


@dataclass(frozen=True)
class Workload:
    """One setting: which env, how many of it, which network, how many frames make a batch."""

    name: str
    title: str
    env_id: str
    num_envs: int
    frames_per_batch: int
    make_net: Callable[[], nn.Module]
    """The network from observation to distribution parameters (logits, or loc and raw scale)."""
    action_high: float | None = None
    """None for discrete actions; otherwise actions lie in [-action_high, action_high]."""

    @property
    def discrete(self) -> bool:
        return self.action_high is None

    @property
    def steps(self) -> int:
        """Time steps per batch."""
        return self.frames_per_batch // self.num_envs

    def make_env(self) -> gym.Env:
        """One env, as the loops that use gymnasium directly make it.

        The peer switches the passive checker off by default; so do the others, for equal envs.
        """
        return gym.make(self.env_id, disable_env_checker=True)


WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload("W1", "CartPole-v1, 1 env", "CartPole-v1", 1, 1000, lambda: policies.mlp(4, 2)),
        Workload("W2", "CartPole-v1, 8 envs", "CartPole-v1", 8, 1024, lambda: policies.mlp(4, 2)),
        # two outputs for one action: loc and scale
        Workload("W3", "Pendulum-v1, 8 envs", "Pendulum-v1", 8, 1024, lambda: policies.mlp(3, 2), 2.0),
        Workload("W6", "pixels 84x84x4, 8 envs", pixels.ENV_ID, 8, 512, lambda: policies.cnn(4, 6)),
    )
}


def get_workload(name: str) -> Workload:
    """The workload of that name, with its env registered."""
    pixels.register()
    try:
        return WORKLOADS[name]
    except KeyError:
        raise ValueError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}") from None
