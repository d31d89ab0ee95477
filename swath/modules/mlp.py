"""Small perceptrons on the CPU without the dispatcher: the same arithmetic on arrays.

For a few lanes, calling `nn.Linear` costs ten times what its arithmetic does. A stack of linear layers and elementwise
activations is therefore run with numpy. The parameters are fetched anew for each slot, so whatever was done to them
(an optimiser's step, `load_state_dict`, a replaced parameter) is seen, and all of a slot comes from one set of them.
The result is compared with the module's own when the stage is built; if they differ, the module runs.

NOTE [BLAS threads]: numpy's OpenBLAS takes all cores for a product that it finds large, whatever torch.set_num_threads
says. Products of this size are over before threads pay, and where another process or the trainer keeps a core busy,
each of them waits for the scheduler: milliseconds instead of microseconds. (torch's own threads do the same.) The
number of threads can only be set for the whole process, which is not ours to do while a trainer runs beside us. But
OpenBLAS stays in the calling thread for up to `MAX_IN_THREAD` multiplications. So a larger product is done in blocks
that are no larger than that, without threads: of lanes, or of outputs where only a few lanes would fit into a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from tensordict.nn.distributions import NormalParamExtractor
from tensordict.nn.utils import biased_softplus
from torch import Tensor, nn

from swath.envs.rows import Rows, rows_of
from swath.keys import Key
from swath.modules.parts import name_of
from swath.modules.stages import Stage
from swath.runtime.columns import array_of

Arrays = Sequence[np.ndarray]
Operation = Callable[[], object]
"""One call of a forward pass, bound to the arrays that it reads and writes."""


class Fetched(Protocol):
    """A private copy of something that may change between two slots."""

    def fetch(self, is_live: bool) -> None:
        """Take it as it is now; what `is_live` need not."""


MAX_MULTIPLICATIONS = 2_000_000
"""Per step, over all lanes. Beyond this, the arithmetic outweighs the dispatcher and torch's threads pay."""

MANY_LANES, MAX_FOR_MANY = 256, 5_000_000
"""The same for many lanes of a network of tanh, for which numpy takes a third of torch's time: 1,024 lanes of a small
one are quicker here (200 us against 570 with one thread, and still less than with two)."""

MAX_IN_THREAD = 262_144
"""OpenBLAS's own limit, for all kinds of processors: 65,536 times its GEMM_MULTITHREAD_THRESHOLD, which is 4.

Before version 0.3.27 (numpy 2 has a later one) the limit for one lane, a product with a vector, was 9,216.
"""

SEVERAL_LANES = 4
"""With so many lanes in a block, and more, blocks of lanes are quicker than blocks of outputs."""


