"""Which weights a call of `update_policy_weights_` means, and whether they fit a module."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
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
            raise ValueError(f"weights_dict names its models itself; leave out model_id={model_id!r}.")
        return dict(weights_dict)
    source = next((value for value in (positional, weights, policy) if value is not None), None)
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
    if isinstance(source, TensorDictBase) or not isinstance(source, Mapping):
        return False
    return bool(source) and all(isinstance(key, int) for key in source)


def layers_of(module: Any) -> Iterator[Any]:
    """`module`, and what it wraps if it only wraps: compiled modules, and modules that were given keys."""
    while isinstance(module, nn.Module):
        yield module
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, TensorDictModule):
            inner = module.module
        module = inner


def flat_weights(source: Any) -> dict[str, Any]:
    """Weights by name: of a module, a TensorDict, a state dict or a nested dict."""
    if isinstance(source, nn.Module):
        return dict(getattr(source, "_orig_mod", source).state_dict())
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


def fitted(model: nn.Module, source: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The module that takes the weights of `source`, and these by name. Raises if anything does not fit.

    Names may be those of `model` or of what it wraps, so that a policy given as a plain module keeps its own names.
    Nothing is changed yet: `load_state_dict(weights, strict=False)` will do it.
    """
    weights = flat_weights(source)
    known = model.state_dict()
    for layer in layers_of(model):
        targets = layer.state_dict()
        if all(name in targets for name in weights):
            break
    else:
        name = next(name for name in weights if name not in known)
        raise KeyError(f"The model has no weight {name!r}.{suggestion(name, known)}")
    for name, value in weights.items():
        target = targets[name]
        if not isinstance(target, Tensor):
            continue  # a module's extra state, which only the module understands
        if not isinstance(value, Tensor):
            raise TypeError(f"The weight {name!r} must be a tensor, got {type(value).__name__}: {value!r}.")
        if target.shape != value.shape:
            raise ValueError(f"The weight {name!r} has shape {tuple(target.shape)}, got {tuple(value.shape)}.")
    return layer, weights


Ready = list[tuple[nn.Module, dict[str, Any]]]
"""Modules, and the weights that they are to take."""


class WeightsMail:
    """Weights on their way to a collector that runs in another thread: whole, and only the newest."""

    def __init__(self) -> None:
        """Begin with nothing on the way."""
        self._lock = threading.Lock()
        self._newest: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
        self._sent = 0

    def send(self, ready: Ready) -> None:
        """Leave copies of the weights: the trainer goes on changing its own."""
        copies = [(m, {n: w.clone() if isinstance(w, Tensor) else w for n, w in ws.items()}) for m, ws in ready]
        with self._lock:
            for module, weights in copies:
                former = self._newest.get(id(module), (module, {}))[1]
                self._newest[id(module)] = (module, {**former, **weights})
            self._sent += 1

    def fetch(self) -> list[Ready]:
        """What has come since the last time, as if each had been taken on its own: older ones change nothing."""
        if not self._sent:
            return []
        with self._lock:
            newest, sent = list(self._newest.values()), self._sent
            self._newest, self._sent = {}, 0
        return [[] for _ in range(sent - 1)] + [newest]


def warn_of_old_name() -> None:
    """`policy_weights=` is what the argument was called once."""
    warnings.warn("policy_weights is an old name; use weights.", DeprecationWarning, stacklevel=3)
