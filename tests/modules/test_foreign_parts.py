"""A part that is not known takes only itself off the fast path, and sees what it would see in the whole."""

from typing import Any

import policy_zoo as zoo
import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import distributions as D
from torch import nn

from swath.rollout.loop import LoopSettings, RolloutLoop


class ValueHead(TensorDictModuleBase):
    """Reads the observation and, without a word about it, everything that the actor has written."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["value"]
        self.net = zoo.mlp(1)
        self.seen: list[torch.Tensor] = []

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        score = tensordict.get("action_log_prob", None)
        if score is not None:
            self.seen.append(score.clone())
        return tensordict.set("value", self.net(tensordict["observation"]))


KNOWN = [
    name
    for name, case in zoo.ZOO.items()
    if case.stages[-1].removesuffix("Stage") in ("Categorical", "Normal", "Delta", "Built")
]
KNOWN.remove("categorical that hides")  # from the parts behind it, too: the sequence is called as a whole


@pytest.mark.parametrize("name", KNOWN)
def test_what_stands_before_a_foreign_part_stays_quick(name: str) -> None:
    case = zoo.ZOO[name]
    head = ValueHead()
    policy = TensorDictSequential(case.make(), head)
    collector = zoo.begun(policy, case.env())
    assert zoo.stages_of(collector) == (*case.stages, "TensorDictStage")
    head.seen.clear()
    batch = collector.next()
    seen = torch.stack(head.seen, 1) if head.seen else None
    if seen is not None:
        assert torch.equal(seen, batch["action_log_prob"])
    zoo.assert_same(batch["value"], head.net(batch["observation"]).detach())
    zoo.assert_agrees(policy, batch, case.tolerance)


def called(place: str) -> Any:
    """An actor with a network that has to be called, at some place among its parts."""
    body, head = zoo.module(zoo.mlp(8), "features"), zoo.module(zoo.mlp(zoo.CHOICES, inputs=8), "logits", "features")
    value = zoo.module(zoo.OwnForward(1), "value")
    own = TensorDictModule(lambda x: x.sin() * 2, in_keys=["features"], out_keys=["features"])
    choice = zoo.sampler(D.Categorical)
    parts = {
        "before": [value, body, head, choice],
        "between": [body, own, head, choice],
        "before the sampler": [body, head, value, choice],
        "behind": [body, head, choice, value],
    }
    return TensorDictSequential(*parts[place])


PLACES = {
    "before": ("TorchStage", "MLPStage", "MLPStage", "CategoricalStage"),
    "between": ("MLPStage", "TorchStage", "MLPStage", "CategoricalStage"),
    "before the sampler": ("MLPStage", "MLPStage", "TorchStage", "CategoricalStage"),
    "behind": ("MLPStage", "MLPStage", "CategoricalStage", "TorchStage"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_network_that_is_called_takes_only_itself_off_the_fast_path(place: str) -> None:
    """And log-probs are left for the end of the slot all the same: it does not read them."""
    policy = called(place)
    collector = zoo.begun(policy)
    assert zoo.stages_of(collector) == PLACES[place]
    zoo.assert_agrees(policy, collector.next())
    assert "action_log_prob" not in RolloutLoop(zoo.WaveEnv(), policy, LoopSettings()).policy.begin(1, None)


@pytest.mark.parametrize("make", [zoo.discrete, lambda: zoo.continuous(zoo.moved)])
def test_log_probs_are_there_in_time_for_a_part_that_reads_them(make: Any) -> None:
    value = TensorDictModule(lambda x: x * 2, in_keys=["action_log_prob"], out_keys=["value"])
    policy = TensorDictSequential(make(), value)
    env = zoo.WaveEnv(zoo.DISCRETE if make is zoo.discrete else zoo.CONTINUOUS)
    collector = zoo.begun(policy, env)
    assert zoo.stages_of(collector)[1:] == (zoo.stages_of(collector)[1], "TorchStage")
    batch = collector.next()
    assert torch.equal(batch["value"], batch["action_log_prob"] * 2)
    zoo.assert_agrees(policy[0], batch.exclude("value"))


class Meddler(TensorDictModuleBase):
    """Changes what the actor has made: the logits in place, and the action, as exploration does."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["action"], ["action"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["logits"].mul_(0.0)
        return tensordict.set("action", torch.zeros_like(tensordict["action"]))


