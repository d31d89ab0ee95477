"""What `check_env` found, and how single values are checked: each fault becomes one sentence."""

from __future__ import annotations

import traceback
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
from gymnasium import spaces as gs


class CannotGoOn(Exception):  # noqa: N818 - it ends a part of the check, and no user sees it
    """A check has met something that leaves it nothing to go on with."""


class Findings:
    """What is wrong, and what is only doubtful. Each kind of thing is told once, where it is first met."""

    def __init__(self) -> None:
        """Begin with nothing found."""
        self.problems: dict[Hashable, str] = {}
        self.doubts: dict[Hashable, str] = {}
        self.cause: Exception | None = None
        """The first exception that the env raised."""

    def problem(self, kind: Hashable, sentence: str) -> None:
        """Note what is wrong."""
        self.problems.setdefault(kind, sentence)

    def doubt(self, kind: Hashable, sentence: str) -> None:
        """Note what may be meant so."""
        self.doubts.setdefault(kind, sentence)

    def fatal(self, kind: Hashable, sentence: str) -> NoReturn:
        """Note what is wrong, and go no further."""
        self.problem(kind, sentence)
        raise CannotGoOn

    @contextmanager
    def calling(self, what: str, cure: str) -> Iterator[None]:
        """An exception of the env inside the block is a problem, after which there is no going on."""
        try:
            yield
        except CannotGoOn:
            raise
        except Exception as error:
            self.cause = self.cause or error
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.fatal(
                (what, "raised"),
                f"{what} raised {type(error).__name__} ({place.filename}:{place.lineno}): {_text(error)} {cure}",
            )


def _text(error: Exception) -> str:
    """The error's message on one line, as a sentence."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    text = " ".join(text.split())
    return text if text.endswith((".", "!", "?")) or not text else text + "."


def same(one: Any, other: Any) -> bool:
    """Whether two nested values are equal; NaN equals NaN."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    first, second = np.asarray(one), np.asarray(other)
    floats = first.dtype.kind == second.dtype.kind == "f"
    return bool(np.array_equal(first, second, equal_nan=floats))


def first_difference(one: list[Any], other: list[Any]) -> int | None:
    """The index of the first elements that are not the same."""
    return next((i for i, pair in enumerate(zip(one, other, strict=False)) if not same(*pair)), None)


class EpisodeLengths:
    """Notices lanes whose resets do not take back what ended the episode before."""

    ENOUGH = 3

    def __init__(self) -> None:
        """Begin the first episode."""
        self._lengths = [0]

    def step(self, ended: bool) -> None:
        """Count one step."""
        self._lengths[-1] += 1
        if ended:
            self._lengths.append(0)

    def judge(self, findings: Findings) -> None:
        """Is every episode but the first over in its first step?"""
        first, *others = self._lengths[:-1] or [0]
        if first > 1 and len(others) >= self.ENOUGH and set(others) == {1}:
            findings.problem(
                "episodes of one step",
                f"The first episode took {first} steps, but each of the {len(others)} after it ended in its first "
                "step: reset() does not take back what ended the episode. Set all state anew there, flags included.",
            )


def check_value(findings: Findings, space: gs.Space[Any], value: Any, name: str, source: str) -> None:
    """Is `value`, which `source` returned as `name`, in `space`?"""
    if isinstance(space, gs.Dict):
        _check_dict(findings, space, value, name, source)
    elif isinstance(space, gs.Tuple):
        if not isinstance(value, tuple) or len(value) != len(space.spaces):
            findings.problem(
                (name, "tuple"),
                f"{source} returned {name} as {_kind(value)}, but its space is a Tuple of {len(space.spaces)}. Return "
                "a tuple with one value for each of them.",
            )
            return
        for index, (child, part) in enumerate(zip(space.spaces, value, strict=True)):
            check_value(findings, child, part, f"{name}[{index}]", source)
    elif isinstance(space, gs.Discrete):
        _check_discrete(findings, space, value, name, source)
    else:
        _check_array(findings, space, value, name, source)


