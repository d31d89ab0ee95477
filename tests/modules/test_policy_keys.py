"""Keys that are unusual: by keyword, ignored, nested, undeclared, optional, of many samples, or named otherwise."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from policy_zoo import (
    AXES,
    CHOICES,
    CONTINUOUS,
    DISCRETE,
    HAS_GENERATORS,
    MIXED,
    NESTED,
    SIZE,
    WAYS,
    WaveEnv,
    assert_agrees,
    assert_same,
    collect,
    composite,
    discrete,
    mlp,
    module,
    replay,
    sampler,
    stages_of,
)
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

from swath.collectors import Collector
from swath.errors import PolicyError

each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


def assert_policy_agrees(policy: Any, way: dict[str, Any], env: WaveEnv | None = None) -> TensorDictBase:
    batch = collect(policy, env, **way)
    assert_agrees(policy, batch)
    return batch


# -- what a module is called with -----------------------------------------------------------------------------------


def by_keyword(*, left: Tensor, right: Tensor) -> Tensor:
    return left[..., :CHOICES] * 2 - right[..., :1]


@each_way
def test_in_keys_as_keywords(way: dict[str, Any]) -> None:
    in_keys = {"left": "place", "right": ("inner", "speed")}
    policy = TensorDictModule(by_keyword, in_keys=in_keys, out_keys=["action"])
    batch = assert_policy_agrees(policy, way, WaveEnv(DISCRETE, NESTED))
    assert torch.equal(batch["action"], by_keyword(left=batch["place"], right=batch["inner", "speed"]))


@each_way
def test_keywords_from_keys(way: dict[str, Any]) -> None:
    policy = TensorDictModule(
        by_keyword, in_keys={"place": "left", ("inner", "speed"): "right"}, out_keys=["action"], out_to_in_map=False
    )
    assert_policy_agrees(policy, way, WaveEnv(DISCRETE, NESTED))


@each_way
def test_another_method_with_arguments(way: dict[str, Any]) -> None:
    class Net(nn.Sequential):
        def act(self, observation: Tensor, *, factor: float) -> Tensor:
            return self(observation) * factor

    net = Net(nn.Linear(SIZE, CHOICES))
    policy = TensorDictModule(net, ["observation"], ["action"], method="act", method_kwargs={"factor": -3.0})
    batch = assert_policy_agrees(policy, way)
    assert_same(batch["action"], net(batch["observation"]).detach() * -3)


@each_way
def test_a_nested_observation_given_whole(way: dict[str, Any]) -> None:
    policy = TensorDictModule(lambda inner: inner["speed"][..., :1] + torch.arange(3), ["inner"], ["action"])
    assert_policy_agrees(policy, way, WaveEnv(DISCRETE, NESTED))


# -- what it returns ------------------------------------------------------------------------------------------------


@each_way
def test_ignored_results(way: dict[str, Any]) -> None:
    policy = TensorDictModule(lambda x: (x, x[..., :CHOICES], x), ["observation"], ["_", "action", "_"])
    batch = assert_policy_agrees(policy, way)
    assert "_" not in set(batch.keys())


@each_way
def test_ignored_results_in_a_sequence(way: dict[str, Any]) -> None:
    first = TensorDictModule(lambda x: (x.cos(), x), ["observation"], ["features", "_"])
    assert_policy_agrees(TensorDictSequential(first, module(mlp(CHOICES), "action", "features")), way)


@each_way
@pytest.mark.parametrize("kind", [dict, lambda **entries: TensorDict(entries)], ids=["dict", "TensorDict"])
def test_results_by_name(kind: Any, way: dict[str, Any]) -> None:
    def act(x: Tensor) -> Any:
        return kind(value=x[..., :1], action=x[..., :CHOICES])

    assert_policy_agrees(TensorDictModule(act, ["observation"], ["action", "value"]), way)


@each_way
def test_a_result_that_is_a_tensordict(way: dict[str, Any]) -> None:
    """As the parameters of a composite distribution often are."""

    def params(x: Tensor) -> TensorDict:
        inner = {"turn": {"logits": x[..., :CHOICES]}, "push": {"loc": x[..., :AXES], "scale": x[..., :AXES].exp()}}
        return TensorDict(inner)

    policy = ProbabilisticTensorDictSequential(TensorDictModule(params, ["observation"], ["params"]), composite()[2])
    assert_policy_agrees(policy, way, WaveEnv(MIXED))


@each_way
def test_nested_out_keys(way: dict[str, Any]) -> None:
    logits, log_prob = ("agent", "logits"), ("agent", "lp")
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(mlp(CHOICES), ["observation"], [logits]),
        ProbabilisticTensorDictModule(
            {"logits": logits},
            ["action"],
            distribution_class=D.Categorical,
            return_log_prob=True,
            log_prob_key=log_prob,
        ),
    )
    batch = assert_policy_agrees(policy, way)
    assert batch[log_prob].shape == (3, 6)


def test_private_entries_are_used_but_not_delivered() -> None:
    policy = TensorDictSequential(module(mlp(8), "_features"), module(nn.Linear(8, CHOICES), "action", "_features"))
    batch = collect(policy)
    assert not [key for key in set(batch.keys()) if key.startswith("_")]
    assert_same(batch["action"], replay(policy, batch)["action"])


# -- undeclared and optional ----------------------------------------------------------------------------------------


class Secretive(TensorDictModuleBase):
    """Reads and writes more than it says."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = [], ["scores"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["scores"] = tensordict["observation"][..., :CHOICES] + tensordict["features"].sum(-1, keepdim=True)
        tensordict["secret"] = tensordict["scores"] * 2
        return tensordict


