"""Keys that are unusual: by keyword, ignored, nested, undeclared, optional, of many samples, or named otherwise."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import policy_zoo as zoo
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    set_composite_lp_aggregate,
)
from torch import Tensor, nn
from torch import distributions as D

from swath import entries
from swath.envs import Leaf, Rows
from swath.errors import PolicyError
from swath.modules.called import TensorDictStage

pytestmark = pytest.mark.usefixtures("beside_any_env")


def by_keyword(*, left: Tensor, right: Tensor) -> Tensor:
    return left[..., : zoo.CHOICES] * 2 - right[..., :1]


class OtherMethod(nn.Sequential):
    def act(self, observation: Tensor, *, factor: float) -> Tensor:
        return self(observation) * factor


def parameters(x: Tensor) -> TensorDict:
    """A TensorDict, as the parameters of a composite distribution often are."""
    inner = {
        "turn": {"logits": x[..., : zoo.CHOICES]},
        "push": {"loc": x[..., : zoo.AXES], "scale": x[..., : zoo.AXES].exp()},
    }
    return TensorDict(inner)


def nested_keys() -> Any:
    logits = ("agent", "logits")
    options = {"distribution_class": D.Categorical, "return_log_prob": True, "log_prob_key": ("agent", "lp")}
    return ProbabilisticTensorDictSequential(
        TensorDictModule(zoo.mlp(zoo.CHOICES), ["observation"], [logits]),
        ProbabilisticTensorDictModule({"logits": logits}, ["action"], **options),
    )


class Secretive(TensorDictModuleBase):
    """Reads and writes more than it says."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = [], ["scores"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["scores"] = tensordict["observation"][..., : zoo.CHOICES] + tensordict["features"].sum(
            -1, keepdim=True
        )
        tensordict["secret"] = tensordict["scores"] * 2
        return tensordict


