"""Policies of every supported kind, an env to run them in, and a slow but sure way to tell what they should do."""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    set_interaction_type,
)
from tensordict.nn.distributions import Delta, OneHotCategorical
from torch import Tensor, nn
from torch import distributions as D

from swath.collectors import Collector
from swath.envs import EnvBase
from swath.envs.rows import Rows
from swath.modules import TanhNormal

SIZE, CHOICES, AXES, HIDDEN = 4, 3, 2, 6
"""Numbers in an observation, discrete actions, dimensions of a continuous action, and numbers in a recurrent state."""

THREADS = 3
"""As many as torch has with the fixture `several_threads`."""

DISCRETE = gs.Discrete(CHOICES)
CONTINUOUS = gs.Box(-2.0, 2.0, (AXES,), np.float32)
MIXED = gs.Dict({"turn": DISCRETE, "push": CONTINUOUS})
VECTOR = gs.Box(-np.inf, np.inf, (SIZE,), np.float32)
DOUBLE = gs.Box(-np.inf, np.inf, (SIZE,), np.float64)
NESTED = gs.Dict({"place": VECTOR, "inner": gs.Dict({"speed": gs.Box(-np.inf, np.inf, (2,), np.float32)})})


class WaveEnv(EnvBase):
    """Observations are waves, different in each lane and step; lane `i` has episodes of `lengths[i]` steps.

    Args:
        action_space: of one lane.
        observation_space: of one lane.
        lengths: one per lane.
        batch_size: the lanes, if they are not one dimension.
        still: whether all lanes see the same at all times.
    """

    def __init__(
        self,
        action_space: gs.Space[Any] = DISCRETE,
        observation_space: gs.Space[Any] = VECTOR,
        lengths: Sequence[int] = (5, 3, 7),
        batch_size: Sequence[int] | None = None,
        still: bool = False,
    ) -> None:
        super().__init__(
            observation_space, action_space, batch_size=(len(lengths),) if batch_size is None else batch_size
        )
        self.lengths = np.array(lengths)
        self.still = still
        self._time, self._age = 0, np.zeros(self.num_lanes, np.int64)

    def _observe(self, lanes: Any, out: Rows) -> None:
        for number, key in enumerate(self.observation_keys):
            row = out.arrays[key]
            phase = np.arange(row.size).reshape(row.shape) + 0.7 * number
            wave = np.sin(phase * 1.3 + 0.4 * self._time)[lanes]
            row[lanes] = 0.5 if self.still else wave if row.dtype.kind == "f" else abs(40 * wave)

    def reset_into(self, lanes: Sequence[int], out: Rows) -> None:
        self._time += 1
        self._age[list(lanes)] = 0
        self._observe(list(lanes), out)

    def step_into(self, action: Rows, out: Rows) -> bool:
        self._time += 1
        self._age += 1
        self._observe(slice(None), out)
        over = self._age >= self.lengths
        out.arrays["reward"][:] = 0.0
        out.arrays["terminated"][:, 0] = over
        out.arrays["truncated"][:] = False
        return bool(over.any())


# -- parts ----------------------------------------------------------------------------------------------------------


def mlp(outputs: int, activation: nn.Module | None = None, bias: bool = True, inputs: int = SIZE) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8, bias=bias), activation or nn.Tanh(), nn.Linear(8, outputs, bias=bias))


class OwnForward(nn.Module):
    """A network that is more than a row of layers."""

    def __init__(self, outputs: int = CHOICES) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(SIZE, 8), nn.Linear(8, outputs)

    def forward(self, observation: Tensor) -> Tensor:
        return self.two(self.one(observation).sin()) + 0.1


class TwoInputs(nn.Module):
    """Takes both entries of a nested observation, matched by name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(CHOICES, inputs=SIZE + 2)

    def forward(self, speed: Tensor, place: Tensor) -> Tensor:
        return self.net(torch.cat([place, speed], -1))


class OnTensorDict(nn.Module):
    """Takes a TensorDict without saying what it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(CHOICES)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["scores"] = self.net(tensordict["observation"])
        tensordict["action"] = tensordict["scores"] * 2
        return tensordict


def module(net: Any, out: str = "action", source: Any = "observation") -> TensorDictModule:
    return TensorDictModule(net, in_keys=[source], out_keys=[out])


