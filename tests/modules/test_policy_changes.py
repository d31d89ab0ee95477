"""A policy may be changed in any way between two batches: the next batch is what it gives then."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import policy_zoo as zoo
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictParams,
    TensorDictSequential,
)
from torch import nn
from torch.nn.utils import parametrizations

from swath.collectors import Collector
from swath.envs import GymEnv

pytestmark = pytest.mark.usefixtures("beside_any_env")

# -- weights ---------------------------------------------------------------------------------------------------------


def change_in_place(policy: Any) -> None:
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(-1.5)


def step_an_optimizer(policy: Any) -> None:
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    policy(TensorDict({"observation": torch.ones(5, zoo.SIZE)}, [5]))["logits"].square().sum().backward()
    optimizer.step()


def load_others(policy: Any) -> None:
    policy.load_state_dict(zoo.discrete().state_dict())


def assign_others(policy: Any) -> None:
    policy.load_state_dict(zoo.discrete().state_dict(), assign=True)


def replace_a_parameter(policy: Any) -> None:
    zoo.layers_of(policy)[0].weight = nn.Parameter(torch.randn(8, zoo.SIZE))


def swap_the_data(policy: Any) -> None:
    for weight in policy.parameters():
        weight.data = torch.randn_like(weight)


def see_the_same_memory_otherwise(policy: Any) -> None:
    weight = zoo.layers_of(policy)[0].weight
    weight.data = weight.data[:1].expand_as(weight)


def widen(policy: Any) -> None:
    """Without telling the layers, whose in_features and out_features stay as they were."""
    first, _, last = zoo.layers_of(policy)
    first.weight, first.bias = nn.Parameter(torch.randn(20, zoo.SIZE)), nn.Parameter(torch.randn(20))
    last.weight = nn.Parameter(torch.randn(zoo.CHOICES, 20))


def remove_a_bias(policy: Any) -> None:
    zoo.layers_of(policy)[0].bias = None


# -- structure -------------------------------------------------------------------------------------------------------


def replace_an_activation(policy: Any) -> None:
    zoo.layers_of(policy)[1] = nn.ReLU()


def replace_an_activation_at_the_same_address(policy: Any) -> None:
    """Objects that are gone leave their address, and so their id, to others."""
    old = id(zoo.layers_of(policy)[1])
    zoo.layers_of(policy)[1] = nn.Identity()
    gc.collect()
    found = [nn.ReLU() for _ in range(1000)]
    zoo.layers_of(policy)[1] = next((relu for relu in found if id(relu) == old), found[0])


def put_in_a_layer_norm(policy: Any) -> None:
    zoo.layers_of(policy)[1] = nn.LayerNorm(8)
    nn.init.uniform_(zoo.layers_of(policy)[1].weight)


def replace_a_layer(policy: Any) -> None:
    zoo.layers_of(policy)[2] = nn.Linear(8, zoo.CHOICES)


def add_layers(policy: Any) -> None:
    zoo.layers_of(policy).append(nn.Linear(zoo.CHOICES, zoo.CHOICES))


def replace_the_network(policy: Any) -> None:
    policy[0].module = zoo.mlp(zoo.CHOICES, nn.ELU())


def narrow_weights_where_they_lie(policy: Any) -> None:
    first, _, last = zoo.layers_of(policy)
    first.weight.data, first.bias.data, last.weight.data = (
        first.weight.data[:5],
        first.bias.data[:5],
        last.weight[:, :5],
    )


def exchange_all_layers_at_once(policy: Any) -> None:
    layers = zoo.layers_of(policy)
    vars(layers)["_modules"] = vars(zoo.layers_of(zoo.discrete()))["_modules"]


CHANGES = [
    *(change_in_place, step_an_optimizer, load_others, assign_others, replace_a_parameter, swap_the_data, widen),
    *(remove_a_bias, replace_an_activation, replace_an_activation_at_the_same_address, replace_a_layer, add_layers),
    *(replace_the_network, put_in_a_layer_norm, see_the_same_memory_otherwise, narrow_weights_where_they_lie),
    exchange_all_layers_at_once,
]


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_batch_is_what_the_policy_gives_after(change: Callable[[Any], None]) -> None:
    policy = zoo.discrete()
    collector = Collector(zoo.WaveEnv(), policy, frames_per_batch=18)
    zoo.assert_agrees(policy, collector.next())
    before = copy.deepcopy(policy)
    change(policy)
    batch = collector.next()
    zoo.assert_agrees(policy, batch)
    assert not torch.allclose(zoo.replay(before, batch)["logits"], batch["logits"], atol=1e-3)
    assert zoo.stages_of(collector) == zoo.FAST


def test_a_batch_comes_from_one_set_of_weights() -> None:
    """Also when they change while it is collected: the fast path takes them at its beginning."""
    policy = zoo.discrete()

    class Changing(zoo.WaveEnv):
        def step_into(self, *rows: Any) -> bool:
            change_in_place(policy)
            return super().step_into(*rows)

    before = copy.deepcopy(policy)
    zoo.assert_agrees(before, zoo.collect(policy, Changing()))


def replace_the_network_by_one_that_is_not_understood(policy: Any) -> None:
    policy[0].module = nn.Sequential(nn.Linear(zoo.SIZE, zoo.CHOICES), nn.Softsign())


def put_in_a_lazy_layer(policy: Any) -> None:
    zoo.layers_of(policy)[2] = nn.LazyLinear(zoo.CHOICES)


def replace_a_part_that_the_sequence_does_not_use(policy: Any) -> None:
    """tensordict's probabilistic sequences keep their first parts twice, and call those that cannot be replaced."""
    policy.module[0] = zoo.module(zoo.mlp(zoo.CHOICES), "logits")


