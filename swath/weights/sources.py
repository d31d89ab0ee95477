"""Which weights a call of `update_policy_weights_` means, and whether they fit a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from swath.errors import suggestion
from swath.keys import POLICY_ID
from swath.runtime.columns import Leaf
from swath.runtime.snapshots import SnapshotContents


def requested_weights(
    given: Mapping[str, Any], model_id: str | None, weights_dict: Mapping[str, Any] | None
) -> dict[str, Any]:
    """`{model id: source}` from whichever form was `given`; a source of None is the collector's own policy."""
    sources = [name for name, value in {**given, "weights_dict": weights_dict}.items() if value is not None]
    if len(sources) > 1:
        raise ValueError(f"update_policy_weights_ takes one source of weights, got {' and '.join(sources)}.")
    if weights_dict is not None:
        if model_id is not None:
            raise ValueError(f"weights_dict names its models itself; leave out model_id={model_id!r}.")
        return dict(weights_dict)
    source = next((value for value in given.values() if value is not None), None)
    if source is None and model_id not in (None, POLICY_ID):
        raise ValueError(f"update_policy_weights_(model_id={model_id!r}) needs the weights for that model.")
    return {model_id or POLICY_ID: source}


def for_worker(requested: Mapping[str, Any], worker: int) -> dict[str, Any]:
    """What of `requested` concerns `worker`: sources may be dicts by worker index, which may leave workers out."""
    mine: dict[str, Any] = {}
    for model_id, source in requested.items():
        if not _is_by_worker(source):
            mine[model_id] = source
        elif worker in source:
            mine[model_id] = source[worker]
    return mine


def _is_by_worker(source: Any) -> bool:
    is_dict = isinstance(source, Mapping) and not isinstance(source, TensorDictBase)
    return is_dict and bool(source) and all(isinstance(key, int) for key in source)


def layers_of(module: Any) -> Iterator[Any]:
    """`module`, and what it wraps if it only wraps: compiled modules, and modules that were given keys."""
    while isinstance(module, nn.Module):
        yield module
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, TensorDictModule):
            inner = module.module
        module = inner


def all_weights(module: nn.Module) -> dict[str, Any]:
    """What a module acts with, by name: its state, and the buffers that it does not save."""
    state = dict(module.state_dict())
    return {**state, **{name: buffer for name, buffer in module.named_buffers() if name not in state}}


def load_weights(module: nn.Module, weights: Mapping[str, Any]) -> None:
    """Copy `weights`, as `all_weights` names them, into the module; those that are not given stay as they are."""
    module.load_state_dict(weights, strict=False)
    unsaved = {name: buffer for name, buffer in module.named_buffers() if name in weights}
    if unsaved:
        saved = module.state_dict()
        with torch.no_grad():
            for name, buffer in unsaved.items():
                if name not in saved:
                    buffer.copy_(weights[name])


def flat_weights(source: Any) -> dict[str, Any]:
    """Weights by name: of a module, a TensorDict, a state dict or a nested dict."""
    if isinstance(source, nn.Module):
        # Many modules take far longer to say that they lack an attribute than to tell which modules they have.
        return all_weights(getattr(source, "_orig_mod", source) if "_orig_mod" in source._modules else source)
    if isinstance(source, TensorDictBase):
        pairs = source.items(True, True)
        return {key if isinstance(key, str) else ".".join(key): value.detach() for key, value in pairs}
    if isinstance(source, Mapping):
        flat: dict[str, Any] = {}
        for name, value in source.items():
            name = ".".join(name) if isinstance(name, tuple) else str(name)
            if isinstance(value, Mapping | TensorDictBase):
                flat.update({f"{name}.{inner}": tensor for inner, tensor in flat_weights(value).items()})
            else:
                flat[name] = value
        return flat
    raise TypeError(
        f"Weights must be a module, a TensorDict or a dict of tensors, got {type(source).__name__}: {source!r}."
    )


@dataclass(frozen=True)
class WeightLayout:
    """What a model's weights look like, for a process that does not have the model."""

    tensors: dict[str, Leaf]
    extras: tuple[str, ...] = ()
    """Names of what only the module understands: its extra state."""
    prefixes: tuple[str, ...] = ("",)
    """What comes before the names of the modules that the model only wraps."""

    @staticmethod
    def of(model: nn.Module) -> WeightLayout:
        """The layout of `model`."""
        state = all_weights(model)
        tensors = {name: Leaf.of(w, 0) for name, w in state.items() if isinstance(w, Tensor)}
        prefixes = []
        for layer in layers_of(model):
            known = all_weights(layer)
            first = next(iter(known), None)
            outer = next((name for name in state if first is not None and name.endswith(first)), "")
            prefixes.append(outer[: len(outer) - len(first or "")])
        return WeightLayout(
            tensors, tuple(name for name in state if name not in tensors), tuple(dict.fromkeys(prefixes))
        )

    @property
    def contents(self) -> SnapshotContents:
        """What snapshots of it hold."""
        return SnapshotContents(self.tensors, self.extras)

    def is_all(self, weights: Mapping[str, Any]) -> bool:
        """Whether nothing is missing."""
        return all(name in weights for name in (*self.tensors, *self.extras))

    def named(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """`weights` by the model's own names. Raises if anything does not fit."""
        known = {*self.tensors, *self.extras}
        for prefix in self.prefixes:
            if all(prefix + name in known for name in weights):
                break
        else:
            name = next(name for name in weights if name not in known)
            raise KeyError(f"The model has no weight {name!r}.{suggestion(name, known)}")
        named = {prefix + name: value for name, value in weights.items()}
        for name, leaf in self.tensors.items():
            value = named.get(name)
            if name in named and not isinstance(value, Tensor):
                raise TypeError(
                    f"The weight {name.removeprefix(prefix)!r} must be a tensor, got {type(value).__name__}: {value!r}."
                )
            if isinstance(value, Tensor) and leaf.shape != tuple(value.shape):
                given = name.removeprefix(prefix)
                raise ValueError(f"The weight {given!r} has shape {leaf.shape}, got {tuple(value.shape)}.")
        return named
