"""Checking single arguments: of which kind, how large, one of which."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from swath.errors import suggestion
from swath.modules.exploration import ExplorationType
from swath.rollout.buffer_writer import is_buffer


def check_kind(name: str, value: Any, annotation: str) -> None:
    """Raise TypeError unless `value` is of one of the kinds in `annotation`, such as "int | None"."""
    kinds = [kind.split("[")[0] for kind in annotation.split(" | ")]
    kinds = [kind for kind in kinds if kind != "Sequence"]  # its elements are checked one by one
    if not kinds or not all(kind in KINDS for kind in kinds):
        return  # checked where it is understood
    if not any(KINDS[kind][0](value) for kind in kinds):
        wanted = " or ".join(dict.fromkeys(KINDS[kind][1] for kind in kinds))
        raise TypeError(f"{name} must be {wanted}, got {value!r}.{_cure(value, kinds)}")


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "Any": (lambda value: True, "anything"),
    "None": (lambda value: value is None, "None"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "int": (lambda value: isinstance(value, Integral) and not isinstance(value, bool), "a whole number"),
    "float": (lambda value: isinstance(value, Real) and not isinstance(value, bool), "a number"),
    "str": (lambda value: isinstance(value, str), "a string"),
    "Literal": (lambda value: isinstance(value, str), "a string"),
    "dict": (lambda value: isinstance(value, Mapping), "a dict"),
    "Callable": (callable, "callable"),
    "Hook": (callable, "callable"),
    "PostProc": (callable, "callable"),
    "Buffer": (is_buffer, "a ReplayBuffer"),
    "ExplorationType": (lambda value: isinstance(value, ExplorationType), "an ExplorationType"),
    "Interruptor": (lambda value: hasattr(value, "collection_stopped"), "an object with collection_stopped()"),
    "PolicyVersion": (lambda value: type(value).__name__ == "PolicyVersion", "PolicyVersion()"),
}
"""For each kind of field: whether a value is of it, and what it is called in messages."""


def _cure(value: Any, kinds: list[str]) -> str:
    if "int" in kinds and isinstance(value, float) and value.is_integer():
        return f" Write {int(value)}."
    if "ExplorationType" in kinds and isinstance(value, str):
        known = [kind.name for kind in ExplorationType]
        near = difflib.get_close_matches(value.upper(), known, n=1)
        return f" Use swath.modules.ExplorationType.{near[0] if near else 'RANDOM'}."
    return ""


def check_least(name: str, value: int | None, least: int) -> None:
    """Raise ValueError if there is a `value` and it is smaller than `least`."""
    if value is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")


def check_one_of(name: str, value: Any, known: Iterable[str]) -> None:
    """Raise ValueError if there is a `value` and it is none of the `known`."""
    known = tuple(known)
    if value is not None and value not in known:
        listed = " or ".join(repr(one) for one in known)
        raise ValueError(f"{name} must be {listed}, got {value!r}.{suggestion(str(value), known)}")
