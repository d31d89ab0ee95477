"""WeightLayout: what a model's weights look like, and which weights fit it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from swath.runtime.columns import Leaf
from swath.weights import WeightLayout, flat_weights


class Normaliser(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.layers = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        pass


def test_the_layout_of_a_module() -> None:
    told = WeightLayout.of(Normaliser())
    assert told.tensors["mean"] == Leaf((3,), torch.float32)
    assert told.tensors["layers.1.num_batches_tracked"] == Leaf((), torch.int64)
    assert told.tensors["hidden"] == Leaf((3,), torch.float32)  # not saved, but acted with
    assert told.extras == ("_extra_state",)
    assert told.is_all(flat_weights(Normaliser()))
    assert not told.is_all({"mean": torch.zeros(3)})


def test_names_of_what_a_model_wraps() -> None:
    inner = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    told = WeightLayout.of(TensorDictModule(inner, in_keys=["observation"], out_keys=["action"]))
    for weights in (inner.state_dict(), flat_weights(torch.jit.script(inner))):  # which keeps modules in no dict
        assert set(told.named(weights)) == {f"module.{name}" for name in inner.state_dict()}
    assert set(told.named({"module.0.bias": torch.zeros(4)})) == {"module.0.bias"}


@pytest.mark.parametrize(
    ("weights", "error", "words"),
    [
        ({"module.0.bia": torch.zeros(4)}, KeyError, ["module.0.bia", "Did you mean 'module.0.bias'?"]),
        ({"module.0.bias": torch.zeros(5)}, ValueError, ["'module.0.bias'", "(4,)", "(5,)"]),
        ({"0.bias": torch.zeros(5)}, ValueError, ["0.bias", "(4,)", "(5,)"]),
        ({"module.0.bias": [0.0] * 4}, TypeError, ["'module.0.bias'", "tensor", "list"]),
        ({"module.0.bias": torch.zeros(4), "1.bias": torch.zeros(2)}, KeyError, ["1.bias"]),
    ],
)
def test_what_does_not_fit_is_refused_by_name(weights: dict[str, Any], error: Any, words: list[str]) -> None:
    inner = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    told = WeightLayout.of(TensorDictModule(inner, in_keys=["observation"], out_keys=["action"]))
    with pytest.raises(error) as caught:
        told.named(weights)
    for word in words:
        assert word in str(caught.value)
