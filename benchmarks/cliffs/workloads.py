"""Settings in which a library may fall behind the loop that a careful user writes for exactly that: one line each.

Everything is CartPole-v1, or Pendulum-v1 where actions are continuous: the cheaper the env, the more what is around it
counts. No thread variable is set, as nobody sets one. Names that end in "b" are the same with a core kept busy by
another process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import policies
from benchmarks.cliffs import dict_env
from benchmarks.figures import FRAMES, Figure
from benchmarks.workloads import Workload


@dataclass(frozen=True)
class Cliff:
    """One setting."""

    name: str
    title: str
    envs: int = 16
    frames: int = 1024
    policy: str = "actor"
    """Which of `contestants.POLICIES` acts."""
    hidden: int = 64
    layers: int = 2
    env: str = "gym"
    """Or "tensor", an EnvBase of the user's own in torch, "vector", gymnasium's vectorised CartPole, or "dict"."""
    into: str = "batch"
    """Or "buffer": each batch is written to a replay buffer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the Collector."""
    beside: str = "handwritten"
    """Whom it is held against,"""
    also: tuple[str, ...] = ()
    """and who else."""
    is_busy: bool = False

    figures: tuple[Figure, ...] = (FRAMES,)

    @property
    def has_all_frames(self) -> bool:
        """Whether there are `frames` in every batch, so that nobody has to count them."""
        return not {"trajs_per_batch", "split_trajs"} & self.options.keys()

    @property
    def is_discrete(self) -> bool:
        return self.policy not in ("tanh_normal", "independent_normal", "additive")

    @property
    def contestants(self) -> tuple[str, ...]:
        peer = ("peer",) if self.name.rstrip("b") in WITH_PEER else ()
        return ("swath", self.beside, *self.also, *peer)

    @property
    def collected(self) -> Workload:
        """The same as the loop by hand knows it."""
        if self.env == "dict":
            return dict_env.workload(self.name, self.title, self.envs, self.frames)
        if self.is_discrete:
            net = lambda: policies.mlp(4, 2, self.hidden, self.layers)  # noqa: E731
            return Workload(self.name, self.title, "CartPole-v1", self.envs, self.frames, net)
        net = lambda: policies.mlp(3, 2, self.hidden)  # noqa: E731
        return Workload(self.name, self.title, "Pendulum-v1", self.envs, self.frames, net, 2.0)


WITH_PEER = ("C01", "C02")
_CLIFFS = (
    Cliff("C01", "16 envs, MLP 2x256", hidden=256),
    Cliff("C02", "1 env, a batch for each step", envs=1, frames=1),
    Cliff("C03", "1 env, a batch for each step, into a buffer", envs=1, frames=1, into="buffer"),
    Cliff("C04", "16 envs, a batch for each step", frames=16),
    Cliff("C05", "16 envs, a batch for each step, into a buffer", frames=16, into="buffer"),
    Cliff("C06", "16 envs, into a buffer step by step", into="buffer", options={"extend_buffer": False}),
    Cliff("C07", "TorchRL's ProbabilisticActor, 16 envs", policy="torchrl_actor"),
    Cliff("C08", "TorchRL's ProbabilisticActor, 1 env", envs=1, frames=1000, policy="torchrl_actor"),
    Cliff("C09", "TanhNormal, 16 Pendulums", policy="tanh_normal"),
    Cliff("C10", "Independent(Normal), 16 Pendulums", policy="independent_normal"),
    Cliff("C11", "a policy that is not looked into", options={"trust_policy": True}),
    Cliff("C12", "a forward hook on the policy", policy="hooked"),
    Cliff("C13", "a module that samples and returns (action, log-prob, value)", policy="cleanrl"),
    Cliff("C14", "fast_policy=False", options={"fast_policy": False}),
    Cliff("C15", "random actions", policy="random"),
    Cliff("C16", "10 whole episodes at a time", options={"trajs_per_batch": 10}, also=("swath_plain",)),
    Cliff("C17", "split into episodes", options={"split_trajs": True}, also=("swath_plain",)),
    Cliff("C18", "compile_policy=True, 4 envs", envs=4, options={"compile_policy": True}, also=("swath_plain",)),
    Cliff("C19", "a foreign module behind the actor", policy="foreign_value", also=("swath_plain",)),
    Cliff("C20", "a function on TensorDicts", policy="function"),
    Cliff("C21", "a network with a forward of its own", policy="own_forward"),
    Cliff("C22", "an EnvBase of one's own in torch, 256 lanes", envs=256, frames=16_384, env="tensor"),
    Cliff("C23", "an EnvBase of one's own in torch, 1,024 lanes", envs=1024, frames=65_536, env="tensor"),
    Cliff("C24", "gymnasium's vectorised CartPole, 256 lanes", envs=256, frames=16_384, env="vector"),
    Cliff("C25", "gymnasium's vectorised CartPole, 1,024 lanes", envs=1024, frames=65_536, env="vector"),
    Cliff("C26", "TorchRL's LSTMModule, 16 envs", policy="lstm"),
    Cliff("C27", "TorchRL's LSTMModule, 1 env", envs=1, frames=1000, policy="lstm"),
    Cliff("C28", "TorchRL's AdditiveGaussianModule, 16 Pendulums", policy="additive"),
    Cliff("C29", "TorchRL's QValueActor and EGreedyModule, 1 env", envs=1, frames=1000, policy="q_values"),
    Cliff("C30", "the same, a batch for each step, into a buffer", envs=1, frames=1, policy="q_values", into="buffer"),
    Cliff("C31", "images and numbers, with a network of one's own, 8 envs", 8, 512, "dict", env="dict"),
    Cliff("C32", "16 envs, MLP 4x1024", hidden=1024, layers=4),
)
WORKLOADS: dict[str, Cliff] = {
    cliff.name: cliff
    for one in _CLIFFS
    for cliff in (one, replace(one, name=f"{one.name}b", title=f"{one.title}; a core is busy", is_busy=True))
}