def parametrize_a_weight(policy: Any) -> None:
    parametrizations.weight_norm(zoo.layers_of(policy)[0])
    zoo.layers_of(policy)[0].parametrizations.weight.original0.data.mul_(3)


def set_an_activation(policy: Any) -> None:
    zoo.layers_of(policy)[1].negative_slope = -2.0


def set_the_extractor(policy: Any) -> None:
    extractor = zoo.layers_of(policy)[1]
    extractor.scale_lb, extractor.scale_mapping.min_val = 0.9, 0.5


def replace_a_function(policy: Any) -> None:
    policy.module = lambda x: x[..., : zoo.CHOICES].cos()


class Scaled(nn.Module):
    """A network whose forward asks what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.activation, self.scale, self.spare = zoo.mlp(zoo.CHOICES), nn.LeakyReLU(0.1), None, 0

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        result = self.activation(self.net(observation))
        if self.scale is not None:
            result = result * self.scale
        return result


def give_a_parameter_to_a_module_without(policy: Any) -> None:
    policy[0].module.scale = nn.Parameter(torch.tensor(-3.0))


def set_an_activation_inside(policy: Any) -> None:
    policy[0].module.activation.negative_slope = 5.0


def put_in_a_hook_by_hand(policy: Any) -> None:
    policy[0].module.net[0]._forward_hooks[99] = lambda module, args, result: -4 * result


def put_a_forward_in_the_place_of_an_attribute(policy: Any) -> None:
    net = policy[0].module
    del net.spare
    net.forward = lambda observation: -5 * net.net(observation)


OTHER_CHANGES: list[tuple[Callable[[Any], None], Callable[[], Any], tuple[str, ...]]] = [
    (replace_the_network_by_one_that_is_not_understood, zoo.discrete, ("TorchStage", "CategoricalStage")),
    (put_in_a_lazy_layer, zoo.discrete, zoo.FAST),
    (replace_a_part_that_the_sequence_does_not_use, zoo.discrete, zoo.SLOW),
    (parametrize_a_weight, zoo.discrete, ("TorchStage", "CategoricalStage")),
    (set_an_activation, lambda: zoo.discrete(net=zoo.mlp(zoo.CHOICES, nn.LeakyReLU(0.1))), zoo.FAST),
    (
        set_the_extractor,
        lambda: zoo.continuous(net=nn.Sequential(zoo.mlp(4), NormalParamExtractor())),
        ("MLPStage", "NormalStage"),
    ),
    (give_a_parameter_to_a_module_without, lambda: zoo.discrete(net=Scaled()), ("TracedStage", "CategoricalStage")),
    (set_an_activation_inside, lambda: zoo.discrete(net=Scaled()), ("TracedStage", "CategoricalStage")),
    (put_in_a_hook_by_hand, lambda: zoo.discrete(net=Scaled()), ("TorchStage", "CategoricalStage")),
    (
        put_a_forward_in_the_place_of_an_attribute,
        lambda: zoo.discrete(net=Scaled()),
        ("TorchStage", "CategoricalStage"),
    ),
    (replace_a_function, lambda: zoo.module(lambda x: x[..., : zoo.CHOICES]), ("TorchStage",)),
]


@pytest.mark.parametrize(("change", "make", "stages"), OTHER_CHANGES)
def test_changes_that_only_some_policies_know(change: Any, make: Any, stages: tuple[str, ...]) -> None:
    policy = make()
    is_continuous = "loc" in policy.out_keys
    collector = zoo.begun(policy, zoo.WaveEnv(zoo.CONTINUOUS if is_continuous else zoo.DISCRETE))
    change(policy)
    for _ in range(2):
        zoo.assert_agrees(policy, collector.next(), 2e-4 if is_continuous else 1e-5)
    assert zoo.stages_of(collector) == stages


def test_weights_that_are_put_into_the_collectors_own_copy() -> None:
    policy, others = zoo.discrete(), zoo.discrete()
    collector = Collector(zoo.WaveEnv(), policy, frames_per_batch=18)
    zoo.assert_agrees(policy, collector.next())
    collector.update_policy_weights_(others.state_dict())
    zoo.assert_agrees(others, collector.next())
    assert zoo.stages_of(collector) == zoo.FAST


# -- settings --------------------------------------------------------------------------------------------------------


def test_settings_of_the_sampler() -> None:
    policy = zoo.discrete()
    collector = Collector(zoo.WaveEnv(), policy, frames_per_batch=60, exploration_type=None)
    assert (collector.next()["action"] != collector.next()["logits"].argmax(-1)).any()
    policy[1].default_interaction_type = InteractionType.MODE
    batch = collector.next()
    assert (batch["action"] == batch["logits"].argmax(-1)).all()


@pytest.mark.parametrize("holder", [dict, lambda **ends: TensorDictParams(TensorDict(ends), no_convert=True)])
def test_the_ends_of_a_tanh_normal_may_be_moved(holder: Any) -> None:
    policy = zoo.continuous(distribution_kwargs=holder(low=torch.tensor(-1.0), high=torch.tensor([1.0, 2.0])))
    collector = Collector(zoo.WaveEnv(zoo.CONTINUOUS), policy, frames_per_batch=18)
    zoo.assert_agrees(policy, collector.next(), 2e-4)
    policy[1].distribution_kwargs["low"].fill_(0.5)
    batch = collector.next()
    assert zoo.stages_of(collector) == ("MLPStage", "NormalStage")
    zoo.assert_agrees(policy, batch, 2e-4)
    assert (batch["action"] >= 0.5).all()


# -- train and eval ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: nn.Dropout(0.5), lambda: nn.BatchNorm1d(30)], ids=["dropout", "batch norm"])
def test_layers_follow_train_and_eval(make: Callable[[], nn.Module]) -> None:
    layer = make()
    policy = zoo.module(nn.Sequential(nn.Linear(zoo.SIZE, 30), layer, nn.Linear(30, zoo.CHOICES)))
    collector = Collector(zoo.WaveEnv(), policy, frames_per_batch=18)
    for is_training in (True, False, True):
        policy.train(is_training)
        truth = copy.deepcopy(policy)
        torch.manual_seed(1)
        batch = collector.next()
        torch.manual_seed(1)  # the module draws its own noise, in the order of the steps
        zoo.assert_same(batch["action"], zoo.replay(truth, batch)["action"])
        for name, buffer in truth.named_buffers():
            zoo.assert_same(policy.get_buffer(name), buffer, name=name)
        if isinstance(layer, nn.Dropout):
            again = zoo.replay(policy, batch)["action"]
            assert torch.allclose(batch["action"], again, atol=1e-5) == (not is_training)
    assert isinstance(layer, nn.Dropout) or layer.num_batches_tracked == 12


def test_a_network_of_another_precision_is_refused_by_the_module_itself() -> None:
    policy = zoo.discrete()
    collector = zoo.begun(policy)
    policy.double()
    with pytest.raises(RuntimeError, match="dtype"):
        collector.next()


def test_parts_that_change_places() -> None:
    """Both write the action: the last one decides."""
    parts = {name: TensorDictModule(nn.Linear(4, 2), ["observation"], ["action"]) for name in ("one", "two")}
    policy = TensorDictSequential(parts)
    with Collector(GymEnv("CartPole-v1"), policy, frames_per_batch=1) as collector:
        for last in ("two", "one", "two"):
            policy.module[last] = policy.module.pop(last)
            for _ in range(3):
                batch = collector.next()
                expected = parts[last].module(batch["observation"])
                torch.testing.assert_close(batch["action"], expected.detach())


@pytest.mark.parametrize("compiled", [torch.jit.script, lambda net: torch.jit.trace(net, torch.zeros(1, 4))])
def test_networks_of_torchscript_are_called(compiled: Callable[[nn.Module], Any]) -> None:
    net = nn.Linear(4, 2)
    policy = TensorDictModule(compiled(net), ["observation"], ["action"])
    with Collector(GymEnv("CartPole-v1"), policy, frames_per_batch=3) as collector:
        for _ in range(3):
            batch = collector.next()
            torch.testing.assert_close(batch["action"], net(batch["observation"]).detach())
            with torch.no_grad():
                net.weight.add_(1.0)
