"""The fast paths change nothing but speed: what is recorded is what the module itself gives."""

import warnings
from typing import Any

import pytest
import torch
from policy_zoo import (
    SIZE,
    STOCHASTIC,
    WAYS,
    ZOO,
    Case,
    WaveEnv,
    assert_agrees,
    assert_same,
    collect,
    continuous,
    discrete,
    mlp,
    replay,
    samplers_of,
    stages_of,
)
from torch import nn

from swath.collectors import Collector
from swath.modules import ExplorationType, as_policy, set_exploration_type
from swath.rollout.loop import LoopSettings, RolloutLoop

# Of squashed normals the module estimates the mean from samples, of categoricals it gives NaN.
NO_MEAN = {name for name in STOCHASTIC if name.startswith(("tanh", "categorical"))} | {"one-hot of tensordict"}
GREEDY = [
    pytest.param(name, kind, id=f"{name}-{kind.name}")
    for kind in ExplorationType
    for name in STOCHASTIC
    if kind is not ExplorationType.RANDOM and not (kind is ExplorationType.MEAN and name in NO_MEAN)
]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("case", ZOO.values(), ids=ZOO.keys())
def test_a_batch_holds_what_the_module_gives(case: Case, way: dict[str, Any]) -> None:
    env = case.env()
    policy = as_policy(case.make(), env)
    for batch in Collector(env, policy, frames_per_batch=18, total_frames=36, **way):
        assert_agrees(policy, batch, case.tolerance)


@pytest.mark.parametrize("case", ZOO.values(), ids=ZOO.keys())
def test_the_fast_path_is_not_lost(case: Case) -> None:
    collector = Collector(case.env(), case.make(), frames_per_batch=6)
    next(iter(collector))
    assert stages_of(collector) == case.stages


@pytest.mark.parametrize("policy", [discrete(), continuous()], ids=["discrete", "continuous"])
@pytest.mark.parametrize("way", ["slow", "trusted"])
def test_the_fast_path_can_be_switched_off(policy: Any, way: str) -> None:
    env = WaveEnv(STOCHASTIC["normal"].actions if "loc" in policy.out_keys else STOCHASTIC["categorical"].actions)
    collector = Collector(env, policy, frames_per_batch=6, **WAYS[way])
    next(iter(collector))
    assert stages_of(collector) == (("TorchStage", "TensorDictStage") if way == "slow" else ("TensorDictStage",))


@pytest.mark.parametrize("batch_size", [(), (1,), (6,), (2, 3)], ids=str)
@pytest.mark.parametrize("name", ["categorical", "one-hot of torch", "tanh-normal", "own forward", "composite"])
def test_any_shape_of_lanes(name: str, batch_size: tuple[int, ...]) -> None:
    case = ZOO[name]
    env = case.env(lengths=[4, 2, 3, 5, 1, 6][: max(1, torch.Size(batch_size).numel())], batch_size=batch_size)
    policy = as_policy(case.make(), env)
    batch = collect(policy, env, steps=8)
    assert batch.shape == (*batch_size, 8)
    assert_agrees(policy, batch, case.tolerance)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize(("name", "kind"), GREEDY)
def test_exploration_types_take_what_the_module_takes(name: str, kind: ExplorationType, way: dict[str, Any]) -> None:
    case = STOCHASTIC[name]
    policy = case.make()
    try:
        replay(policy, collect(policy, case.env(), steps=1), kind)
    except Exception as error:  # what the module cannot do, nobody else can
        with pytest.raises(type(error)):
            collect(policy, case.env(), exploration_type=kind, **way)
        return
    batch = collect(policy, case.env(), exploration_type=kind, **way)
    told = replay(policy, batch, kind)
    for part in samplers_of(policy):
        for key in part.out_keys:
            assert_same(batch[key], told[key], name=key)


def test_the_mean_of_a_tanh_normal_is_estimated() -> None:
    case = STOCHASTIC["tanh-normal"]
    policy = case.make()
    batch = collect(policy, case.env(), exploration_type=ExplorationType.MEAN)
    assert_same(batch["action"], replay(policy, batch, ExplorationType.MEAN)["action"], tolerance=0.15)


@pytest.mark.parametrize("default", [ExplorationType.MODE, ExplorationType.RANDOM])
def test_without_an_exploration_type_the_policy_decides(default: ExplorationType) -> None:
    env = WaveEnv(lengths=[50] * 8, still=True)
    batch = collect(discrete(default_interaction_type=default), env, steps=20, exploration_type=None)
    is_greedy = bool((batch["action"] == batch["logits"].argmax(-1)).all())
    assert is_greedy == (default is ExplorationType.MODE)


def test_without_an_exploration_type_the_context_decides() -> None:
    env = WaveEnv(lengths=[50] * 100)
    runner = RolloutLoop(env, discrete(), LoopSettings(exploration=None)).policy
    kinds = {ExplorationType.MODE: True, ExplorationType.RANDOM: False, ExplorationType.DETERMINISTIC: True}
    for kind, is_greedy in kinds.items():
        with torch.no_grad(), set_exploration_type(kind):
            runner.begin(1, None)
            runner.act(0)
        out = runner.outputs.tensors
        assert torch.equal(out["action"], out["logits"].argmax(-1)) == is_greedy


def test_ties_are_broken_as_the_module_breaks_them() -> None:
    """Which is a question for tensordict's one-hot distribution: it sets all of them."""
    for name in ("categorical", "one-hot of torch", "one-hot of tensordict"):
        policy = STOCHASTIC[name].make()
        nn.init.zeros_(policy[0].module[-1].weight)
        nn.init.zeros_(policy[0].module[-1].bias)
        batch = collect(policy, exploration_type=ExplorationType.MODE)
        assert_same(batch["action"], replay(policy, batch)["action"])


def test_policy_factory() -> None:
    policy = discrete()
    batch = collect(None, policy_factory=lambda: policy)
    assert_agrees(policy, batch)


def test_a_large_network_is_left_to_torch() -> None:
    wide = nn.Sequential(nn.Linear(SIZE, 1000), nn.Tanh(), nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 3))
    collector = Collector(WaveEnv(), discrete(net=wide), frames_per_batch=3)
    assert_agrees(collector.policy, next(iter(collector)))
    assert stages_of(collector) == ("TorchStage", "CategoricalStage")


def test_large_weights_do_not_lose_the_fast_path() -> None:
    net = mlp(3, nn.ReLU())
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(300)
    collector = Collector(WaveEnv(), discrete(net=net), frames_per_batch=6)
    next(iter(collector))
    assert stages_of(collector) == ("MLPStage", "CategoricalStage")


def test_running_a_plan_gives_no_warnings() -> None:
    """Of overflows in activations, for one: torch has none either."""
    net = mlp(3, nn.Sigmoid())
    with torch.no_grad():
        net[0].weight.mul_(1e4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collect(discrete(net=net))