class Noisy(TensorDictModuleBase):
    """Changes the action in place, as exploration does."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys = self.out_keys = ["action"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["action"].add_(1000)
        return tensordict


@each_way
def test_a_part_that_reads_and_writes_what_it_does_not_say(way: dict[str, Any]) -> None:
    policy = TensorDictSequential(module(mlp(8), "features"), Secretive(), module(nn.Identity(), "action", "scores"))
    batch = assert_policy_agrees(policy, way)
    assert_same(batch["secret"], batch["scores"] * 2)


@each_way
def test_a_part_that_changes_in_place_what_others_made(way: dict[str, Any]) -> None:
    policy = TensorDictSequential(module(mlp(CHOICES)), Noisy())
    batch = assert_policy_agrees(policy, way)
    assert (batch["action"] > 900).all()


@each_way
def test_a_policy_that_writes_its_action_undeclared(way: dict[str, Any]) -> None:
    class Undeclared(TensorDictModuleBase):
        in_keys, out_keys = ["observation"], ["value"]

        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            tensordict["value"] = tensordict["observation"][..., :1]
            return tensordict.set("action", tensordict["observation"][..., :CHOICES])

    batch = assert_policy_agrees(Undeclared(), way)
    assert torch.equal(batch["action"], batch["observation"][..., :CHOICES])


@each_way
def test_a_function_as_a_part(way: dict[str, Any]) -> None:
    def scale(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", td["action"] * 3)

    assert_policy_agrees(TensorDictSequential(module(mlp(CHOICES)), scale), way)


@each_way
def test_parts_by_name(way: dict[str, Any]) -> None:
    parts = OrderedDict(first=module(mlp(8), "features"), second=module(nn.Linear(8, CHOICES), "action", "features"))
    policy = TensorDictSequential(parts)
    assert_policy_agrees(policy, way)


@each_way
@pytest.mark.parametrize("inplace", [False, "empty", True], ids=str)
def test_sequences_that_return_a_tensordict_of_their_own(inplace: Any, way: dict[str, Any]) -> None:
    parts = module(mlp(8), "features"), module(nn.Linear(8, CHOICES), "action", "features")
    assert_policy_agrees(TensorDictSequential(*parts, inplace=inplace), way)


@each_way
def test_parts_that_may_be_left_out(way: dict[str, Any]) -> None:
    policy = TensorDictSequential(
        module(mlp(CHOICES)), module(nn.Linear(5, 1), "value", "of another env"), partial_tolerant=True
    )
    batch = assert_policy_agrees(policy, way)
    assert "value" not in set(batch.keys())


@each_way
def test_a_key_that_is_written_twice_with_different_shapes(way: dict[str, Any]) -> None:
    policy = TensorDictSequential(
        module(nn.Linear(SIZE, 8), "x"), module(nn.Linear(8, 5), "x", "x"), module(nn.Linear(5, CHOICES), "action", "x")
    )
    assert_policy_agrees(policy, way)


@each_way
def test_a_key_that_is_written_twice_with_the_same_shape(way: dict[str, Any]) -> None:
    policy = TensorDictSequential(
        module(nn.Linear(SIZE, 8), "x"), module(nn.Linear(8, 8), "x", "x"), module(nn.Linear(8, CHOICES), "action", "x")
    )
    assert_policy_agrees(policy, way)


@pytest.mark.parametrize("policy", [
    lambda td: td.set("action", td["observation"][..., :CHOICES]).clone(),
    TensorDictSequential(module(lambda x: x * 10, "observation"), module(mlp(CHOICES))),
], ids=["copied", "written over"])  # fmt: skip
def test_random_frames_have_observations_too(policy: Any) -> None:
    """Also where the policy gives back copies of them, or others."""
    batch = collect(policy, init_random_frames=100)
    inside = ~batch["next", "done"][:, :-1, 0]
    assert_same(batch["observation"][:, 1:][inside], batch["next", "observation"][:, :-1][inside])


# -- sampling -------------------------------------------------------------------------------------------------------


class Overriding(nn.Module):
    """Always takes the first action, whatever was sampled."""

    def forward(self, action: Tensor) -> Tensor:
        return torch.zeros_like(action)


@each_way
def test_log_probs_are_those_of_the_sample_even_if_it_is_not_taken(way: dict[str, Any]) -> None:
    keep = module(nn.Identity(), "sampled", "action")
    policy = TensorDictSequential(*discrete().module, keep, module(Overriding(), "action", "action"))
    batch = collect(policy, WaveEnv(lengths=[30] * 6), **way)
    assert not batch["action"].any()
    assert batch["sampled"].any()
    assert_same(batch["action_log_prob"], D.Categorical(logits=batch["logits"]).log_prob(batch["sampled"]))


@each_way
def test_logits_that_are_overwritten_afterwards(way: dict[str, Any]) -> None:
    keep = module(nn.Identity(), "kept", "logits")
    policy = TensorDictSequential(*discrete().module, keep, module(lambda x: x * 0, "logits", "logits"))
    batch = collect(policy, **way)
    assert_same(batch["action_log_prob"], D.Categorical(logits=batch["kept"]).log_prob(batch["action"]))


@each_way
def test_log_probs_may_be_read_by_later_parts(way: dict[str, Any]) -> None:
    doubled = module(lambda x: x * 2, "doubled", "action_log_prob")
    batch = collect(TensorDictSequential(*discrete().module, doubled), **way)
    assert_same(batch["doubled"], batch["action_log_prob"] * 2)


@each_way
def test_log_probs_may_be_overwritten_by_later_parts(way: dict[str, Any]) -> None:
    zeroed = module(lambda x: x[..., 0] * 0, "action_log_prob")
    batch = collect(TensorDictSequential(*discrete().module, zeroed), **way)
    assert not batch["action_log_prob"].any()


@each_way
def test_log_probs_may_be_read_by_later_parts_that_do_not_say_so(way: dict[str, Any]) -> None:
    class Reader(TensorDictModuleBase):
        in_keys, out_keys = [], ["doubled"]

        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            return tensordict.set("doubled", tensordict["action_log_prob"] * 2)

    batch = collect(TensorDictSequential(*discrete().module, Reader()), **way)
    assert_same(batch["doubled"], batch["action_log_prob"] * 2)


@each_way
def test_log_probs_may_be_recurrent_state(way: dict[str, Any]) -> None:
    first = TensorDictModule(
        lambda x, lp: x[..., :CHOICES] + 0 * lp.unsqueeze(-1), ["observation", "action_log_prob"], ["logits"]
    )
    seen = module(lambda lp: lp + 0, "seen", "action_log_prob")
    policy = ProbabilisticTensorDictSequential(seen, first, sampler(D.Categorical))
    policy.state_shapes = {"action_log_prob": ()}
    batch = collect(policy, WaveEnv(lengths=[50] * 3), **way)
    assert_same(batch["seen"][:, 1:], batch["action_log_prob"][:, :-1])


@each_way
def test_an_action_that_is_there_already_is_not_sampled_again(way: dict[str, Any]) -> None:
    """tensordict's way to give a deterministic action its log-prob."""
    policy = ProbabilisticTensorDictSequential(
        module(mlp(CHOICES), "logits"),
        module(lambda logits: logits.argmin(-1), "action", "logits"),
        sampler(D.Categorical),
    )
    batch = collect(policy, WaveEnv(lengths=[30] * 6), **way)
    assert torch.equal(batch["action"], batch["logits"].argmin(-1))
    assert_same(batch["action_log_prob"], D.Categorical(logits=batch["logits"]).log_prob(batch["action"]))


