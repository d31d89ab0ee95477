"""A policy may be changed in any way between two batches: the next batch is what it gives then."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from policy_zoo import (
    CHOICES,
    CONTINUOUS,
    SIZE,
    WaveEnv,
    assert_agrees,
    assert_same,
    collect,
    continuous,
    discrete,
    mlp,
    module,
    replay,
    stages_of,
)
from tensordict import TensorDict
from tensordict.nn import InteractionType, NormalParamExtractor, TensorDictModule, TensorDictParams
from torch import nn

from swath.collectors import Collector

FAST = ("MLPStage", "CategoricalStage")
SLOW = ("TensorDictStage",)


def layers(policy: Any) -> Any:
    """Linear, activation, linear."""
    return policy[0].module


# -- weights ---------------------------------------------------------------------------------------------------------


def change_in_place(policy: Any) -> None:
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(-1.5)


def step_an_optimizer(policy: Any) -> None:
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    policy(TensorDict({"observation": torch.ones(5, SIZE)}, [5]))["logits"].square().sum().backward()
    optimizer.step()


def load_others(policy: Any) -> None:
    policy.load_state_dict(discrete().state_dict())


def assign_others(policy: Any) -> None:
    policy.load_state_dict(discrete().state_dict(), assign=True)


def replace_a_parameter(policy: Any) -> None:
    layers(policy)[0].weight = nn.Parameter(torch.randn(8, SIZE))


def swap_the_data(policy: Any) -> None:
    for weight in policy.parameters():
        weight.data = torch.randn_like(weight)


def widen(policy: Any) -> None:
    """Without telling the layers, whose in_features and out_features stay as they were."""
    first, _, last = layers(policy)
    first.weight, first.bias = nn.Parameter(torch.randn(20, SIZE)), nn.Parameter(torch.randn(20))
    last.weight = nn.Parameter(torch.randn(CHOICES, 20))


def remove_a_bias(policy: Any) -> None:
    layers(policy)[0].bias = None


# -- structure -------------------------------------------------------------------------------------------------------


def replace_an_activation(policy: Any) -> None:
    layers(policy)[1] = nn.ReLU()


def replace_an_activation_at_the_same_address(policy: Any) -> None:
    """Objects that are gone leave their address, and so their id, to others."""
    old = id(layers(policy)[1])
    layers(policy)[1] = nn.Identity()
    gc.collect()
    found = [nn.ReLU() for _ in range(1000)]
    layers(policy)[1] = next((relu for relu in found if id(relu) == old), found[0])


def replace_a_layer(policy: Any) -> None:
    layers(policy)[2] = nn.Linear(8, CHOICES)


def add_layers(policy: Any) -> None:
    layers(policy).append(nn.Linear(CHOICES, CHOICES))


def replace_the_network(policy: Any) -> None:
    policy[0].module = mlp(CHOICES, nn.ELU())


CHANGES = [
    *(change_in_place, step_an_optimizer, load_others, assign_others, replace_a_parameter, swap_the_data, widen),
    *(remove_a_bias, replace_an_activation, replace_an_activation_at_the_same_address, replace_a_layer, add_layers),
    replace_the_network,
]


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_batch_is_what_the_policy_gives_after(change: Callable[[Any], None]) -> None:
    policy = discrete()
    collector = Collector(WaveEnv(), policy, frames_per_batch=18)
    batches = iter(collector)
    assert_agrees(policy, next(batches))
    before = copy.deepcopy(policy)
    change(policy)
    batch = next(batches)
    assert_agrees(policy, batch)
    assert not torch.allclose(replay(before, batch)["logits"], batch["logits"], atol=1e-3)
    assert stages_of(collector) == FAST


def test_a_batch_comes_from_one_set_of_weights() -> None:
    """Also when they change while it is collected: the fast path takes them at its beginning."""
    policy = discrete()

    class Changing(WaveEnv):
        def step_into(self, *rows: Any) -> bool:
            change_in_place(policy)
            return super().step_into(*rows)

    before = copy.deepcopy(policy)
    assert_agrees(before, collect(policy, Changing()))


def test_another_network_that_is_not_understood_runs_itself() -> None:
    policy = discrete()
    collector = Collector(WaveEnv(), policy, frames_per_batch=18)
    batches = iter(collector)
    next(batches)
    policy[0].module = nn.Sequential(nn.Linear(SIZE, CHOICES), nn.LayerNorm(CHOICES))
    assert_agrees(policy, next(batches))
    assert stages_of(collector) == ("TorchStage", "CategoricalStage")


def test_a_lazy_layer_that_is_put_in_later() -> None:
    policy = discrete()
    collector = Collector(WaveEnv(), policy, frames_per_batch=18)
    batches = iter(collector)
    next(batches)
    layers(policy)[2] = nn.LazyLinear(CHOICES)
    assert_agrees(policy, next(batches))
    assert_agrees(policy, next(batches))
    assert stages_of(collector) == FAST


def test_a_replaced_part_is_used_only_if_the_sequence_uses_it() -> None:
    """tensordict's probabilistic sequences keep their first parts twice, and call those that cannot be replaced."""
    policy = discrete()
    batches = iter(Collector(WaveEnv(), policy, frames_per_batch=18))
    next(batches)
    policy.module[0] = module(mlp(CHOICES), "logits")
    assert_agrees(policy, next(batches))


