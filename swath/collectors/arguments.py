"""From the arguments of a constructor to its config.

A constructor takes exactly the fields of its config, so that editors and type checkers see every argument with its type
and default, and an argument is written down once.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Concatenate, ParamSpec, TypeVar

from swath.collectors.config import CommonConfig
from swath.envs.adapt import must_be_maker
from swath.errors import check_foreign_arguments, suggestion
from swath.modules.exploration import ExplorationType

P = ParamSpec("P")
C = TypeVar("C", bound=CommonConfig)
S = TypeVar("S")

SYNONYMS = {"devices": "policy_device", "passing_devices": "storing_device", "exploration_mode": "exploration_type"}
"""Names of the oldest API; still understood, with a DeprecationWarning."""


def takes(config: Callable[P, C]) -> Callable[[Callable[[S, C], None]], Callable[Concatenate[S, P], None]]:
    """Let a constructor take the fields of `config` as its arguments; it is called with the checked config."""
    kind: Any = config

    def wrap(init: Callable[[S, C], None]) -> Callable[Concatenate[S, P], None]:
        @functools.wraps(init)
        def __init__(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:  # noqa: N807
            owner: Any = type(self)  # which may have a config with fields of its own
            own = owner.config_class
            init(self, own(**owner.adapt_arguments(understood(owner.__name__, own, args, kwargs))))

        signature = inspect.signature(kind)
        parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *signature.parameters.values()]
        __init__.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return __init__

    return wrap


def understood(owner: str, kind: type[CommonConfig], args: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the config's fields: old names, and those of TorchRL that change nothing, are known."""
    names = [field.name for field in fields(kind)]
    if len(args) > 2:
        raise TypeError(f"{owner} takes two positional arguments, create_env_fn and policy, and all others by name.")
    arguments = {**dict(zip(("create_env_fn", "policy"), args, strict=False)), **given}
    if clash := [name for name, _ in zip(("create_env_fn", "policy"), args, strict=False) if name in given]:
        raise TypeError(f"{owner} got two values for {clash[0]!r}.")
    for old, new in SYNONYMS.items():
        if old in arguments:
            arguments[new] = _by_new_name(owner, old, new, arguments)
    check_foreign_arguments(
        owner,
        {name: value for name, value in arguments.items() if name not in names},
        refused={name: reason for name, (_, reason) in kind.foreign.items()},
        harmless={name: values for name, (values, _) in kind.foreign.items()},
        known=names,
    )
    arguments = {name: value for name, value in arguments.items() if name in names}
    for field in fields(kind):
        if field.default is MISSING and field.name not in arguments:
            example = "create_env_fn" if field.name == "create_env_fn" else f"env, policy, {field.name}=1000"
            raise TypeError(f"{owner} needs the argument {field.name!r}, as in {owner}({example}).")
    makers = arguments["create_env_fn"]
    for maker in makers if isinstance(makers, list | tuple) else [makers]:
        must_be_maker(maker, arguments.get("policy"))
    if arguments.get("total_frames", -1) is None:
        arguments["total_frames"] = -1
    return arguments


def fixed(owner: str, name: str, value: object, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a class for which one of them is settled."""
    given = arguments.get(name)
    if given is not None and given is not value:
        raise TypeError(f"{owner} is {name}={value!r}, got {name}={given!r}; use MultiCollector to choose.")
    return {**arguments, name: value}


def _by_new_name(owner: str, old: str, new: str, arguments: dict[str, Any]) -> Any:
    value = arguments.pop(old)
    if new in arguments:
        raise TypeError(
            f"{owner} got both {old}={value!r} and {new}={arguments[new]!r}; {old} is the old name of {new}."
        )
    warnings.warn(f"{old} is an old name; use {new}.", DeprecationWarning, stacklevel=4)
    if old == "exploration_mode" and isinstance(value, str):
        known = {kind.name.lower(): kind for kind in ExplorationType}
        if value.lower() not in known:
            hint = suggestion(value, known)
            raise ValueError(f"exploration_mode={value!r} is unknown; use one of {sorted(known)}.{hint}")
        return known[value.lower()]
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