def sampler(family: Any, params: Any = "logits", out: Any = "action", **options: Any) -> ProbabilisticTensorDictModule:
    options = {"return_log_prob": True, "default_interaction_type": InteractionType.RANDOM, **options}
    params = [params] if isinstance(params, str) else params
    return ProbabilisticTensorDictModule(params, [out], distribution_class=family, **options)


def discrete(family: Any = D.Categorical, net: Any = None, **options: Any) -> Any:
    """The ordinary actor with discrete actions."""
    return ProbabilisticTensorDictSequential(module(net or mlp(CHOICES), "logits"), sampler(family, **options))


def continuous(family: Any = TanhNormal, net: Any = None, **options: Any) -> Any:
    """The ordinary actor with continuous actions."""
    net = net or nn.Sequential(*mlp(2 * AXES), NormalParamExtractor())
    params = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticTensorDictSequential(params, sampler(family, ["loc", "scale"], **options))


def separate_extractor() -> Any:
    return ProbabilisticTensorDictSequential(
        module(mlp(2 * AXES), "raw"),
        TensorDictModule(NormalParamExtractor(), in_keys=["raw"], out_keys=["loc", "scale"]),
        sampler(D.Normal, ["loc", "scale"]),
    )


def moved(loc: Tensor, scale: Tensor) -> D.Distribution:
    return D.TransformedDistribution(D.Normal(loc, scale), [D.AffineTransform(0.5, torch.tensor([2.0, 0.5]))])


class Stretched(D.TransformedDistribution):
    """As it is often written: squashed, and then stretched to the bounds of an action."""

    def __init__(self, loc: Tensor, scale: Tensor, bound: float = 2.0) -> None:
        self.bound = bound
        base = D.Independent(D.Normal(loc, scale), 1)
        super().__init__(base, [D.TanhTransform(cache_size=1), D.AffineTransform(0.0, bound)])


