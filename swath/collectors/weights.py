"""Which weights a call of `update_policy_weights_` means, and how they are put into a module."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from swath.errors import suggestion

POLICY_ID = "policy"


def requested_weights(
    positional: Any,
    weights: Any,
    policy: Any,
    model_id: str | None,
    weights_dict: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """`{model id: source}` from whichever form was used; a source of None is the collector's own policy."""
    given = {
        "a positional argument": positional,
        "weights": weights,
        "policy": policy,
        "weights_dict": weights_dict,
    }
    sources = [name for name, value in given.items() if value is not None]
    if len(sources) > 1:
        raise ValueError(f"update_policy_weights_ takes one source of weights, got {' and '.join(sources)}.")
    if weights_dict is not None:
        if model_id is not None:
            raise ValueError("weights_dict names its models itself; leave out model_id.")
        return dict(weights_dict)
    source = next((value for value in (positional, weights, policy) if value is not None), None)
    return {model_id or POLICY_ID: source}


def for_worker(requested: Mapping[str, Any], worker: int) -> dict[str, Any]:
    """What of `requested` concerns `worker`: sources may be dicts by worker index, and leave workers out."""
    mine: dict[str, Any] = {}
    for model_id, source in requested.items():
        by_worker = isinstance(source, Mapping) and source and all(isinstance(key, int) for key in source)
        if not by_worker:
            mine[model_id] = source
        elif worker in source:
            mine[model_id] = source[worker]
    return mine


def layers_of(module: Any) -> Iterator[Any]:
    """`module`, and what is inside it where it only wraps: a compiled module, or one that was given keys."""
    while module is not None:
        yield module
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, TensorDictModule | CudaGraphModule):
            inner = module.module
        module = inner if isinstance(inner, nn.Module) else None


def flat_weights(source: Any) -> dict[str, Any]:
    """Weights by name, of a module, a TensorDict, a state dict or a nested dict; also what a module saves beside them."""
    if isinstance(source, nn.Module):
        *_, bare = (layer for layer in layers_of(source) if layer is source or hasattr(source, "_orig_mod"))
        return dict((bare if hasattr(source, "_orig_mod") else source).state_dict())
def fitted(model: nn.Module, source: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The module that takes `source` and its weights by name; an error if anything does not fit. Changes nothing.

    Names may be those of `model`, or of what it wraps: a policy given as a plain module keeps its own names.
    """
    weights = flat_weights(source)
    for layer in layers_of(model):
        targets = layer.state_dict(keep_vars=True)
        if all(name in targets for name in weights):
            break
    else:
        known = model.state_dict()
        name = next(name for name in weights if name not in known)
        raise KeyError(f"The policy has no weight {name!r}.{suggestion(name, known)}")
    for name, value in weights.items():
        target = targets[name]
        if isinstance(target, Tensor) and not isinstance(value, Tensor):
            raise TypeError(f"The weight {name!r} must be a tensor, got {type(value).__name__}: {value!r}.")
        if isinstance(target, Tensor) and target.shape != value.shape:
            raise ValueError(f"The weight {name!r} has shape {tuple(target.shape)}, got {tuple(value.shape)}.")
    return layer, weights


def warn_of_old_name() -> None:
    """`policy_weights=` is what the argument was called once."""
    warnings.warn("policy_weights is an old name; use weights.", DeprecationWarning, stacklevel=3)
