"""Who takes part: swath's Collector as the setting asks for it, and what it is held against."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_interaction_type,
)
from torch import Tensor, distributions, nn

from benchmarks import policies
from benchmarks.batch import Run
from benchmarks.cliffs import episodes_by_hand, tensor_env
from benchmarks.cliffs.workloads import Cliff
from benchmarks.contestants import handwritten as by_hand
from benchmarks.sampling import Sampler

CONTESTANTS: dict[str, str] = {
    "swath": "swath's Collector over GymEnv",
    "handwritten": "a careful loop over gymnasium envs for exactly this setting; into a ring of arrays for a buffer",
    "swath_plain": "swath's Collector without what the setting adds",
    "peer": "TorchRL's Collector over its SerialEnv, or one env",
}
CAPACITY = 100_000


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
    probs = torch.softmax(net(observation), -1)
    action = torch.multinomial(probs, 1)
    return action.squeeze(-1), probs.gather(-1, action).log_().squeeze(-1)


class OwnForward(nn.Module):
    """The network as most people write one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.one, _, self.two, _, self.three = net

    def forward(self, observation: Tensor) -> Tensor:
        x = torch.tanh(self.one(observation))
        x = torch.tanh(self.two(x))
        return self.three(x)


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
    "plain_value": lambda net: _with_value(net, policies.mlp(4, 1)),
}


# -- swath -----------------------------------------------------------------------------------------------------------


def swath(cliff: Cliff) -> Run:
    from swath.collectors import Collector
    from swath.data import LazyTensorStorage, ReplayBuffer
    from swath.envs import GymEnv, SerialEnv

    torch.manual_seed(0)
    workload, options = cliff.collected, dict(cliff.options)
    make = partial(GymEnv, workload.env_id, categorical_action_encoding=True)
    if cliff.env != "gym":
        env: Any = tensor_env.own_env(cliff.envs)
        if cliff.env == "vector":
            env = GymEnv(tensor_env.make_vector(cliff.envs), categorical_action_encoding=True)
    else:
        env = make() if cliff.envs == 1 else SerialEnv(cliff.envs, make)
    if cliff.into == "buffer":
        options["replay_buffer"] = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=32)
    policy = POLICIES[cliff.policy](workload.make_net())
    collector = Collector(env, policy, frames_per_batch=cliff.frames, total_frames=-1, **options)
    return _over(iter(collector), cliff, collector.shutdown)


def swath_plain(cliff: Cliff) -> Run:
    policy = "plain_value" if cliff.policy == "foreign_value" else cliff.policy
    return swath(replace(cliff, options={}, policy=policy))


def _over(batches: Iterator[Any], cliff: Cliff, close: Callable[[], None]) -> Run:
    last: list[Any] = []
    frames, has_all_frames = cliff.frames, cliff.has_all_frames

    def collect() -> int:
        last.clear()
        last.append(next(batches))
        if last[0] is None or has_all_frames:
            return frames
        mask = last[0].get(("collector", "mask"), None)
        return int(last[0].numel()) if mask is None else int(np.count_nonzero(mask.numpy()))

    return Run(collect, close=close)


# -- by hand ---------------------------------------------------------------------------------------------------------


def handwritten(cliff: Cliff) -> Run:
    torch.manual_seed(0)
    workload = cliff.collected
    net = workload.make_net()
    if cliff.options.get("compile_policy"):
        net = torch.compile(net)  # in the first call, before the clock starts
    if cliff.env != "gym":
        build = tensor_env.by_hand if cliff.env == "tensor" else tensor_env.vector_by_hand
        return build(cliff, _sample(cliff, net))
    run = by_hand.build(workload, net, sample=_sample(cliff, net))
    if _is_called(cliff):  # tensordict's actors take the most likely action if they are not told to draw one
        run = replace(run, collect=set_interaction_type(InteractionType.RANDOM)(run.collect))
    if (count := cliff.options.get("trajs_per_batch")) is not None:
        return episodes_by_hand.whole_episodes(run, count)
    if cliff.options.get("split_trajs"):
        return episodes_by_hand.split_batches(run)
    return run if cliff.into == "batch" else _into_ring(run, cliff)


def _sample(cliff: Cliff, net: nn.Module) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
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
    if _is_called(cliff):
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


def _is_called(cliff: Cliff) -> bool:
    return bool(cliff.options.get("trust_policy")) or cliff.policy in ("function", "hooked")


def _called(policy: Any, lanes: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A policy on TensorDicts that cannot be looked into is called, by hand too: with one TensorDict that stays."""
    request = TensorDict({}, [lanes])

    def sample(observation: Tensor) -> tuple[Tensor, Tensor]:
        answer = policy(request.set("observation", observation))
        return answer.get("action"), answer.get("action_log_prob")

    return sample


def drawn(chosen: distributions.Distribution) -> tuple[Tensor, Tensor]:
    """What is drawn, and how likely it was."""
    action = chosen.sample()
    return action, chosen.log_prob(action)


def _into_ring(run: Run, cliff: Cliff) -> Run:
    """Each batch is copied into a ring of arrays, env by env, with the version of each frame's trajectory left out."""
    assert run.last_batch is not None
    run()
    rows = cliff.frames if cliff.options.get("extend_buffer", True) else cliff.envs
    ring = {
        key: np.zeros((CAPACITY, *tensor.shape[2:]), tensor.numpy().dtype) for key, tensor in run.last_batch().items()
    }
    places = itertools.cycle(range(0, CAPACITY - rows, rows))

    def collect() -> int:
        frames = run()
        batch = {key: tensor.numpy() for key, tensor in run.last_batch().items()}  # type: ignore[misc]
        for first in range(0, frames, rows):
            at = next(places)
            steps = slice(first // cliff.envs, (first + rows) // cliff.envs)
            for key, values in batch.items():
                ring[key][at : at + rows] = values[:, steps].reshape(rows, *values.shape[2:])
        return frames

    return Run(collect)


# -- the peer --------------------------------------------------------------------------------------------------------


def peer(cliff: Cliff) -> Run:
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv, SerialEnv

    torch.manual_seed(0)
    workload = cliff.collected
    make = partial(GymEnv, workload.env_id, categorical_action_encoding=True)
    env = make() if cliff.envs == 1 else SerialEnv(cliff.envs, make)
    policy = POLICIES[cliff.policy](workload.make_net())
    collector = Collector(env, policy, frames_per_batch=cliff.frames, total_frames=10**12, use_buffers=False)
    return _over(iter(collector), cliff, collector.shutdown)
