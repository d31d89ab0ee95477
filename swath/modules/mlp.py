"""Small perceptrons on the CPU without the dispatcher: the same arithmetic on arrays.

For a few lanes, calling `nn.Linear` costs ten times what its arithmetic does. A stack of linear layers and elementwise
activations is therefore run with numpy. The parameters are fetched anew for each slot, so whatever was done to them
(an optimiser's step, `load_state_dict`, a replaced parameter) is seen, and all of a slot comes from one set of them.
The result is compared with the module's own when the stage is made; if they differ, the module runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from tensordict.nn.distributions import NormalParamExtractor
from tensordict.nn.utils import biased_softplus
from torch import Tensor, nn

from swath.envs.rows import Rows
from swath.keys import Key
from swath.modules.stages import Plain

InPlace = Callable[[np.ndarray], object]

MAX_MULTIPLICATIONS = 2_000_000
"""Per step, over all lanes. Beyond this, the arithmetic outweighs the dispatcher and torch's threads pay."""


def _relu(x: np.ndarray) -> None:
    np.maximum(x, 0.0, x)


def _sigmoid(x: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        np.divide(1.0, np.add(np.exp(np.negative(x, x), x), 1.0, x), x)


def _silu(x: np.ndarray) -> None:
    gate = x.copy()
    _sigmoid(gate)
    np.multiply(x, gate, x)


def activation_of(module: nn.Module) -> InPlace | None:
    """The in-place array form of an elementwise activation, or None if it is not one of the known."""
    kind = type(module)
    if kind is nn.Tanh:
        return lambda x: np.tanh(x, x)
    if kind is nn.ReLU:
        return _relu
    if kind is nn.Sigmoid:
        return _sigmoid
    if kind is nn.SiLU:
        return _silu
    if isinstance(module, nn.LeakyReLU) and kind is nn.LeakyReLU and 0 <= module.negative_slope <= 1:
        slope = module.negative_slope
        return lambda x: np.maximum(x, x * x.dtype.type(slope), x)
    if isinstance(module, nn.ELU) and kind is nn.ELU:
        alpha = module.alpha
        return lambda x: np.copyto(x, alpha * np.expm1(np.minimum(x, 0.0)), where=x < 0)
    return None


def flatten(module: nn.Module) -> list[nn.Module] | None:
    """The layers of a (nested) nn.Sequential in order, or None if `module` has a forward of its own."""
    if type(module).forward is nn.Sequential.forward:
        layers: list[nn.Module] = []
        for child in module.children():
            inner = flatten(child)
            if inner is None:
                return None
            layers.extend(inner)
        return layers
    known = type(module) in (nn.Linear, nn.Identity, NormalParamExtractor)
    return [module] if known or activation_of(module) is not None else None


class _Layer:
    """A linear layer with its activation, on a private copy of the parameters."""

    def __init__(self, linear: nn.Linear, lanes: int) -> None:
        self.linear = linear
        dtype = linear.weight.detach().numpy().dtype
        self.weight = np.empty((linear.in_features, linear.out_features), dtype)
        self.bias = None if linear.bias is None else np.empty((lanes, linear.out_features), dtype)
        self.out = np.empty((lanes, linear.out_features), dtype)
        self.activations: list[InPlace] = []

    def fetch(self) -> None:
        """Take the parameters as they are now. A bias is spread over the lanes: adding is then half the price."""
        self.weight[:] = self.linear.weight.detach().numpy().T
        if self.bias is not None:
            self.bias[:] = self.linear.bias.detach().numpy()


class MLPStage(Plain):
    """Linear layers and activations, possibly with a NormalParamExtractor at the end."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        source: np.ndarray,
        outputs: Rows,
        out_keys: Sequence[Key],
    ) -> None:
        """Run `layers` on `source` `[N, in]`; results go to `outputs`. Use `mlp_stage`, which checks that it fits."""
        self._source = source
        self._layers: list[_Layer] = []
        self._split: NormalParamExtractor | None = None
        for module in layers:
            if isinstance(module, nn.Linear):
                self._layers.append(_Layer(module, len(source)))
            elif isinstance(module, NormalParamExtractor):
                self._split = module
            elif (activation := activation_of(module)) is not None:
                self._layers[-1].activations.append(activation)
        self._targets = [outputs.arrays[key] for key in out_keys]
        if self._split is None:
            self._layers[-1].out = self._targets[0]  # the last layer writes straight into the row
        elif isinstance(self._split.scale_mapping, biased_softplus):
            self._shift = float(self._split.scale_mapping.bias)
            self._least = float(self._split.scale_mapping.min_val)
        self.begin(0, None)

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Fetch the parameters."""
        for layer in self._layers:
            layer.fetch()

    def run(self, t: int) -> None:
        """The forward pass."""
        x = self._source
        for layer in self._layers:
            out = layer.out
            x.dot(layer.weight, out)
            if layer.bias is not None:
                np.add(out, layer.bias, out)
            for activation in layer.activations:
                activation(out)
            x = out
        if self._split is not None:
            loc, scale = self._targets
            loc[:] = x[:, : loc.shape[1]]
            np.logaddexp(x[:, loc.shape[1] :] + scale.dtype.type(self._shift), 0.0, scale)
            scale += self._least
            np.maximum(scale, self._split.scale_lb, scale)


def mlp_stage(module: nn.Module, source: np.ndarray, outputs: Rows, out_keys: Sequence[Key]) -> MLPStage | None:
    """A stage that does what `module` does, or None if this module has to run itself."""
    layers = flatten(module)
    if not layers or source.ndim != 2 or not isinstance(layers[0], nn.Linear):
        return None
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    splits = [layer for layer in layers if isinstance(layer, NormalParamExtractor)]
    if splits and (splits != layers[-1:] or not isinstance(splits[0].scale_mapping, biased_softplus)):
        return None
    if len(out_keys) != (2 if splits else 1):
        return None
    if not all(_fits(tensor, source) for linear in linears for tensor in linear.parameters()):
        return None
    if any(outputs.arrays.get(key) is None or outputs.arrays[key].ndim != 2 for key in out_keys):
        return None
    if len(source) * sum(linear.weight.numel() for linear in linears) > MAX_MULTIPLICATIONS:
        return None
    stage = MLPStage(layers, source, outputs, out_keys)
    return stage if _agrees(stage, module, source, [outputs.arrays[key] for key in out_keys]) else None


def _fits(parameter: Tensor, source: np.ndarray) -> bool:
    """Whether a parameter is an ordinary CPU tensor of the source's floating type."""
    return (
        type(parameter) is nn.Parameter
        and parameter.device.type == "cpu"
        and source.dtype.kind == "f"
        and parameter.dtype in (torch.float32, torch.float64)
        and parameter.detach().numpy().dtype == source.dtype
    )


def _agrees(stage: MLPStage, module: nn.Module, source: np.ndarray, targets: list[np.ndarray]) -> bool:
    """Whether stage and module give the same for some inputs; `source` and `targets` are left as they were."""
    saved = [array.copy() for array in (source, *targets)]
    # A fixed grid rather than random numbers: making a plan must not move anyone's generator.
    source[:] = np.sin(np.arange(source.size) * 1.7).reshape(source.shape) * 3.0
    with torch.no_grad():
        wanted = module(torch.from_numpy(source))
    stage.run(0)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    same = all(
        t.shape == tuple(w.shape) and np.allclose(t, w.numpy(), rtol=1e-5, atol=1e-5, equal_nan=True)
        for t, w in zip(targets, wanted, strict=True)
    )
    for array, before in zip((source, *targets), saved, strict=True):
        array[:] = before
    return same