def test_weights_that_are_put_into_the_collectors_own_copy() -> None:
    policy, others = discrete(), discrete()
    collector = Collector(WaveEnv(), policy, frames_per_batch=18)
    batches = iter(collector)
    assert_agrees(policy, next(batches))
    collector.update_policy_weights_(others.state_dict())
    assert_agrees(others, next(batches))
    assert stages_of(collector) == FAST


# -- settings --------------------------------------------------------------------------------------------------------


def test_settings_of_an_activation() -> None:
    policy = discrete(net=mlp(CHOICES, nn.LeakyReLU(0.1)))
    batches = iter(Collector(WaveEnv(), policy, frames_per_batch=18))
    next(batches)
    layers(policy)[1].negative_slope = -2.0
    assert_agrees(policy, next(batches))


def test_settings_of_the_extractor() -> None:
    policy = continuous(net=nn.Sequential(mlp(4), NormalParamExtractor()))
    batches = iter(Collector(WaveEnv(CONTINUOUS), policy, frames_per_batch=18))
    next(batches)
    extractor = layers(policy)[1]
    extractor.scale_lb, extractor.scale_mapping.min_val = 0.9, 0.5
    assert_agrees(policy, next(batches), 2e-4)


def test_settings_of_the_sampler() -> None:
    policy = discrete()
    batches = iter(Collector(WaveEnv(), policy, frames_per_batch=60, exploration_type=None))
    assert (next(batches)["action"] != next(batches)["logits"].argmax(-1)).any()
    policy[1].default_interaction_type = InteractionType.MODE
    batch = next(batches)
    assert (batch["action"] == batch["logits"].argmax(-1)).all()


@pytest.mark.parametrize("holder", [dict, lambda **ends: TensorDictParams(TensorDict(ends), no_convert=True)])
def test_the_ends_of_a_tanh_normal_may_be_moved(holder: Any) -> None:
    policy = continuous(distribution_kwargs=holder(low=torch.tensor(-1.0), high=torch.tensor([1.0, 2.0])))
    collector = Collector(WaveEnv(CONTINUOUS), policy, frames_per_batch=18)
    batches = iter(collector)
    assert_agrees(policy, next(batches), 2e-4)
    policy[1].distribution_kwargs["low"].fill_(0.5)
    batch = next(batches)
    assert stages_of(collector) == ("MLPStage", "NormalStage")
    assert_agrees(policy, batch, 2e-4)
    assert (batch["action"] >= 0.5).all()


# -- train and eval ----------------------------------------------------------------------------------------------------


def test_dropout_follows_train_and_eval() -> None:
    policy = module(nn.Sequential(nn.Linear(SIZE, 30), nn.Dropout(0.5), nn.Linear(30, CHOICES)))
    batches = iter(Collector(WaveEnv(), policy, frames_per_batch=18))
    for is_training in (True, False, True):
        policy.train(is_training)
        torch.manual_seed(1)
        batch = next(batches)
        torch.manual_seed(1)  # the module draws its own noise, in the order of the steps
        assert_same(batch["action"], replay(policy, batch)["action"])
        again = replay(policy, batch)["action"]
        assert torch.allclose(batch["action"], again, atol=1e-5) == (not is_training)


def test_batch_norm_follows_train_and_eval() -> None:
    policy = module(nn.Sequential(nn.Linear(SIZE, 8), nn.BatchNorm1d(8), nn.Linear(8, CHOICES)))
    batches = iter(Collector(WaveEnv(), policy, frames_per_batch=18))
    for is_training in (True, False, True):
        policy.train(is_training)
        truth = copy.deepcopy(policy)
        batch = next(batches)
        assert_same(batch["action"], replay(truth, batch)["action"])
        for name, buffer in truth.named_buffers():
            assert_same(policy.get_buffer(name), buffer, name=name)
    assert policy.module[1].num_batches_tracked == 12


def test_parametrized_and_normalised_weights() -> None:
    from torch.nn.utils import parametrizations

    policy = discrete()
    batches = iter(Collector(WaveEnv(), policy, frames_per_batch=18))
    next(batches)
    parametrizations.weight_norm(layers(policy)[0])
    layers(policy)[0].parametrizations.weight.original0.data.mul_(3)
    assert_agrees(policy, next(batches))


def test_a_network_of_another_precision_is_refused_by_the_module_itself() -> None:
    policy = discrete()
    batches = iter(Collector(WaveEnv(), policy, frames_per_batch=18))
    next(batches)
    policy.double()
    with pytest.raises(RuntimeError, match="dtype"):
        next(batches)


def test_a_function_may_be_replaced() -> None:
    policy = TensorDictModule(lambda x: x[..., :CHOICES], in_keys=["observation"], out_keys=["action"])
    batches = iter(Collector(WaveEnv(), policy, frames_per_batch=18))
    next(batches)
    policy.module = lambda x: x[..., :CHOICES].cos()
    assert_agrees(policy, next(batches))
