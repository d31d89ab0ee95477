"""LSTM and GRU layers on arrays: one step of them is what torch's modules give, whatever their shapes."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import policy_zoo as zoo
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from swath.collectors import Collector
from swath.modules.peer_parts import OneStep, RecurrentStage
from swath.modules.traced import trace

QUICK = ("TracedStage",)
STAGES: dict[str, tuple[str, ...]] = {
    "GRU cell": ("TracedStage", "MLPStage"),
    "LSTM cell": ("TracedStage", "MLPStage"),
    "nn.GRU": ("TracedStage", "MLPStage"),
    "nn.LSTM": QUICK,
    "GRU cell on is_init": QUICK,
    "sampling GRU": ("TracedStage", "MLPStage", "CategoricalStage"),
    "on is_init": zoo.SLOW,
}


@pytest.mark.parametrize("name", zoo.RECURRENT)
def test_recurrent_networks_of_users_are_run_on_arrays(name: str) -> None:
    assert zoo.stages_after(zoo.RECURRENT[name]("next")) == STAGES[name]


@pytest.mark.parametrize("name", ["GRU cell", "LSTM cell", "GRU cell on is_init"])
def test_a_single_lane_without_a_dimension(name: str) -> None:
    env = zoo.WaveEnv(lengths=[4], batch_size=())
    assert zoo.stages_after(zoo.RECURRENT[name]("next"), env) == STAGES[name]


def rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([nn.LSTM, nn.GRU]),
    lanes=st.sampled_from([1, 2, 5, 40]),
    inputs=st.integers(1, 5),
    hidden=st.sampled_from([1, 3, 8, 40]),
    layers=st.integers(1, 3),
    bias=st.booleans(),
    begins=st.booleans(),
)
def test_a_step_is_what_the_network_gives(
    kind: Any, lanes: int, inputs: int, hidden: int, layers: int, bias: bool, begins: bool
) -> None:
    """For all lanes, and for some of them."""
    network = kind(inputs, hidden, layers, bias=bias, batch_first=True)
    states = [rows(lanes, layers, hidden) for _ in range(2 if kind is nn.LSTM else 1)]
    is_init = np.arange(lanes)[:, None] % 2 == (0 if begins else 5)
    outputs = [np.full((lanes, hidden), np.nan, np.float32), *(np.full_like(state, np.nan) for state in states)]
    x = rows(lanes, inputs)
    stage = RecurrentStage(network, [x, *states, is_init], outputs)
    assert trace(OneStep(network), [x, *states], [out.copy() for out in outputs], is_flat=True) is not None
    with torch.no_grad():
        start = [torch.where(torch.from_numpy(is_init)[:, None], 0.0, torch.from_numpy(state)) for state in states]
        wanted = OneStep(network)(torch.from_numpy(x), *start)
    stage.begin(3, None)
    stage.run(0)
    for found, one in zip(outputs, wanted, strict=True):
        np.testing.assert_allclose(found, one.numpy(), rtol=1e-4, atol=1e-5)
        found[:] = np.nan
    some = np.arange(lanes)[::2][::-1]
    stage.run_on(some, some)
    for found, one in zip(outputs, wanted, strict=True):
        np.testing.assert_allclose(found[some], one.numpy()[some], rtol=1e-4, atol=1e-5)
        assert np.isnan(np.delete(found, some, 0)).all()


def test_a_large_network_of_torchrl_is_left_to_torch() -> None:
    network = nn.GRU(4, 800, batch_first=True)
    outputs = [np.zeros((4, 800), np.float32), np.zeros((4, 1, 800), np.float32)]
    x, state, is_init = rows(4, 4), rows(4, 1, 800), np.zeros((4, 1), bool)
    stage = RecurrentStage(network, [x, state, is_init], outputs)
    with torch.no_grad():
        stage.begin(1, None)
        stage.run(0)
        wanted = OneStep(network)(torch.from_numpy(x), torch.from_numpy(state))
        for found, one in zip(outputs, wanted, strict=True):
            np.testing.assert_array_equal(found, one.numpy())
        outputs[0][:] = 0
        stage.run_on(np.array([2]), np.array([0]))
    assert outputs[0][2].any()
    assert not outputs[0][[0, 1, 3]].any()


# -- changes ---------------------------------------------------------------------------------------------------------


def in_place(policy: Any) -> None:
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(-1.5)


def replaced(policy: Any) -> None:
    for module in policy.modules():
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            for name, weight in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(torch.randn_like(weight)))


def loaded(policy: Any) -> None:
    others = copy.deepcopy(policy)
    in_place(others)
    policy.load_state_dict(others.state_dict())


def assert_told(policy: Any, batch: Any, is_same: bool = True) -> None:
    """The batch has what the policy gives for each frame of it."""
    root = batch.select(*policy.in_keys).reshape(-1)
    with torch.no_grad():
        told = policy(root.clone())
    same = all(torch.allclose(batch.reshape(-1)[key], told[key], atol=1e-5) for key in policy.out_keys)
    assert same == is_same


@pytest.mark.parametrize("change", [in_place, replaced, loaded])
@pytest.mark.parametrize("name", ["GRU cell", "LSTM cell", "nn.GRU", "nn.LSTM"])
def test_weights_that_have_changed_count_from_the_next_batch_on(name: str, change: Callable[[Any], None]) -> None:
    policy = zoo.RECURRENT[name]("next")
    collector = Collector(zoo.WaveEnv(), policy, frames_per_batch=18)
    before = copy.deepcopy(policy)
    assert_told(policy, collector.next())
    change(policy)
    batch = collector.next()
    assert_told(policy, batch)
    assert_told(before, batch, is_same=False)
    assert zoo.stages_of(collector) == STAGES[name]


def long_short(**options: Any) -> Any:
    policy = zoo.long_short_policy("next")
    policy.module.lstm = nn.LSTM(zoo.SIZE, zoo.HIDDEN, num_layers=2, **options)
    return policy


def test_dropout_between_layers_is_noise_only_in_training() -> None:
    policy = long_short(dropout=0.5).eval()
    collector = zoo.begun(policy)
    assert zoo.stages_of(collector) == QUICK
    policy.train()
    collector.next()
    assert zoo.stages_of(collector) == ("TorchStage",)
    policy.eval()
    assert_told(policy, collector.next())
    policy.train()
    policy.module.lstm.dropout = 0.0
    assert_told(policy, collector.next())
    assert zoo.stages_of(collector) == QUICK


class Both(zoo.LongShort):
    """Reads the observation from both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(zoo.SIZE, 3, bidirectional=True), nn.Linear(6, zoo.CHOICES)


class OverTime(nn.Module):
    """Takes the lanes for time."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(zoo.SIZE, zoo.CHOICES)

    def forward(self, observation: Tensor) -> Tensor:
        return self.gru(observation)[0]


def test_what_is_no_step_of_layers_in_a_row_is_called() -> None:
    both = zoo.long_short_policy("next")
    both.module = Both()
    both.state_shapes = {"hidden": (2, 3), "cell": (2, 3)}
    for policy in (both, zoo.module(OverTime())):
        assert zoo.stages_after(policy) == ("TorchStage",)


def test_hooks_on_a_cell_are_called() -> None:
    policy, calls = zoo.gru_policy("next"), list[int]()
    collector = zoo.begun(policy)
    policy[0].module.register_forward_hook(lambda *args: calls.append(1))
    collector.next()
    assert len(calls) == 6
    assert zoo.stages_of(collector)[0] == "TorchStage"