@each_way
def test_two_samplers_in_a_row(way: dict[str, Any]) -> None:
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Sequential(mlp(2 * AXES), NormalParamExtractor()), ["observation"], ["loc", "scale"]),
        sampler(D.Normal, ["loc", "scale"], "push"),
        module(mlp(CHOICES, inputs=AXES), "logits", "push"),
        sampler(D.OneHotCategorical, out="turn"),
    )
    batch = collect(policy, WaveEnv(MIXED), **way)
    assert_same(batch["push_log_prob"], D.Normal(batch["loc"], batch["scale"]).log_prob(batch["push"]))
    assert_same(batch["turn_log_prob"], D.OneHotCategorical(logits=batch["logits"]).log_prob(batch["turn"]))


@pytest.mark.skipif(not HAS_GENERATORS, reason="an older tensordict")
@each_way
def test_a_generator_of_the_modules_own(way: dict[str, Any]) -> None:
    def run(torch_seed: int) -> Tensor:
        torch.manual_seed(0)
        policy = discrete(generator=7)
        torch.manual_seed(torch_seed)
        return collect(policy, WaveEnv(lengths=[30] * 6), **way)["action"]

    assert torch.equal(run(1), run(2))


def test_many_samples_cannot_be_acted_on() -> None:
    with pytest.raises((PolicyError, RuntimeError, ValueError)):
        collect(discrete(num_samples=5))