def _sigmoid(module: object, x: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        np.divide(1.0, np.add(np.exp(np.negative(x, x), x), 1.0, x), x)


def _silu(module: object, x: np.ndarray) -> None:
    gate = x.copy()
    _sigmoid(module, gate)
    np.multiply(x, gate, x)


def _softplus(module: nn.Softplus, x: np.ndarray) -> None:
    scaled = x * module.beta
    np.copyto(x, np.logaddexp(scaled, 0.0, dtype=x.dtype) / module.beta, where=scaled <= module.threshold)


def _mish(module: nn.Mish, x: np.ndarray) -> None:
    np.multiply(x, np.tanh(np.logaddexp(x, 0.0, dtype=x.dtype)), x)


def _gelu(module: nn.GELU, x: np.ndarray) -> None:
    # numpy has no error function; torch's, on so few numbers, is called in this thread.
    x[:] = nn.functional.gelu(torch.from_numpy(x), approximate=module.approximate).numpy()


ACTIVATIONS: dict[type[nn.Module], Callable[[Any, np.ndarray], object]] = {
    nn.Tanh: lambda module, x: np.tanh(x, x),
    nn.ReLU: lambda module, x: np.maximum(x, 0.0, out=x),
    nn.Sigmoid: _sigmoid,
    nn.SiLU: _silu,
    nn.LeakyReLU: lambda module, x: np.multiply(x, module.negative_slope, x, where=x < 0),
    nn.Softplus: _softplus,
    nn.Mish: _mish,
    nn.GELU: _gelu,
    nn.ELU: lambda module, x: np.copyto(x, module.alpha * np.expm1(np.minimum(x, 0.0)), where=x < 0),
}
"""Elementwise activations, in place on an array, with the settings that the module has then."""


def activating(module: nn.Module, x: np.ndarray) -> Operation:
    """What activates `x` in place as `module` does: for the most common ones, numpy itself."""
    if type(module) is nn.Tanh:
        return partial(np.tanh, x, x)
    if type(module) is nn.ReLU:
        return partial(np.maximum, x, np.zeros_like(x), out=x)  # an array, which numpy handles at half the price
    return partial(ACTIVATIONS[type(module)], module, x)


def flatten(module: nn.Module) -> list[nn.Module] | None:
    """The layers of a (nested) nn.Sequential in order, or None if `module` has a forward of its own."""
    if isinstance(module, nn.Sequential) and (type(module).forward is nn.Sequential.forward or _is_peers(module)):
        layers: list[nn.Module] = []
        for child in module:  # not children(), which leaves out an activation that is used a second time
            inner = flatten(child)
            if inner is None:
                return None
            layers.extend(inner)
        return layers
    if type(module) is nn.Identity or (type(module) is nn.Dropout and not module.training):
        return []
    return [module] if type(module) in (nn.Linear, nn.LayerNorm, NormalParamExtractor, *ACTIVATIONS) else None


def _is_peers(module: nn.Module) -> bool:
    """Whether it is TorchRL's MLP, whose forward joins several inputs and shapes the output: not with one of each."""
    return name_of(type(module)) == ("torchrl.modules.models.models", "MLP") and isinstance(module.out_features, int)


def products(x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> list[Operation]:
    """What multiplies `x` `[n, in]` by `weight` `[in, out]`; see NOTE [BLAS threads]."""
    n, (inputs, outputs) = len(x), weight.shape
    if n * weight.size <= MAX_IN_THREAD:
        return [partial(x.dot, weight, out)]
    if weight.flags.c_contiguous and (some := MAX_IN_THREAD // weight.size) >= SEVERAL_LANES:
        return [partial(x[i : i + some].dot, weight, out[i : i + some]) for i in range(0, n, some)]
    width = max(1, MAX_IN_THREAD // (n * inputs))
    width -= width % 16 if 16 <= width < outputs else 0  # whole vectors are quicker
    blocks = [slice(start, start + width) for start in range(0, outputs, width)]
    return [partial(np.matmul, x, weight[:, block], out[:, block]) for block in blocks]


class Layer:
    """A linear layer with its activations, on a private copy of the parameters."""

    def __init__(self, linear: nn.Linear, lanes: int) -> None:
        self._linear = linear
        weight = linear.weight.detach().numpy()
        outputs, inputs = weight.shape  # not what the module says, if it was given another weight
        # For one lane a product is as quick in either order, and copying much quicker in the one that torch has.
        self._weight = np.empty((inputs, outputs), weight.dtype, order="F" if lanes == 1 else "C")
        self._bias = None if linear.bias is None else np.empty((lanes, outputs), weight.dtype)
        self._now = [array_of(x) for x in (linear.weight, linear.bias) if x is not None]
        """The parameters, over their memory; there is another plan when they lie elsewhere (see `Composition`)."""
        self.activations: list[Callable[[np.ndarray], Operation]] = []
        self.out = np.empty((lanes, outputs), weight.dtype)

    def fetch(self, is_live: bool) -> None:
        """Take the parameters as they are now. A bias is spread over the lanes: adding is then half the price.

        Live ones of a single lane are not fetched at all: nothing has to be spread.
        """
        if not is_live:
            self._weight[:] = self._now[0].T
        if self._bias is not None:
            self._bias[:] = self._now[1]

    def operations(self, x: np.ndarray, out: np.ndarray, is_live: bool) -> list[Operation]:
        """What turns `x` `[n, in]` into `out` `[n, out]`.

        If it `is_live`, with the weight (and for one lane the bias) as it is when it runs, and not as it was fetched.
        """
        weight = self._now[0].T if is_live else self._weight
        operations = products(x, weight, out)
        if self._bias is not None:
            is_one = is_live and len(self.out) == 1
            operations.append(partial(np.add, out, self._now[1][None] if is_one else self._bias[: len(out)], out))
        return [*operations, *(activation(out) for activation in self.activations)]


class Norm:
    """A layer normalisation of a linear layer's output, on a private copy of the parameters."""

    def __init__(self, norm: nn.LayerNorm, like: np.ndarray) -> None:
        self._norm = norm
        self._weight, self._bias = np.ones_like(like), np.zeros_like(like)

    def fetch(self, is_live: bool) -> None:
        """Take the parameters as they are now."""
        if self._norm.weight is not None:
            self._weight[:] = self._norm.weight.detach().numpy()
        if self._norm.bias is not None:
            self._bias[:] = self._norm.bias.detach().numpy()

    def __call__(self, x: np.ndarray) -> None:
        """Normalise the rows of `x` in place."""
        np.subtract(x, x.mean(1, keepdims=True), x)
        spread = np.square(x).mean(1, keepdims=True)
        np.divide(x, np.sqrt(spread + self._norm.eps, dtype=x.dtype), x)
        np.multiply(x, self._weight[: len(x)], x)
        np.add(x, self._bias[: len(x)], x)


class _NormalHead:
    """What a NormalParamExtractor does to the last layer's output: location, and softplus of the rest as scale."""

    def __init__(self, extractor: NormalParamExtractor, scale: np.ndarray) -> None:
        self._extractor = extractor
        # Arrays instead of numbers: numpy handles them at half the price.
        self._shift, self._least, self._floor = (np.empty_like(scale) for _ in range(3))
        self._zero = np.zeros_like(scale)
        self._settings: tuple[float, float, float] | None = None

    def fetch(self, is_live: bool) -> None:
        """Take the settings as they are now."""
        mapping = self._extractor.scale_mapping
        settings = float(mapping.bias), float(mapping.min_val), self._extractor.scale_lb
        if settings != self._settings:
            self._shift[:], self._least[:], self._floor[:] = self._settings = settings
            self._has_floor = settings[2] > settings[1]

    def operations(self, raw: np.ndarray, loc: np.ndarray, scale: np.ndarray) -> list[Operation]:
        """What turns `raw` `[n, 2 * A]` into `loc` and `scale` `[n, A]`."""
        n, size = loc.shape
        return [
            partial(np.copyto, loc, raw[:, :size]),
            partial(np.add, raw[:, size:], self._shift[:n], scale),
            partial(np.logaddexp, scale, self._zero[:n], scale),
            partial(np.add, scale, self._least[:n], scale),
            partial(self._limit, scale, self._floor[:n]),
        ]

    def _limit(self, scale: np.ndarray, floor: np.ndarray) -> None:
        if self._has_floor:
            np.maximum(scale, floor, out=scale)


class ArrayStage(Stage):
    """A forward pass on arrays: calls that are bound once, and things that are fetched for each slot."""

    needs_conditions = False

    def __init__(self, sources: Arrays, targets: Arrays, fetched: Sequence[Fetched]) -> None:
        """Read `sources` and write `targets`, both `[N, ...]`; `fetched` are copies of what may change."""
        self._sources, self._targets = list(sources), list(targets)
        of_one = [one for one in fetched if not isinstance(one, Layer) or len(one.out) > 1]
        self._fetched = {False: list(fetched), True: of_one}
        """What is fetched, and what of it where weights are used where they lie."""
        self._is_live = False
        """Whether weights are used where they lie: to copy them takes longer than to multiply by them once."""
        self._bound = {is_live: self._bind(self._sources, self._targets, is_live) for is_live in (False, True)}
        self._some = [np.empty_like(array) for array in (*sources, *targets)]
        """Where the rows of some lanes are gathered before they are run."""
        self._bound_on: dict[tuple[int, bool], list[Operation]] = {}
        self._bound_first: dict[tuple[int, bool], list[Operation]] = {}
        self.begin(0, None)

    def _bind(self, sources: list[np.ndarray], targets: list[np.ndarray], is_live: bool) -> list[Operation]:
        """The forward pass from `sources` to `targets`, for as many lanes as these have."""
        raise NotImplementedError

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Fetch the parameters."""
        self._is_live = steps == 1  # which has them from one moment in any case
        self._operations = self._bound[self._is_live]
        for one in self._fetched[self._is_live]:
            one.fetch(self._is_live)

    def run(self, t: int) -> None:
        """The forward pass."""
        for operation in self._operations:
            operation()

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """The forward pass for some lanes."""
        n, count = len(lanes), len(self._sources)
        some, form = [array[:n] for array in self._some], (n, self._is_live)
        if form not in self._bound_on:
            self._bound_on[form] = self._bind(some[:count], some[count:], self._is_live)
        rows = rows_of(lanes)
        for given, source in zip(some, self._sources, strict=False):
            given[:] = source[rows]
        for operation in self._bound_on[form]:
            operation()
        for target, result in zip(self._targets, some[count:], strict=True):
            target[rows] = result

    def run_first(self, count: int, t: int) -> None:
        """The forward pass for the first lanes, where they lie."""
        form = (count, self._is_live)
        if form not in self._bound_first:
            sources, targets = ([array[:count] for array in arrays] for arrays in (self._sources, self._targets))
            self._bound_first[form] = self._bind(sources, targets, self._is_live)
        for operation in self._bound_first[form]:
            operation()


class MLPStage(ArrayStage):
    """Linear layers and activations, possibly with a NormalParamExtractor at the end."""

    def __init__(self, layers: Sequence[nn.Module], source: np.ndarray, targets: Sequence[np.ndarray]) -> None:
        """Run `layers` on `source` `[N, in]`. Use `mlp_stage`, which checks that it fits."""
        self._layers: list[Layer] = []
        norms: list[Norm] = []
        for module in layers:
            if isinstance(module, nn.Linear):
                self._layers.append(Layer(module, len(source)))
            elif type(module) in ACTIVATIONS:
                self._layers[-1].activations.append(partial(activating, module))
            elif isinstance(module, nn.LayerNorm):
                norms.append(Norm(module, self._layers[-1].out))
                self._layers[-1].activations.append(partial(partial, norms[-1]))
        last = layers[-1]
        self._head = _NormalHead(last, targets[1]) if isinstance(last, NormalParamExtractor) else None
        heads = () if self._head is None else (self._head,)
        super().__init__([source], targets, [*self._layers, *norms, *heads])

    def _bind(self, sources: list[np.ndarray], targets: list[np.ndarray], is_live: bool) -> list[Operation]:
        """The forward pass; the last layer writes straight into its target."""
        (x,), operations = sources, list[Operation]()
        for layer in self._layers:
            is_last = layer is self._layers[-1] and self._head is None
            out = targets[0] if is_last else layer.out[: len(x)]
            operations += layer.operations(x, out, is_live)
            x = out
        return operations if self._head is None else operations + self._head.operations(x, *targets)


def mlp_stage(module: nn.Module, source: np.ndarray, outputs: Rows, out_keys: Sequence[Key]) -> MLPStage | None:
    """A stage that does what `module` does, or None if this module has to run itself."""
    layers = flatten(module)
    targets = [outputs.arrays[key] for key in out_keys if key in outputs.arrays]
    if not layers or len(targets) != len(out_keys) or not _is_known(layers):
        return None
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    width = linears[-1].weight.shape[0] if linears else source.shape[-1]
    if not _fit_rows(width, 2 if isinstance(layers[-1], NormalParamExtractor) else 1, source, targets):
        return None
    if not all(fits_array(weight, source) for layer in layers for weight in layer.parameters()):
        return None
    is_smooth = nn.Tanh in map(type, layers) and not {nn.ReLU, nn.LeakyReLU} & set(map(type, layers))
    most = MAX_FOR_MANY if is_smooth and len(source) >= MANY_LANES else MAX_MULTIPLICATIONS
    if len(source) * sum(linear.weight.numel() for linear in linears) > most:
        return None
    if len(source) * max((linear.weight.shape[1] for linear in linears), default=0) > MAX_IN_THREAD:
        return None  # not even one output could be computed without threads
    stage = MLPStage(layers, source, targets)
    return stage if agrees(stage, module, [source], targets) else None


def _is_known(layers: list[nn.Module]) -> bool:
    """Whether a linear layer comes first, and an extractor of a known kind only at the end, where it may be alone."""
    *others, last = layers
    if isinstance(last, NormalParamExtractor) and not isinstance(last.scale_mapping, biased_softplus):
        return False
    extracts_early = any(isinstance(layer, NormalParamExtractor) for layer in others)
    return isinstance(layers[0], nn.Linear | NormalParamExtractor) and not extracts_early


def _fit_rows(width: int, count: int, source: np.ndarray, targets: list[np.ndarray]) -> bool:
    """Whether vectors of `width` numbers, computed from `source`, fill `count` targets of its floating type."""
    return (
        source.ndim == 2
        and source.dtype.kind == "f"
        and len(targets) == count
        and all(target.ndim == 2 and target.dtype == source.dtype for target in targets)
        and sum(target.shape[1] for target in targets) == width
    )


def fits_array(parameter: Tensor, source: np.ndarray) -> bool:
    """Whether a parameter is an ordinary CPU tensor of the source's floating type."""
    return (
        type(parameter) is nn.Parameter
        and parameter.device.type == "cpu"
        and parameter.dtype in (torch.float32, torch.float64)
        and parameter.detach().numpy().dtype == source.dtype
    )


def agrees(stage: ArrayStage, module: nn.Module, sources: list[np.ndarray], targets: list[np.ndarray]) -> bool:
    """Whether stage and module give the same for some inputs; `sources` and `targets` are left as they were."""
    saved = [array.copy() for array in (*sources, *targets)]
    for number, source in enumerate(sources):
        # A fixed grid rather than random numbers: making a plan must not move anyone's generator.
        wave = np.sin(np.arange(source.size) * (1.7 + number)).reshape(source.shape) * 3.0
        source[:] = wave if source.dtype.kind == "f" else wave > 0 if source.dtype == bool else abs(wave * 9)
    try:
        with torch.no_grad():
            wanted = module(*map(torch.from_numpy, sources))
        stage.run(0)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        return all(_is_close(t, w.numpy()) for t, w in zip(targets, wanted, strict=True))
    finally:
        for array, before in zip((*sources, *targets), saved, strict=True):
            array[:] = before


def _is_close(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether nothing but rounding differs, which grows with the numbers that were added up."""
    if found.dtype == bool or wanted.dtype == bool:
        return np.array_equal(found, wanted)
    size = max(1.0, float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)))
    return found.shape == wanted.shape and np.allclose(found, wanted, rtol=1e-5, atol=1e-5 * size, equal_nan=True)