class Several(nn.Module):
    """Parameters of three normal variables, and how likely each of them is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3 + 6 * AXES)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, loc, scale = self.net(observation).split([3, 3 * AXES, 3 * AXES], -1)
        return 2 * logits, 3 * loc.unflatten(-1, (3, AXES)), scale.exp().unflatten(-1, (3, AXES))


def mixture() -> Any:
    def family(logits: Tensor, loc: Tensor, scale: Tensor) -> D.Distribution:
        return D.MixtureSameFamily(D.Categorical(logits=logits), D.Independent(D.Normal(loc, scale), 1))

    keys = ["logits", "loc", "scale"]
    return ProbabilisticTensorDictSequential(TensorDictModule(Several(), ["observation"], keys), sampler(family, keys))


def composite() -> Any:
    parts = {"turn": D.OneHotCategorical, "push": D.Normal}
    out_keys = [("params", "turn", "logits"), ("params", "push", "loc"), ("params", "push", "scale")]
    return ProbabilisticTensorDictSequential(
        TensorDictModule(mlp(CHOICES), in_keys=["observation"], out_keys=[out_keys[0]]),
        TensorDictModule(
            nn.Sequential(mlp(2 * AXES), NormalParamExtractor()), in_keys=["observation"], out_keys=out_keys[1:]
        ),
        ProbabilisticTensorDictModule(
            ["params"],
            ["turn", "push"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": parts},
            return_log_prob=True,
            default_interaction_type=InteractionType.RANDOM,
        ),
    )


def in_sequence() -> Any:
    return TensorDictSequential(
        module(nn.Sequential(nn.Linear(SIZE, 8), nn.ReLU()), "features"),
        TensorDictSequential(module(nn.Linear(8, CHOICES), "action", "features")),
    )


class Noisy(TensorDictModuleBase):
    """Changes the action in place, as exploration does, and features, of which it says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys = self.out_keys = ["action"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["features"].mul_(2)
        tensordict["action"].add_(1000)
        return tensordict


def noisy() -> Any:
    return TensorDictSequential(
        module(mlp(8), "features"), module(mlp(CHOICES, inputs=8), "action", "features"), Noisy()
    )


def hiding(policy: Any, *shown: str) -> Any:
    return policy.select_out_keys(*shown)


def one_net_used_twice() -> nn.Module:
    activation, layer = nn.Tanh(), nn.Linear(8, 8)
    return nn.Sequential(nn.Linear(SIZE, 8), activation, layer, activation, layer, activation, nn.Linear(8, CHOICES))


FAST, SLOW = ("MLPStage", "CategoricalStage"), ("TensorDictStage",)
"""How the ordinary actor with discrete actions is run, and how it is run if it has to be called as it is."""


# -- the zoo --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A policy, the env that it acts in, and the stages that should run it."""

    make: Callable[[], Any]
    stages: tuple[str, ...] = ("MLPStage",)
    actions: gs.Space[Any] = field(default_factory=lambda: DISCRETE)
    observations: gs.Space[Any] = field(default_factory=lambda: VECTOR)
    tolerance: float = 1e-5

    def env(self, **options: Any) -> WaveEnv:
        return WaveEnv(self.actions, self.observations, **options)


def _discrete(make: Callable[[], Any], *stages: str, **fields: Any) -> Case:
    return Case(make, stages or FAST, **fields)


def _continuous(make: Callable[[], Any], *stages: str, **fields: Any) -> Case:
    return Case(make, stages or ("MLPStage", "NormalStage"), CONTINUOUS, **fields)


ACTIVATIONS = {
    "tanh": nn.Tanh(),
    "relu": nn.ReLU(),
    "sigmoid": nn.Sigmoid(),
    "silu": nn.SiLU(),
    "leaky relu": nn.LeakyReLU(0.2),
    "steep leaky relu": nn.LeakyReLU(1.5),
    "elu": nn.ELU(0.7),
    "softplus": nn.Softplus(),
    "steep softplus": nn.Softplus(beta=30.0, threshold=3.0),
    "mish": nn.Mish(),
    "gelu": nn.GELU(),
    "gelu by tanh": nn.GELU("tanh"),
    "dropout in eval": nn.Dropout(0.5).eval(),
    "layer norm": nn.LayerNorm(8),
    "layer norm without bias": nn.LayerNorm(8, eps=0.1, bias=False),
    "layer norm without parameters": nn.LayerNorm(8, elementwise_affine=False),
}
ENDS = {"low": torch.tensor([-2.0, -0.5]), "high": torch.tensor([1.0, 2.0])}

DETERMINISTIC = {
    **{name: Case(lambda a=a: module(mlp(CHOICES, a))) for name, a in ACTIVATIONS.items()},
    "softsign": Case(lambda: module(mlp(CHOICES, nn.Softsign())), ("TorchStage",)),
    "dropout": Case(lambda: module(mlp(CHOICES, nn.Dropout(0.0))), ("TorchStage",)),
    "no bias": Case(lambda: module(mlp(CHOICES, bias=False))),
    "one layer": Case(lambda: module(nn.Linear(SIZE, CHOICES))),
    "nested sequential": Case(
        lambda: module(nn.Sequential(nn.Identity(), nn.Sequential(mlp(8), nn.ReLU()), mlp(CHOICES, inputs=8)))
    ),
    "layers used twice": Case(lambda: module(one_net_used_twice())),
    "own forward": Case(lambda: module(OwnForward()), ("TorchStage",)),
    "plain module": Case(lambda: mlp(CHOICES)),
    "plain module with own forward": Case(lambda: OwnForward(), ("TorchStage",)),
    "two observations by name": Case(lambda: TwoInputs(), ("TracedStage",), observations=NESTED),
    "function of a tensor": Case(lambda: lambda x: x[..., :CHOICES].cos(), ("TorchStage",)),
    "function of two tensors": Case(
        lambda: lambda speed, place: place[..., :CHOICES] * speed[..., :1], ("TorchStage",), observations=NESTED
    ),
    "function of a TensorDict": Case(
        lambda: lambda td: td.set("action", td["observation"][..., :CHOICES]), ("TensorDictStage",)
    ),
    "module of a TensorDict": Case(lambda: OnTensorDict(), ("TensorDictStage",)),
    "sequence": Case(in_sequence, ("MLPStage", "MLPStage")),
    "sequence that hides": Case(lambda: hiding(in_sequence(), "action"), ("MLPStage", "MLPStage")),
    "module that hides": Case(
        lambda: hiding(TensorDictModule(lambda x: (x[..., :3], x.sin()), ["observation"], ["action", "x"]), "action"),
        ("TensorDictStage",),
    ),
    "nested observation": Case(
        lambda: module(mlp(CHOICES, inputs=2), source=("inner", "speed")), observations=NESTED
    ),
    "double": Case(lambda: module(mlp(CHOICES).double()), observations=DOUBLE),
    "delta": _continuous(
        lambda: ProbabilisticTensorDictSequential(module(mlp(AXES), "param"), sampler(Delta, "param")),
        "MLPStage", "DeltaStage",
    ),
}  # fmt: skip

STOCHASTIC = {
    "categorical": _discrete(lambda: discrete()),
    "one-hot of torch": _discrete(lambda: discrete(D.OneHotCategorical)),
    "one-hot of tensordict": _discrete(lambda: discrete(OneHotCategorical)),
    "categorical without log-prob": _discrete(lambda: discrete(return_log_prob=False)),
    "categorical that hides": _discrete(lambda: hiding(discrete(), "action", "action_log_prob")),
    "categorical of doubles": _discrete(
        lambda: discrete(net=mlp(CHOICES).double()), "MLPStage", "DistributionStage", observations=DOUBLE
    ),
    "categorical with probs": _discrete(
        lambda: ProbabilisticTensorDictSequential(
            module(nn.Sequential(mlp(CHOICES), nn.Softmax(-1)), "probs"), sampler(D.Categorical, "probs")
        ),
        "TorchStage", "DistributionStage",
    ),
    "normal": _continuous(lambda: continuous(D.Normal)),
    "normal with separate extractor": _continuous(separate_extractor, "MLPStage", "MLPStage", "NormalStage"),
    "normal with another mapping": _continuous(
        lambda: continuous(D.Normal, nn.Sequential(mlp(2 * AXES), NormalParamExtractor("exp"))),
        "TorchStage", "NormalStage",
    ),
    "normal with a floor": _continuous(
        lambda: continuous(D.Normal, nn.Sequential(mlp(2 * AXES), NormalParamExtractor(scale_lb=0.9)))
    ),
    "independent normal": _continuous(
        lambda: continuous(lambda loc, scale: D.Independent(D.Normal(loc, scale), 1))
    ),
    "independent normal that looks at its parameters": _continuous(
        lambda: continuous(lambda loc, scale: D.Independent(D.Normal(loc, scale if loc.any() else scale * 2), 1)),
        "MLPStage", "DistributionStage",
    ),
    "independent normal of something else": _continuous(
        lambda: continuous(lambda loc, scale: D.Independent(D.Normal(loc, scale * 2), 1)),
        "MLPStage", "DistributionStage",
    ),
    "independent normal by a setting": _continuous(
        lambda: continuous(lambda loc, scale, n: D.Independent(D.Normal(loc, scale), n), distribution_kwargs={"n": 1}),
        "MLPStage", "BuiltStage",
    ),
    "moved normal": _continuous(lambda: continuous(moved), "MLPStage", "BuiltStage"),
    "stretched normal": _continuous(
        lambda: continuous(Stretched, distribution_kwargs={"bound": 3.0}), "MLPStage", "BuiltStage", tolerance=2e-4
    ),
    "mixture of normals": _continuous(mixture, "TorchStage", "BuiltStage"),
    "tanh-normal": _continuous(lambda: continuous(), tolerance=2e-4),
    "tanh-normal between numbers": _continuous(
        lambda: continuous(distribution_kwargs={"low": -2.0, "high": 0.5}), tolerance=2e-4
    ),
    "tanh-normal between tensors": _continuous(lambda: continuous(distribution_kwargs=ENDS), tolerance=2e-4),
    "composite": Case(composite, ("MLPStage", "MLPStage", "CompositeStage"), MIXED),
}  # fmt: skip
"""The tolerance of the squashed ones is for reading the unsquashed value off an action in single precision."""

ZOO = DETERMINISTIC | STOCHASTIC
HAS_GENERATORS = "generator" in inspect.signature(ProbabilisticTensorDictModule).parameters
"""Whether samplers can be given a generator of their own: only since some version of tensordict."""
WAYS: dict[str, dict[str, Any]] = {"fast": {}, "slow": {"fast_policy": False}, "trusted": {"trust_policy": True}}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


# -- recurrent policies ---------------------------------------------------------------------------------------------


class Layered(nn.Module):
    """An nn.GRU of two layers, one step at a time, its state `[lanes, layers, hidden]`."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(SIZE, HIDDEN, num_layers=2, batch_first=True)

    def forward(self, observation: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        out, state = self.gru(observation.unsqueeze(-2), hidden.transpose(0, 1).contiguous())
        return out.squeeze(-2), state.transpose(0, 1)


class LongShort(nn.Module):
    """An nn.LSTM of two layers, a step at a time, and a head, with states `[lanes, layers, hidden]`."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(SIZE, HIDDEN, num_layers=2), nn.Linear(HIDDEN, CHOICES)

    def forward(self, observation: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states = (hidden.permute(1, 0, 2).contiguous(), cell.permute(1, 0, 2).contiguous())
        out, (hidden, cell) = self.lstm(observation.unsqueeze(0), states)
        return self.head(out[-1]), hidden.transpose(0, 1), cell.transpose(0, 1)


class Forgetful(nn.Module):
    """A GRU cell that looks by itself where an episode begins."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(SIZE, HIDDEN, bias=False), nn.Linear(HIDDEN, CHOICES)

    def forward(self, observation: Tensor, is_init: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.cell(observation, torch.where(is_init, torch.zeros_like(hidden), hidden))
        return self.head(hidden), hidden


class LSTM(nn.Module):
    """An LSTM cell with its two states as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(SIZE, HIDDEN)

    def forward(self, observation: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        return self.cell(observation, (hidden, cell))


def as_written(key: str, convention: str) -> Any:
    return ("next", key) if convention == "next" else key


def gru_policy(convention: str) -> Any:
    hidden = as_written("hidden", convention)
    return TensorDictSequential(
        TensorDictModule(nn.GRUCell(SIZE, HIDDEN), in_keys=["observation", "hidden"], out_keys=[hidden]),
        module(nn.Linear(HIDDEN, CHOICES), "action", hidden),
    )


def lstm_policy(convention: str) -> Any:
    states = [as_written("hidden", convention), as_written("cell", convention)]
    return TensorDictSequential(
        TensorDictModule(LSTM(), in_keys=["observation", "hidden", "cell"], out_keys=states),
        module(nn.Linear(HIDDEN, CHOICES), "action", states[0]),
    )


def layered_policy(convention: str) -> Any:
    states = ["features", as_written("hidden", convention)]
    return TensorDictSequential(
        TensorDictModule(Layered(), in_keys=["observation", "hidden"], out_keys=states),
        module(nn.Linear(HIDDEN, CHOICES), "action", "features"),
    )


def long_short_policy(convention: str) -> Any:
    out_keys = ["action", as_written("hidden", convention), as_written("cell", convention)]
    return TensorDictModule(LongShort(), in_keys=["observation", "hidden", "cell"], out_keys=out_keys)


def forgetful_policy(convention: str) -> Any:
    out_keys = ["action", as_written("hidden", convention)]
    return TensorDictModule(Forgetful(), in_keys=["observation", "is_init", "hidden"], out_keys=out_keys)


def sampling_policy(convention: str) -> Any:
    hidden = as_written("hidden", convention)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.GRUCell(SIZE, HIDDEN), in_keys=["observation", "hidden"], out_keys=[hidden]),
        module(nn.Linear(HIDDEN, CHOICES), "logits", hidden),
        sampler(D.OneHotCategorical),
    )


class Resetting(TensorDictModuleBase):
    """Reads is_init, as recurrent modules do that reset themselves; takes and gives a TensorDict."""

    def __init__(self, convention: str) -> None:
        super().__init__()
        self.in_keys = ["observation", "hidden", "is_init"]
        self.written = as_written("hidden", convention)
        self.out_keys = ["action", self.written]
        self.cell, self.head = nn.GRUCell(SIZE, HIDDEN), nn.Linear(HIDDEN, CHOICES)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        is_init, hidden = tensordict["is_init"], tensordict["hidden"]
        hidden = self.cell(tensordict["observation"], torch.where(is_init, torch.zeros_like(hidden), hidden))
        return tensordict.set(self.written, hidden).set("action", self.head(hidden))


RECURRENT: dict[str, Callable[[str], Any]] = {
    "GRU cell": gru_policy,
    "LSTM cell": lstm_policy,
    "nn.GRU": layered_policy,
    "nn.LSTM": long_short_policy,
    "GRU cell on is_init": forgetful_policy,
    "sampling GRU": sampling_policy,
    "on is_init": Resetting,
}
"""Makers that are given a convention: whether state is written under the "same" key as it is read, or under "next"."""


# -- the truth ------------------------------------------------------------------------------------------------------


NOT_THE_POLICYS = (
    *("observation", "place", ("inner", "speed"), "done", "terminated", "truncated", "is_init"),
    ("collector", "traj_ids"),
)


def collect(policy: Any, env: EnvBase | None = None, steps: int = 6, **options: Any) -> TensorDictBase:
    """One batch."""
    env = env or WaveEnv()
    return next(iter(Collector(env, policy, frames_per_batch=steps * env.num_lanes, **options)))


def stages_of(collector: Collector) -> tuple[str, ...]:
    """The stages that ran the last batch."""
    return tuple(collector.policy_stages)


def begun(policy: Any, env: EnvBase | None = None, **options: Any) -> Collector:
    """A collector that has delivered its first batch."""
    collector = Collector(env or WaveEnv(), policy, **{"frames_per_batch": 18, **options})
    collector.next()
    return collector


def stages_after(policy: Any, env: EnvBase | None = None, **options: Any) -> tuple[str, ...]:
    """The stages that ran the first batch of `policy`."""
    return stages_of(begun(policy, env, **options))


def layers_of(policy: Any) -> Any:
    """The network of an actor: linear, activation, linear."""
    return policy[0].module


def samplers_of(policy: Any) -> list[ProbabilisticTensorDictModule]:
    modules = policy.modules() if isinstance(policy, nn.Module) else ()
    return [module for module in modules if isinstance(module, ProbabilisticTensorDictModule)]


def observations_in(batch: TensorDictBase) -> TensorDictBase:
    return batch.select("observation", "place", "inner", strict=False)


def replay(policy: Any, batch: TensorDictBase, kind: InteractionType | None = InteractionType.MODE) -> TensorDictBase:
    """What `policy`, as the collector wrapped it, writes when it is given the batch's root entries step by step."""
    steps = []
    with torch.no_grad(), set_interaction_type(kind):
        for t in range(batch.shape[-1]):
            steps.append(policy(observations_in(batch)[..., t].clone()))
    return TensorDict.stack(steps, batch.ndim - 1)


def assert_same(found: Tensor, wanted: Tensor, tolerance: float = 1e-5, name: Any = "") -> None:
    torch.testing.assert_close(
        found, wanted.to(found.dtype), rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}"
    )