@zoo.each_way
def test_log_probs_are_of_what_was_sampled_whatever_comes_behind(way: dict[str, Any]) -> None:
    actor = zoo.discrete()
    keeper = TensorDictModule(lambda x, y: (x.clone(), y.clone()), ["logits", "action"], ["before", "drawn"])
    batch = zoo.collect(TensorDictSequential(*actor.module, keeper, Meddler()), **way)
    assert not batch["action"].any()
    assert batch["drawn"].any()
    zoo.assert_same(batch["action_log_prob"], D.Categorical(logits=batch["before"]).log_prob(batch["drawn"]))


# -- relatives -------------------------------------------------------------------------------------------------------


class Named(TensorDictModule):
    """A class of the user's own that says how it is made, and nothing else."""

    def __init__(self, net: nn.Module, out: str) -> None:
        super().__init__(net, in_keys=["observation"], out_keys=[out])

    def parameter_count(self) -> int:
        return sum(weight.numel() for weight in self.parameters())


class Sampler(ProbabilisticTensorDictModule):
    """The same for the part that draws."""


class Actor(ProbabilisticTensorDictSequential):
    """The same for the whole."""

    def __init__(self) -> None:
        head = Sampler(["logits"], ["action"], distribution_class=D.Categorical, return_log_prob=True)
        super().__init__(Named(zoo.mlp(zoo.CHOICES), "logits"), head)


def test_classes_that_change_nothing_act_as_those_they_come_from() -> None:
    collector = zoo.begun(Actor())
    zoo.assert_agrees(collector.policy, collector.next())
    assert zoo.stages_of(collector) == zoo.FAST


class Doubling(Named):
    def _call_module(self, tensors: Any, **kwargs: Any) -> Any:
        return super()._call_module(tensors, **kwargs) * 2


class Writing(Named):
    def _write_to_tensordict(self, tensordict: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._write_to_tensordict(tensordict, [tensor + 1 for tensor in tensors], *args, **kwargs)


class Forward(Named):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:  # type: ignore[override]
        return tensordict.set("logits", self.module(tensordict["observation"]) * 3)


@pytest.mark.parametrize("kind", [Doubling, Writing, Forward])
def test_classes_that_change_what_a_call_does_are_called(kind: Any) -> None:
    part = kind(zoo.mlp(zoo.CHOICES), "logits")
    policy = ProbabilisticTensorDictSequential(part, zoo.sampler(D.Categorical))
    collector = zoo.begun(policy)
    zoo.assert_agrees(policy, collector.next())
    assert zoo.stages_of(collector) == ("TensorDictStage", "CategoricalStage")


class Twice(TensorDictSequential):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:  # type: ignore[override]
        return super().forward(super().forward(tensordict))


def test_a_sequence_with_a_forward_of_its_own_is_called_as_a_whole() -> None:
    again = TensorDictModule(lambda x, y: x[..., : zoo.CHOICES] + y.shape[-1], ["observation", "raw"], ["action"])
    policy = Twice(zoo.module(zoo.mlp(zoo.CHOICES), "raw"), again)
    assert zoo.stages_after(policy) == zoo.SLOW


# -- why a part is slow ----------------------------------------------------------------------------------------------


def hooked() -> Any:
    policy = zoo.discrete()
    policy[0].module[0].register_forward_hook(lambda *args: None)
    return policy


REASONS: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "known": (zoo.discrete, {}, []),
    "trusted": (zoo.discrete, {"opaque_policy": True}, ["as a whole: trust_policy=True"]),
    "asked for": (zoo.discrete, {"fast_policy": False}, ["Sequential is called: fast_policy=False", "fast_policy"]),
    "own forward": (lambda: zoo.discrete(net=zoo.OwnForward()), {}, ["OwnForward is called: it is no small network"]),
    "hooks": (hooked, {}, ["Sequential is called: it has hooks inside"]),
    "foreign": (lambda: TensorDictSequential(zoo.discrete(), ValueHead()), {}, ["ValueHead is called: it takes"]),
    "distribution": (
        lambda: zoo.discrete(lambda logits: D.Categorical(logits=logits * 2)), {}, ["its distribution, or how"]
    ),
    "function": (lambda: lambda td: td.set("action", td["observation"][..., :3]), {}, ["none of tensordict's modules"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_a_plan_says_why_a_part_is_called(name: str) -> None:
    make, options, wanted = REASONS[name]
    stages = RolloutLoop(zoo.WaveEnv(), make(), LoopSettings(**options)).policy_stages
    slow = [stage for stage in stages if stage.reason]
    assert len(slow) == len(wanted)
    for stage, words in zip(slow, wanted, strict=True):
        assert words in stage.reason
        assert repr(stage) == f"'{stage}' ({stage.reason})"
    assert all(repr(stage) == f"'{stage}'" for stage in stages if stage not in slow)
