"""The fast paths change nothing but speed: what is recorded is what the module itself gives."""

import warnings
from typing import Any

import policy_zoo as zoo
import pytest
import torch
from torch import nn

from swath.collectors import Collector
from swath.modules import ExplorationType, as_policy, set_exploration_type
from swath.rollout.loop import LoopSettings, RolloutLoop

pytestmark = pytest.mark.usefixtures("beside_any_env")

# Of squashed normals the module estimates the mean from samples, of categoricals it gives NaN.
NO_MEAN = {name for name in zoo.STOCHASTIC if name.startswith(("tanh", "categorical"))} | {"one-hot of tensordict"}
ESTIMATED = {"moved normal", "stretched normal"}  # also where a deterministic value is asked for, which they have not
GREEDY = [
    pytest.param(name, kind, id=f"{name}-{kind.name}")
    for kind in ExplorationType
    for name in zoo.STOCHASTIC
    if kind is not ExplorationType.RANDOM
    and not (kind is ExplorationType.MEAN and name in NO_MEAN | ESTIMATED)
    and not (kind is ExplorationType.DETERMINISTIC and name in ESTIMATED)
]


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("way", zoo.WAYS)
@pytest.mark.parametrize("case", zoo.ZOO.values(), ids=zoo.ZOO.keys())
def test_a_batch_holds_what_the_module_gives(case: zoo.Case, way: str, steps: int) -> None:
    env = case.env()
    policy = as_policy(case.make(), env)
    collector = Collector(
        env, policy, frames_per_batch=3 * steps, total_frames=12 if steps == 1 else 36, **zoo.WAYS[way]
    )
    for batch in collector:
        zoo.assert_agrees(policy, batch, case.tolerance)
    expected = {"fast": case.stages, "trusted": ("TensorDictStage",)}
    if way in expected:
        assert zoo.stages_of(collector) == expected[way]
    assert way == "fast" or set(zoo.stages_of(collector)) <= {"TorchStage", "DistributionStage", "TensorDictStage"}


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("batch_size", [(), (1,), (6,), (2, 3)], ids=str)
@pytest.mark.parametrize("name", ["categorical", "one-hot of torch", "tanh-normal", "own forward", "composite"])
def test_any_shape_of_lanes(name: str, batch_size: tuple[int, ...], steps: int) -> None:
    case = zoo.ZOO[name]
    env = case.env(lengths=[4, 2, 3, 5, 1, 6][: max(1, torch.Size(batch_size).numel())], batch_size=batch_size)
    policy = as_policy(case.make(), env)
    batch = zoo.collect(policy, env, steps=steps)
    assert batch.shape == (*batch_size, steps)
    zoo.assert_agrees(policy, batch, case.tolerance)


@zoo.each_way
@pytest.mark.parametrize(("name", "kind"), GREEDY)
def test_exploration_types_take_what_the_module_takes(name: str, kind: ExplorationType, way: dict[str, Any]) -> None:
    case = zoo.STOCHASTIC[name]
    policy = case.make()
    try:
        zoo.replay(policy, zoo.collect(policy, case.env(), steps=1), kind)
    except Exception as error:  # what the module cannot do, nobody else can
        with pytest.raises(type(error)):
            zoo.collect(policy, case.env(), exploration_type=kind, **way)
        return
    batch = zoo.collect(policy, case.env(), exploration_type=kind, **way)
    told = zoo.replay(policy, batch, kind)
    for part in zoo.samplers_of(policy):
        for key in part.out_keys:
            zoo.assert_same(batch[key], told[key], name=key)


def test_the_mean_of_a_tanh_normal_is_estimated() -> None:
    case = zoo.STOCHASTIC["tanh-normal"]
    policy = case.make()
    batch = zoo.collect(policy, case.env(), exploration_type=ExplorationType.MEAN)
    zoo.assert_same(batch["action"], zoo.replay(policy, batch, ExplorationType.MEAN)["action"], tolerance=0.15)


@pytest.mark.parametrize("default", [ExplorationType.MODE, ExplorationType.RANDOM])
def test_without_an_exploration_type_the_policy_decides(default: ExplorationType) -> None:
    env = zoo.WaveEnv(lengths=[50] * 8, still=True)
    batch = zoo.collect(zoo.discrete(default_interaction_type=default), env, steps=20, exploration_type=None)
    is_greedy = bool((batch["action"] == batch["logits"].argmax(-1)).all())
    assert is_greedy == (default is ExplorationType.MODE)


def test_without_an_exploration_type_the_context_decides() -> None:
    env = zoo.WaveEnv(lengths=[50] * 100)
    runner = RolloutLoop(env, zoo.discrete(), LoopSettings(exploration=None)).policy
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
        policy = zoo.STOCHASTIC[name].make()
        nn.init.zeros_(policy[0].module[-1].weight)
        nn.init.zeros_(policy[0].module[-1].bias)
        batch = zoo.collect(policy, exploration_type=ExplorationType.MODE)
        zoo.assert_same(batch["action"], zoo.replay(policy, batch)["action"])


def test_policy_factory() -> None:
    policy = zoo.discrete()
    batch = zoo.collect(None, policy_factory=lambda: policy)
    zoo.assert_agrees(policy, batch)


def test_a_large_network_is_left_to_torch() -> None:
    wide = nn.Sequential(nn.Linear(zoo.SIZE, 1000), nn.Tanh(), nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 3))
    collector = Collector(zoo.WaveEnv(), zoo.discrete(net=wide), frames_per_batch=3)
    zoo.assert_agrees(collector.policy, collector.next())
    assert zoo.stages_of(collector) == ("TorchStage", "CategoricalStage")


@pytest.mark.parametrize(("activation", "stage"), [(nn.Tanh, "MLPStage"), (nn.ReLU, "TorchStage")])
def test_many_lanes_run_where_that_is_quicker(activation: Any, stage: str) -> None:
    net = nn.Sequential(
        nn.Linear(zoo.SIZE, 64), activation(), nn.Linear(64, 64), activation(), nn.Linear(64, zoo.CHOICES)
    )
    env = zoo.WaveEnv(lengths=[5] * 1024)
    collector = Collector(env, zoo.discrete(net=net), frames_per_batch=2048)
    assert zoo.stages_of(collector) == (stage, "CategoricalStage")
    zoo.assert_agrees(collector.policy, collector.next())


def test_large_weights_do_not_lose_the_fast_path() -> None:
    net = zoo.mlp(3, nn.ReLU())
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(300)
    assert zoo.stages_after(zoo.discrete(net=net)) == zoo.FAST


def test_running_a_plan_gives_no_warnings() -> None:
    """Of overflows in activations, for one: torch has none either."""
    net = zoo.mlp(3, nn.Sigmoid())
    with torch.no_grad():
        net[0].weight.mul_(1e4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zoo.collect(zoo.discrete(net=net))