@each_way
def test_cached_distributions(way: dict[str, Any]) -> None:
    assert_policy_agrees(discrete(cache_dist=True), way)


@each_way
@pytest.mark.parametrize("options", [{"log_prob_key": "lp"}, {"log_prob_keys": ["lp"]}, {"log_prob_key": ("a", "lp")}])
def test_names_of_log_probs(options: Any, way: dict[str, Any]) -> None:
    batch = assert_policy_agrees(discrete(**options), way)
    assert batch["lp" if ("a", "lp") not in options.values() else ("a", "lp")].shape == (3, 6)


@each_way
def test_aggregated_log_probs(way: dict[str, Any]) -> None:
    with set_composite_lp_aggregate(True):
        single = discrete()
        batch = collect(single, **way)
        assert_same(batch["sample_log_prob"], D.Categorical(logits=batch["logits"]).log_prob(batch["action"]))
        several = composite()
        batch = collect(several, WaveEnv(MIXED), **way)
        params = batch["params"]
        turn = D.OneHotCategorical(logits=params["turn", "logits"]).log_prob(batch["turn"])
        push = D.Normal(params["push", "loc"], params["push", "scale"]).log_prob(batch["push"]).sum(-1)
        assert_same(batch["sample_log_prob"], turn + push)


# -- how it is run --------------------------------------------------------------------------------------------------


def test_what_is_not_understood_costs_only_its_own_part() -> None:
    collector = Collector(WaveEnv(), TensorDictSequential(module(mlp(CHOICES)), Noisy()), frames_per_batch=18)
    next(iter(collector))
    assert stages_of(collector) == ("MLPStage", "TensorDictStage")


def test_a_sampler_before_others_stays_fast_where_it_may() -> None:
    value = module(mlp(1), "value")
    collector = Collector(WaveEnv(), TensorDictSequential(*discrete().module, value), frames_per_batch=18)
    next(iter(collector))
    assert stages_of(collector) == ("MLPStage", "CategoricalStage", "MLPStage")


def test_a_continuous_actor_with_a_value() -> None:
    policy = TensorDictSequential(
        TensorDictModule(nn.Sequential(mlp(2 * AXES), NormalParamExtractor()), ["observation"], ["loc", "scale"]),
        sampler(D.Normal, ["loc", "scale"]),
        module(mlp(1), "value"),
    )
    batch = collect(policy, WaveEnv(CONTINUOUS))
    assert_agrees(policy, batch)