class Undeclared(TensorDictModuleBase):
    """Does not say that it writes the action."""

    in_keys, out_keys = ["observation"], ["value"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["value"] = tensordict["observation"][..., :1]
        return tensordict.set("action", tensordict["observation"][..., : zoo.CHOICES])


def from_features(*parts: Any, **options: Any) -> TensorDictSequential:
    return TensorDictSequential(*parts, zoo.module(zoo.mlp(zoo.CHOICES, inputs=8), "action", "features"), **options)


def by_name(kind: Any) -> TensorDictModule:
    def act(x: Tensor) -> Any:
        return kind(value=x[..., :1], action=x[..., : zoo.CHOICES])

    return TensorDictModule(act, ["observation"], ["action", "value"])


def through(width: int) -> TensorDictSequential:
    """Writes "x" twice, of 8 numbers and then of `width`."""
    parts = zoo.module(nn.Linear(zoo.SIZE, 8), "x"), zoo.module(nn.Linear(8, width), "x", "x")
    return TensorDictSequential(*parts, zoo.module(nn.Linear(width, zoo.CHOICES), "action", "x"))


def normal_actor(key: str = "action") -> list[Any]:
    net = nn.Sequential(zoo.mlp(2 * zoo.AXES), NormalParamExtractor())
    params = TensorDictModule(net, ["observation"], ["loc", "scale"])
    return [params, zoo.sampler(D.Normal, ["loc", "scale"], key)]


UNUSUAL: dict[str, Callable[[], Any]] = {
    "another method with arguments": lambda: TensorDictModule(
        OtherMethod(nn.Linear(zoo.SIZE, zoo.CHOICES)),
        ["observation"],
        ["action"],
        method="act",
        method_kwargs={"factor": -3.0},
    ),
    "ignored results": lambda: TensorDictModule(
        lambda x: (x, x[..., : zoo.CHOICES], x), ["observation"], ["_", "action", "_"]
    ),
    "ignored results in a sequence": lambda: from_features(
        TensorDictModule(lambda x: (x.repeat(1, 2).cos(), x), ["observation"], ["features", "_"])
    ),
    "results in a dict": lambda: by_name(dict),
    "results in a TensorDict": lambda: by_name(lambda **entries: TensorDict(entries)),
    "nested out keys": nested_keys,
    "a part that reads and writes what it does not say": lambda: TensorDictSequential(
        zoo.module(zoo.mlp(8), "features"), Secretive(), zoo.module(nn.Identity(), "action", "scores")
    ),
    "a part that changes in place what others made": zoo.noisy,
    "an action that is written undeclared": Undeclared,
    "a function as a part": lambda: TensorDictSequential(
        zoo.module(zoo.mlp(zoo.CHOICES)), lambda td: td.set("action", td["action"] * 3)
    ),
    "parts by name": lambda: TensorDictSequential(
        OrderedDict(
            first=zoo.module(zoo.mlp(8), "features"), second=zoo.module(nn.Linear(8, zoo.CHOICES), "action", "features")
        )
    ),
    "a TensorDict of its own": lambda: from_features(zoo.module(zoo.mlp(8), "features"), inplace=False),
    "an empty TensorDict of its own": lambda: from_features(zoo.module(zoo.mlp(8), "features"), inplace="empty"),
    "in place": lambda: from_features(zoo.module(zoo.mlp(8), "features"), inplace=True),
    "parts that may be left out": lambda: TensorDictSequential(
        zoo.module(zoo.mlp(zoo.CHOICES)), zoo.module(nn.Linear(5, 1), "value", "of another env"), partial_tolerant=True
    ),
    "a key that is written twice with different shapes": lambda: through(5),
    "a key that is written twice with the same shape": lambda: through(8),
    "cached distributions": lambda: zoo.discrete(cache_dist=True),
    "a log-prob of another name": lambda: zoo.discrete(log_prob_key="lp"),
    "a list of names of log-probs": lambda: zoo.discrete(log_prob_keys=["lp"]),
    "a nested log-prob": lambda: zoo.discrete(log_prob_key=("a", "lp")),
}
IN_OTHER_ENVS: dict[str, tuple[Callable[[], Any], Callable[[], zoo.WaveEnv]]] = {
    "in keys as keywords": (
        lambda: TensorDictModule(by_keyword, {"left": "place", "right": ("inner", "speed")}, ["action"]),
        lambda: zoo.WaveEnv(zoo.DISCRETE, zoo.NESTED),
    ),
    "keywords from keys": (
        lambda: TensorDictModule(
            by_keyword, {"place": "left", ("inner", "speed"): "right"}, ["action"], out_to_in_map=False
        ),
        lambda: zoo.WaveEnv(zoo.DISCRETE, zoo.NESTED),
    ),
    "a nested observation given whole": (
        lambda: TensorDictModule(lambda inner: inner["speed"][..., :1] + torch.arange(3), ["inner"], ["action"]),
        lambda: zoo.WaveEnv(zoo.DISCRETE, zoo.NESTED),
    ),
    "a result that is a TensorDict": (
        lambda: ProbabilisticTensorDictSequential(
            TensorDictModule(parameters, ["observation"], ["params"]), zoo.composite()[2]
        ),
        lambda: zoo.WaveEnv(zoo.MIXED),
    ),
    "a continuous actor with a value": (
        lambda: TensorDictSequential(*normal_actor(), zoo.module(zoo.mlp(1), "value")),
        lambda: zoo.WaveEnv(zoo.CONTINUOUS),
    ),
}
CASES = {**{name: (make, zoo.WaveEnv) for name, make in UNUSUAL.items()}, **IN_OTHER_ENVS}


@zoo.each_way
@pytest.mark.parametrize(("make", "env"), CASES.values(), ids=CASES.keys())
def test_what_is_recorded_is_what_the_policy_gives(make: Any, env: Any, way: dict[str, Any]) -> None:
    policy = make()
    zoo.assert_agrees(policy, zoo.collect(policy, env(), **way))


def test_private_entries_are_used_but_not_delivered() -> None:
    policy = TensorDictSequential(
        zoo.module(zoo.mlp(8), "_features"), zoo.module(nn.Linear(8, zoo.CHOICES), "action", "_features")
    )
    batch = zoo.collect(policy)
    assert not [key for key in set(batch.keys()) if key.startswith("_")]
    zoo.assert_same(batch["action"], zoo.replay(policy, batch)["action"])


@pytest.mark.parametrize("policy", [
    lambda td: td.set("action", td["observation"][..., :zoo.CHOICES]).clone(),
    TensorDictSequential(zoo.module(lambda x: x * 10, "observation"), zoo.module(zoo.mlp(zoo.CHOICES))),
], ids=["copied", "written over"])  # fmt: skip
def test_random_frames_have_observations_too(policy: Any) -> None:
    """Also where the policy gives back copies of them, or others."""
    batch = zoo.collect(policy, init_random_frames=100)
    inside = ~batch["next", "done"][:, :-1, 0]
    zoo.assert_same(batch["observation"][:, 1:][inside], batch["next", "observation"][:, :-1][inside])


# -- sampling, and parts behind it ----------------------------------------------------------------------------------


class LogProbReader(TensorDictModuleBase):
    """Does not say that it reads log-probs."""

    in_keys, out_keys = [], ["doubled"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("doubled", tensordict["action_log_prob"] * 2)


LATER: dict[str, tuple[Callable[[], list[Any]], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "the sample is kept, but not taken": (
        lambda: [zoo.module(nn.Identity(), "sampled", "action"), zoo.module(torch.zeros_like, "action", "action")],
        lambda batch: (batch["action_log_prob"], D.Categorical(logits=batch["logits"]).log_prob(batch["sampled"])),
    ),
    "logits are overwritten": (
        lambda: [zoo.module(nn.Identity(), "kept", "logits"), zoo.module(lambda x: x * 0, "logits", "logits")],
        lambda batch: (batch["action_log_prob"], D.Categorical(logits=batch["kept"]).log_prob(batch["action"])),
    ),
    "log-probs are read": (
        lambda: [zoo.module(lambda x: x * 2, "doubled", "action_log_prob")],
        lambda batch: (batch["doubled"], batch["action_log_prob"] * 2),
    ),
    "log-probs are read by what does not say so": (
        lambda: [LogProbReader()],
        lambda batch: (batch["doubled"], batch["action_log_prob"] * 2),
    ),
    "log-probs are overwritten": (
        lambda: [zoo.module(lambda x: x[..., 0] * 0, "action_log_prob")],
        lambda batch: (batch["action_log_prob"], torch.zeros(6, 6)),
    ),
}


@zoo.each_way
@pytest.mark.parametrize(("parts", "pair"), LATER.values(), ids=LATER.keys())
def test_parts_behind_the_sampler(parts: Any, pair: Any, way: dict[str, Any]) -> None:
    """Log-probs are those of the sample, with the parameters that it was drawn from, whatever comes later."""
    batch = zoo.collect(TensorDictSequential(*zoo.discrete().module, *parts()), zoo.WaveEnv(lengths=[30] * 6), **way)
    zoo.assert_same(*pair(batch))
    if "sampled" in set(batch.keys()):
        assert batch["sampled"].any()
        assert not batch["action"].any()


@zoo.each_way
def test_log_probs_may_be_recurrent_state(way: dict[str, Any]) -> None:
    first = TensorDictModule(
        lambda x, lp: x[..., : zoo.CHOICES] + 0 * lp.unsqueeze(-1), ["observation", "action_log_prob"], ["logits"]
    )
    seen = zoo.module(lambda lp: lp + 0, "seen", "action_log_prob")
    policy = ProbabilisticTensorDictSequential(seen, first, zoo.sampler(D.Categorical))
    policy.state_shapes = {"action_log_prob": ()}
    batch = zoo.collect(policy, zoo.WaveEnv(lengths=[50] * 3), **way)
    zoo.assert_same(batch["seen"][:, 1:], batch["action_log_prob"][:, :-1])


@zoo.each_way
def test_an_action_that_is_there_already_is_not_sampled_again(way: dict[str, Any]) -> None:
    """tensordict's way to give a deterministic action its log-prob."""
    policy = ProbabilisticTensorDictSequential(
        zoo.module(zoo.mlp(zoo.CHOICES), "logits"),
        zoo.module(lambda logits: logits.argmin(-1), "action", "logits"),
        zoo.sampler(D.Categorical),
    )
    batch = zoo.collect(policy, zoo.WaveEnv(lengths=[30] * 6), **way)
    assert torch.equal(batch["action"], batch["logits"].argmin(-1))
    zoo.assert_same(batch["action_log_prob"], D.Categorical(logits=batch["logits"]).log_prob(batch["action"]))


@zoo.each_way
def test_two_samplers_in_a_row(way: dict[str, Any]) -> None:
    policy = ProbabilisticTensorDictSequential(
        *normal_actor("push"),
        zoo.module(zoo.mlp(zoo.CHOICES, inputs=zoo.AXES), "logits", "push"),
        zoo.sampler(D.OneHotCategorical, out="turn"),
    )
    batch = zoo.collect(policy, zoo.WaveEnv(zoo.MIXED), **way)
    zoo.assert_same(batch["push_log_prob"], D.Normal(batch["loc"], batch["scale"]).log_prob(batch["push"]))
    zoo.assert_same(batch["turn_log_prob"], D.OneHotCategorical(logits=batch["logits"]).log_prob(batch["turn"]))


@pytest.mark.skipif(not zoo.HAS_GENERATORS, reason="an older tensordict")
@zoo.each_way
def test_a_generator_of_the_modules_own(way: dict[str, Any]) -> None:
    def run(torch_seed: int) -> Tensor:
        torch.manual_seed(0)
        policy = zoo.discrete(generator=7)
        torch.manual_seed(torch_seed)
        return zoo.collect(policy, zoo.WaveEnv(lengths=[30] * 6), **way)["action"]

    assert torch.equal(run(1), run(2))


def test_many_samples_cannot_be_acted_on() -> None:
    with pytest.raises((PolicyError, RuntimeError, ValueError)):
        zoo.collect(zoo.discrete(num_samples=5))


@zoo.each_way
def test_aggregated_log_probs(way: dict[str, Any]) -> None:
    with set_composite_lp_aggregate(True):
        batch = zoo.collect(zoo.discrete(), **way)
        zoo.assert_same(batch["sample_log_prob"], D.Categorical(logits=batch["logits"]).log_prob(batch["action"]))
        batch = zoo.collect(zoo.composite(), zoo.WaveEnv(zoo.MIXED), **way)
        params = batch["params"]
        turn = D.OneHotCategorical(logits=params["turn", "logits"]).log_prob(batch["turn"])
        push = D.Normal(params["push", "loc"], params["push", "scale"]).log_prob(batch["push"]).sum(-1)
        zoo.assert_same(batch["sample_log_prob"], turn + push)


# -- how it is run --------------------------------------------------------------------------------------------------


def test_a_sampler_before_others_stays_fast_where_it_may() -> None:
    policy = TensorDictSequential(*zoo.discrete().module, zoo.module(zoo.mlp(1), "value"))
    assert zoo.stages_after(policy) == ("MLPStage", "CategoricalStage", "MLPStage")


# -- what a policy is given ------------------------------------------------------------------------------------------


class Keeper(nn.Module):
    """Keeps what it is given, and changes it when it has acted."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[TensorDictBase] = []

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.kept.append(tensordict.clone(False))
        tensordict["action"] = tensordict["observation"][..., : zoo.CHOICES] + tensordict["done"]
        tensordict["done"].fill_(True)
        return tensordict


def test_what_a_policy_keeps_and_changes_is_its_own() -> None:
    policy = Keeper()
    collector = zoo.begun(policy)
    policy.kept.clear()
    batch = collector.next()
    zoo.assert_same(torch.stack([td["observation"] for td in policy.kept], 1), batch["observation"])
    zoo.assert_same(batch["action"], batch["observation"][..., : zoo.CHOICES])
    assert not batch["done"].any()


@pytest.mark.parametrize("is_known", [True, False], ids=["made of its parts", "made by tensordict"])
def test_each_call_gets_a_tensordict_of_its_own(is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "_IS_KNOWN", is_known and entries._IS_KNOWN)
    kept: list[TensorDictBase] = []

    def policy(td: TensorDictBase) -> TensorDictBase:
        assert set(td.keys()) == {"observation", "done", "terminated", "truncated"}
        assert td.batch_size == td["observation"].shape[:1]
        kept.append(td)
        return td.set("action", td["observation"][..., : zoo.CHOICES])

    collector = zoo.begun(policy)
    kept.clear()
    batch = collector.next()
    for key in ("observation", "action", "done"):
        zoo.assert_same(torch.stack([td[key] for td in kept], 1), batch[key])


def test_what_is_added_to_a_nested_entry_is_gone_in_the_next_step() -> None:
    def add(td: TensorDictBase) -> TensorDictBase:
        assert ("made", "more") not in td.keys(True)
        td["made", "more"] = td["made", "scores"].clone()
        return td.set("action", td["observation"])

    leaf = Leaf((2,), torch.float32)
    outputs = Rows({("made", "scores"): leaf, "action": leaf}, (3,))
    stage = TensorDictStage(add, Rows({"observation": leaf}, (3,)), [("made", "scores")], outputs, ["action"], None)
    stage.begin(2, None)
    stage.run(0)
    stage.run(1)


class Remembers(nn.Module):
    """A network that keeps what it has computed last, for a loss, and one that needs gradients to act."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = zoo.mlp(zoo.CHOICES), torch.zeros(())

    def forward(self, observation: Tensor) -> Tensor:
        self.last = self.net(observation)
        with torch.enable_grad():
            x = self.last.detach().requires_grad_()
            (slope,) = torch.autograd.grad(x.square().sum(), x)
        return slope


def _with_a_hook(kept: list[Tensor]) -> nn.Module:
    net = zoo.mlp(zoo.CHOICES)
    net[0].register_forward_hook(lambda module, args, result: kept.append(result))
    return net


WAYS = [{}, {"fast_policy": False}, {"trust_policy": True}]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_a_policy_keeps_can_be_trained_with(way: dict[str, Any]) -> None:
    kept: list[Tensor] = []
    for net in (Remembers(), _with_a_hook(kept)):
        zoo.begun(TensorDictModule(net, ["observation"], ["action"]), **way).next()
        last = net.last if isinstance(net, Remembers) else kept[-1]
        assert not last.is_inference()
        (nn.Parameter(torch.ones(())) * last).sum().backward()


@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_what_keeps_nothing_is_called_in_inference_mode(way: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is of use only for as long as it is called; the batch is ordinary."""
    modes: set[bool] = set()
    forward = nn.Linear.forward

    def watched(self: nn.Linear, given: Tensor) -> Tensor:
        modes.add(torch.is_inference_mode_enabled())
        return forward(self, given)

    collector = zoo.begun(zoo.discrete(), **way)
    monkeypatch.setattr(nn.Linear, "forward", watched)
    batch = collector.next()
    assert modes == {True}
    assert not any(value.is_inference() for value in batch.values(True, True))


def test_what_a_policy_writes_need_not_be_contiguous() -> None:
    def act(observation: Tensor) -> tuple[Tensor, Tensor]:
        return observation.argmax(-1) % zoo.CHOICES, observation.mT.contiguous().mT * 2

    batch = zoo.collect(TensorDictModule(act, ["observation"], ["action", "double"]), zoo.WaveEnv(lengths=[4] * 5))
    assert torch.equal(batch["double"], batch["observation"] * 2)


@pytest.mark.parametrize("flag", ["done", "terminated", "truncated"])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_policy_that_writes_a_flag_loses_nothing_else(flag: str, steps: int) -> None:
    """No root is ever done, whatever it writes there."""

    def act(observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        lanes = len(observation)
        return torch.ones(lanes, dtype=torch.int64), torch.ones(lanes, 1, dtype=torch.bool), torch.full((lanes, 1), 7.0)

    policy = TensorDictModule(act, ["observation"], ["action", flag, "extra"])
    collector = zoo.begun(policy, frames_per_batch=3 * steps)
    for _ in range(3):
        batch = collector.next()
        assert batch["action"].eq(1).all()
        assert batch["extra"].eq(7).all()
        assert not batch[flag].any()
    collector.shutdown()