def assert_agrees(policy: Any, batch: TensorDictBase, tolerance: float = 1e-5) -> None:
    """What was recorded is what `policy` gives: parameters, features, scores, and log-probs of the recorded actions."""
    told = replay(policy, batch, InteractionType.RANDOM)  # which all distributions can do
    drawn = {key for part in samplers_of(policy) for key in part.out_keys}
    made = {key for key in told.keys(True, True) if key not in observations_in(batch).keys(True, True)}
    assert made == {key for key in batch.keys(True, True) if key not in NOT_THE_POLICYS and "next" not in key}
    for key in made - drawn:
        assert_same(batch[key], told[key], tolerance, key)
    for part in samplers_of(policy):
        log_prob = part.log_prob(replay_parameters(policy, batch).update(batch.select(*part.dist_sample_keys)))
        for key in part.log_prob_keys if part.return_log_prob else ():
            wanted = log_prob[key] if isinstance(log_prob, TensorDictBase) else log_prob
            assert_same(batch[key], wanted, tolerance, key)


def replay_parameters(policy: Any, batch: TensorDictBase) -> TensorDictBase:
    """Also those that the policy hides."""
    shown = copy.deepcopy(policy)
    shown = shown.reset_out_keys() if shown._select_before_return else shown
    return replay(shown, batch, InteractionType.RANDOM)
