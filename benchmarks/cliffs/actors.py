"""Policies as users hand them to a collector: each as a loop by hand calls it is in `actors_by_hand`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, distributions, nn

from benchmarks import policies

HIDDEN = 64
"""Numbers that a recurrent network remembers, of each kind."""
EPSILON, SIGMA = 0.1, 0.2
"""How often actions are random, and how far they are from what the network says."""


class Agent(nn.Module):
    """An actor and a critic in the manner of CleanRL: it samples by itself."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.critic = net, policies.mlp(4, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *drawn(distributions.Categorical(logits=self.net(observation))), self.critic(observation)


class Strange(nn.Module):
    """A value head that no library can know: it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = policies.mlp(4, 1), 0

    def forward(self, observation: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(observation) * 2.0


def _independent(net: nn.Module) -> Any:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Sequential(net, NormalParamExtractor()), ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["action"], distribution_class=_independent_normal, return_log_prob=True
        ),
    )


def _independent_normal(loc: Tensor, scale: Tensor) -> distributions.Distribution:
    return distributions.Independent(distributions.Normal(loc, scale), 1)


def _torchrl_actor(net: nn.Module) -> Any:
    from torchrl.modules import ProbabilisticActor

    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=distributions.Categorical,
        return_log_prob=True,
    )


def _tanh_normal(net: nn.Module) -> Any:
    from swath.modules import TanhNormal

    return policies.actor(net, 2.0, TanhNormal)


def _hooked(net: nn.Module) -> Any:
    actor = policies.actor(net, None, None)
    actor.register_forward_hook(lambda *_: None)
    return actor


class OnTensorDict:
    """Takes a TensorDict, reads and writes what it likes, and samples by itself."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        action, log_prob = written_out(self.net, tensordict["observation"])
        return tensordict.set("action", action).set("action_log_prob", log_prob)


def written_out(net: nn.Module, observation: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax and multinomial, as `benchmarks.sampling` has it."""
    return chosen_from(net(observation))


def chosen_from(logits: Tensor) -> tuple[Tensor, Tensor]:
    probs = torch.softmax(logits, -1)
    action = torch.multinomial(probs, 1)
    return action.squeeze(-1), probs.gather(-1, action).log_().squeeze(-1)


def drawn(chosen: distributions.Distribution) -> tuple[Tensor, Tensor]:
    """What is drawn, and how likely it was."""
    action = chosen.sample()
    return action, chosen.log_prob(action)


class OwnForward(nn.Module):
    """The network as most people write one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.one, _, self.two, _, self.three = net

    def forward(self, observation: Tensor) -> Tensor:
        x = torch.tanh(self.one(observation))
        x = torch.tanh(self.two(x))
        return self.three(x)


def _lstm(net: nn.Module) -> Any:
    from torchrl.modules import LSTMModule

    memory = LSTMModule(input_size=4, hidden_size=HIDDEN, in_key="observation", out_key="seen")
    return _categorical(memory, TensorDictModule(nn.Linear(HIDDEN, 2), ["seen"], ["logits"]))


def _categorical(*parts: Any) -> Any:
    head = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=distributions.Categorical, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential(*parts, head)


def _q_values(net: nn.Module) -> Any:
    from torchrl.data import Categorical
    from torchrl.modules import EGreedyModule, QValueActor

    actor = QValueActor(net, in_keys=["observation"], spec=Categorical(2), action_space="categorical")
    return TensorDictSequential(actor, EGreedyModule(Categorical(2), eps_init=EPSILON, eps_end=EPSILON))


class Bounded(nn.Module):
    """A deterministic actor, of which the last layer's first number counts."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, observation: Tensor) -> Tensor:
        return 2.0 * torch.tanh(self.net(observation)[..., :1])


def _additive(net: nn.Module) -> Any:
    from torchrl.data import Bounded as Space
    from torchrl.modules import AdditiveGaussianModule

    noise = AdditiveGaussianModule(Space(-2.0, 2.0, (1,)), sigma_init=SIGMA, sigma_end=SIGMA)
    return TensorDictSequential(TensorDictModule(Bounded(net), ["observation"], ["action"]), noise)


class PixelsAndState(nn.Module):
    """A network for images and numbers together."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.state = policies.cnn(4, HIDDEN), nn.Linear(4, HIDDEN)
        self.head = nn.Linear(2 * HIDDEN, 6)

    def forward(self, pixels: Tensor, state: Tensor) -> Tensor:
        return self.head(torch.relu(torch.cat([self.pixels(pixels), self.state(state)], -1)))


def _with_value(net: nn.Module, head: nn.Module) -> Any:
    actor = policies.actor(net, None, None)
    return ProbabilisticTensorDictSequential(*actor, TensorDictModule(head, ["observation"], ["state_value"]))


POLICIES: dict[str, Callable[[nn.Module], Any]] = {
    "actor": lambda net: policies.actor(net, None, None),
    "torchrl_actor": _torchrl_actor,
    "tanh_normal": _tanh_normal,
    "independent_normal": _independent,
    "hooked": _hooked,
    "cleanrl": lambda net: TensorDictModule(Agent(net), ["observation"], ["action", "action_log_prob", "state_value"]),
    "random": lambda net: None,
    "foreign_value": lambda net: _with_value(net, Strange()),
    "function": OnTensorDict,
    "own_forward": lambda net: policies.actor(OwnForward(net), None, None),
    "lstm": _lstm,
    "q_values": _q_values,
    "additive": _additive,
    "dict": lambda net: _categorical(TensorDictModule(net, ["pixels", "state"], ["logits"])),
    "plain_value": lambda net: _with_value(net, policies.mlp(4, 1)),
}
