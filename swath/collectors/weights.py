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


def for_worker(source: Any, worker: int) -> Any:
    """The part of `source` for `worker`, where it is a dict by worker index."""
    if isinstance(source, Mapping) and source and all(isinstance(key, int) for key in source):
        return source.get(worker)
    return source


def flat_weights(source: Any) -> dict[str, Tensor]:
    """Names and tensors of a module, a TensorDict, a state dict or a nested dict."""
    if isinstance(source, nn.Module):
        return {name: tensor.detach() for name, tensor in source.state_dict().items() if isinstance(tensor, Tensor)}
    if isinstance(source, TensorDictBase):
        pairs = source.items(True, True)
        return {key if isinstance(key, str) else ".".join(key): value.detach() for key, value in pairs}
    if isinstance(source, Mapping):
        flat: dict[str, Tensor] = {}
        for name, value in source.items():
            if isinstance(value, Mapping | TensorDictBase):
                flat.update({f"{name}.{inner}": tensor for inner, tensor in flat_weights(value).items()})
            else:
                flat[".".join(name) if isinstance(name, tuple) else str(name)] = value
        return flat
    raise TypeError(
        f"Weights must be a module, a TensorDict or a dict of tensors, got {type(source).__name__}: {source!r}."
    )


def put_weights(module: nn.Module, source: Any) -> None:
    """Copy `source` into `module`: all of it, or, if anything does not fit, nothing."""
    if source is module:
        return
    weights = flat_weights(source)
    targets = dict(module.state_dict(keep_vars=True))
    pairs: list[tuple[Tensor, Tensor]] = []
    for name, value in weights.items():
        target = targets.get(name)
        if not isinstance(target, Tensor):
            raise KeyError(f"The policy has no weight {name!r}.{suggestion(name, targets)}")
        if target.shape != value.shape:
            raise ValueError(f"The weight {name!r} has shape {tuple(target.shape)}, got {tuple(value.shape)}.")
        pairs.append((target, value))
    with torch.no_grad():
        for target, value in pairs:
            target.copy_(value)


def warn_of_old_name() -> None:
    """`policy_weights=` is what the argument was called once."""
    warnings.warn("policy_weights is an old name; use weights.", DeprecationWarning, stacklevel=3)
