"""The names of all entries, in one place.

A key is a string, or a tuple of strings for an entry inside a nested TensorDict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

Key: TypeAlias = str | tuple[str, ...]

OBSERVATION = "observation"
PIXELS = "pixels"
ACTION = "action"
REWARD = "reward"
DONE = "done"
TERMINATED = "terminated"
TRUNCATED = "truncated"
FLAGS = (DONE, TERMINATED, TRUNCATED)
NEXT = "next"
RESET = "_reset"
STEP_COUNT = "step_count"
IS_INIT = "is_init"
POLICY_VERSION = "policy_version"
ENV_INDEX = "env_index"
"""Which env made a frame, where envs are not told apart by a dimension."""
COLLECTOR = "collector"
TRAJ_IDS = (COLLECTOR, "traj_ids")
MASK = (COLLECTOR, "mask")
POLICY_ID = "policy"
"""The name of the policy among the models whose weights can be updated."""

WORKER_BITS = 40
"""A trajectory's id is (worker << 40 | counter): unique over workers, and in order within one."""
PADDING_ID = -1
"""The id of what is no frame: padding, and lanes that were idle."""


def as_key(key: Any) -> Key:
    """`key` in its plain form: one name is a string, several are a flat tuple."""
    if isinstance(key, str):
        return key
    flat: list[str] = []
    for part in key:
        flat.extend([part] if isinstance(part, str) else as_path(as_key(part)))
    return flat[0] if len(flat) == 1 else tuple(flat)


def as_path(key: Key) -> tuple[str, ...]:
    """`key` as a tuple of names."""
    return (key,) if isinstance(key, str) else key


def under(parent: str, key: Key) -> Key:
    """The key of the entry `key` inside `parent`."""
    return (parent, *as_path(key))


def after(key: Key) -> Key:
    """The key of what the env answered: `key` inside "next"."""
    return under(NEXT, key)


def is_private(key: Key) -> bool:
    """Whether any part of `key` begins with an underscore: such entries are never delivered."""
    return any(part.startswith("_") for part in as_path(key))


def nest(flat: Mapping[Key, Any] | Iterable[tuple[Key, Any]]) -> dict[str, Any]:
    """Turn `{("a", "b"): 1, "c": 2}` into `{"a": {"b": 1}, "c": 2}`."""
    nested: dict[str, Any] = {}
    for key, value in flat.items() if isinstance(flat, Mapping) else flat:
        *parents, name = as_path(key)
        room = nested
        for parent in parents:
            room = room.setdefault(parent, {})
        room[name] = value
    return nested