def _check_dict(findings: Findings, space: gs.Dict, value: Any, name: str, source: str) -> None:
    if not isinstance(value, Mapping):
        findings.problem(
            (name, "dict"),
            f"{source} returned {name} as {_kind(value)}, but its space is a Dict. Return a dict with the keys "
            f"{list(space.spaces)}.",
        )
        return
    for key, child in space.spaces.items():
        if key in value:
            check_value(findings, child, value[key], f"{name}[{key!r}]", source)
        else:
            findings.problem(
                (name, key),
                f"{source} returned {name} without the key {key!r}, which its Dict space has. Return it always, or "
                "take it out of the space.",
            )
    for key in value:
        if key not in space.spaces:
            findings.problem(
                (name, key),
                f"{source} returned {name} with the key {key!r}, which its Dict space has not, so that it would be "
                "dropped. Add it to the space, or return it in info.",
            )


def _check_discrete(findings: Findings, space: gs.Discrete, value: Any, name: str, source: str) -> None:
    if not isinstance(value, int | np.integer) and not (
        isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "iu"
    ):
        findings.problem(
            (name, "integer"),
            f"{source} returned {name} as {_kind(value)}, but its space {space} holds integers. Return int({name}).",
        )
    elif not space.start <= int(value) < space.start + space.n:
        findings.problem(
            (name, "outside"),
            f"{source} returned {name} = {value}, outside of its space {space}, which goes from {space.start} to "
            f"{space.start + space.n - 1}. Correct n or start of the space, or the value.",
        )


def _check_array(findings: Findings, space: gs.Space[Any], value: Any, name: str, source: str) -> None:
    if not isinstance(value, np.ndarray | np.generic):
        findings.doubt(
            (name, "array"),
            f"{source} returned {name} as {_kind(value)}, which is converted in every step. Return "
            f"np.array({name}, dtype=np.{space.dtype}).",
        )
        try:
            value = np.asarray(value)
        except ValueError:
            value = np.array(value, dtype=object)
    dtype = np.dtype(space.dtype)
    if value.shape != space.shape:
        findings.problem(
            (name, "shape"),
            f"{source} returned {name} of shape {value.shape}, but its space {space} has the shape {space.shape}. "
            "Return that shape, or correct the space.",
        )
    elif not np.can_cast(value.dtype, dtype, "same_kind"):
        findings.problem(
            (name, "dtype"),
            f"{source} returned {name} of dtype {value.dtype}, but its space {space} has {space.dtype}, to which it "
            "cannot be cast without loss. Convert it before you return it, or correct the space's dtype.",
        )
    else:
        if not np.can_cast(value.dtype, dtype):
            findings.problem(
                (name, "dtype"),
                f"{source} returned {name} of dtype {value.dtype}, but its space has {space.dtype}, to which it would "
                f"be rounded. Return {name}.astype(np.{space.dtype}), or give the space dtype=np.{value.dtype}.",
            )
        _check_range(findings, space, value, name, source)


def _check_range(findings: Findings, space: gs.Space[Any], value: Any, name: str, source: str) -> None:
    if value.dtype.kind == "f" and np.isnan(value).any():
        findings.problem(
            (name, "nan"),
            f"{source} returned NaN in {name}, at {_first(np.isnan(value))}. Look for a division by zero, a root or "
            "logarithm of something negative, or a state that grows without end.",
        )
        return
    low, high = limits(space)
    for wrong, limit, word in ((value < low, low, "below"), (value > high, high, "above")):
        if wrong.any():
            at = _first(wrong)
            findings.problem(
                (name, "outside"),
                f"{source} returned {name} outside of its space: {value[at]} at {at}, {word} the limit {limit[at]}. "
                "Widen the bounds of the space, or clip the value.",
            )


def limits(space: gs.Space[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest values in a space of arrays."""
    if isinstance(space, gs.Box):
        return space.low, space.high
    if isinstance(space, gs.MultiDiscrete):
        return np.asarray(space.start), space.start + space.nvec - 1
    shape = space.shape or ()
    return np.zeros(shape), np.ones(shape)


def _first(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i[0]) for i in np.nonzero(mask)) if mask.ndim else ()


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    return f"{type(value).__name__} {value!r}"[:120]
