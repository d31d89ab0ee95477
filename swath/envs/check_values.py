"""What `check_env` found, what gymnasium's checkers say, and how single values are checked."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from gymnasium import logger
from gymnasium import spaces as gs
from gymnasium.utils.env_checker import data_equivalence

NOISE = (
    "infinity",
    "symmetric and normalized",
    "the unwrapped version",
    "Casting input x",
    "should be an int or np",  # any integer will do
    "truncates after 1 step",  # said of every env that returns np.False_
    "keyword argument",  # looks for names, and takes no **options
)
"""Parts of gymnasium's sentences about what is no fault for swath."""
SAME = {"dictionary, actual": "info", "share an object": "alias"}
"""Parts of gymnasium's sentences that say the same as others of its sentences, or as ours: their kind."""
ENOUGH = 10
"""So many episodes of one step are no chance."""


class CannotGoOn(Exception):  # noqa: N818 - it ends a part of the check, and no user sees it
    """A check has met something that leaves it nothing to go on with."""


@dataclass
class Findings:
    """What is wrong, and what is only doubtful, by kind: each is said once, where it is first met."""

    problems: dict[Hashable, str] = field(default_factory=dict)
    doubts: dict[Hashable, str] = field(default_factory=dict)
    cause: Exception | None = None
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
        except Exception as error:
            self.cause = self.cause or error
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} ({place.filename}:{place.lineno})"
            self.fatal((what, "raised"), f"{what} raised {where}: {_sentence(error)} {cure}")


def _sentence(said: Exception | str) -> str:
    """The message of an error, or a warning's, on one line."""
    text = " ".join(str(said.args[0] if isinstance(said, KeyError) and said.args else said).split())
    return text if text.endswith((".", "!", "?")) or not text else text + "."


def said(check: Callable[..., Any], *args: Any, **options: Any) -> tuple[list[str], list[str]]:
    """What a checker of gymnasium says: the sentences that it warns with, and the one that it raised, if any."""
    raised: list[Exception] = []
    level, logger.min_level = logger.min_level, logger.WARN
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check(*args, **options)
        except Exception as error:
            raised = [error]
        finally:
            logger.min_level = level
    warned = [re.sub(r"\x1b\[[\d;]*m", "", str(warning.message)) for warning in caught]
    own = [text[len("WARN: ") :] for text in warned if text.startswith("WARN: ")]  # not those of the env

    def heard(texts: Sequence[Exception | str]) -> list[str]:
        return [_sentence(text) for text in texts if all(part not in str(text) for part in NOISE)]

    return heard(own), heard(raised)


def kind_of(sentence: str) -> str:
    """What a sentence of gymnasium is about, be it said of `reset` or of `step`."""
    kinds = (kind for part, kind in SAME.items() if part in sentence)
    return next(kinds, sentence.replace("reset()", "step()"))


def check_observation(findings: Findings, space: gs.Space[Any], value: Any, source: str, warned: list[str]) -> None:
    """Is `value`, which `source` returned, in `space`? gymnasium has `warned` of what it saw.

    We look at the single values, and say more about them. What gymnasium alone minds is only doubtful if the
    observation is in its space all the same.
    """
    if _are_sound(findings, space, value, "observation", source):
        outside = [text for text in warned if "is not within the observation space" in text]
        for text in [text for text in warned if text not in outside] or outside:
            (findings.problem if outside else findings.doubt)(kind_of(text), text)


def _are_sound(findings: Findings, space: gs.Space[Any], value: Any, name: str, source: str) -> bool:
    """Check the values in `value`, as far as it is nested as `space` is."""
    if isinstance(space, gs.Dict):
        keys = space.spaces.keys() & value.keys() if isinstance(value, Mapping) else ()
        return all([_are_sound(findings, space[key], value[key], f"{name}[{key!r}]", source) for key in keys])
    if isinstance(space, gs.Tuple):
        parts = zip(space.spaces, value, strict=False) if isinstance(value, tuple | list) else ()
        return all([_are_sound(findings, *pair, f"{name}[{index}]", source) for index, pair in enumerate(parts)])
    return is_sound(findings, space, value, name, source)


def is_sound(findings: Findings, space: gs.Space[Any], value: Any, name: str, source: str) -> bool:
    """Check the shape and the dtype of `value`, and whether it lies within the limits of `space`."""
    try:
        value = np.asarray(value)
    except ValueError:
        value = np.array(value, dtype=object)
    is_integer = isinstance(space, gs.Discrete) and value.dtype.kind in "iub"
    dtype = value.dtype if is_integer else np.dtype(space.dtype)  # of a discrete value any integer will do
    given, wanted = f"{name} of dtype {value.dtype}", f"but its space {space} has"
    if value.shape != space.shape:
        kind, cure = "shape", "Return that shape, or correct the space."
        fault = f"{name} of shape {value.shape}, {wanted} the shape {space.shape}"
    elif not np.can_cast(value.dtype, dtype, "same_kind"):
        kind, cure = "dtype", "Convert it before you return it, or correct the space's dtype."
        fault = f"{given}, {wanted} {dtype}, to which it cannot be cast without loss"
    elif not np.can_cast(value.dtype, dtype):
        kind, cure = "dtype", f"Return {name}.astype(np.{dtype}), or give the space dtype=np.{value.dtype}."
        fault = f"{given}, {wanted} {dtype}, to which it would be rounded"
    elif value.dtype.kind == "f" and np.isnan(value).any():
        kind, cure = "nan", "Look for a division by zero, a root of something negative, or a state that grows for ever."
        fault = f"NaN in {name}, at {_first(np.isnan(value))}"
    else:
        low, high = (np.broadcast_to(limit, value.shape) for limit in _limits(space))
        wrong = (value < low) | (value > high)
        if not wrong.any():
            return True
        at, kind, cure = _first(wrong), "outside", "Widen the bounds of the space, or clip the value."
        limit = f"below the limit {low[at]}" if value[at] < low[at] else f"above the limit {high[at]}"
        fault = f"{name} outside of its space {space}: {value[at]} at {at}, {limit}"
    findings.problem((name, kind), f"{source} returned {fault}. {cure}")
    return False


def _limits(space: gs.Space[Any]) -> tuple[Any, Any]:
    """The least and the greatest values in a space of numbers."""
    if isinstance(space, gs.Box):
        return space.low, space.high
    if isinstance(space, gs.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return (space.start, space.start + space.n - 1) if isinstance(space, gs.Discrete) else (0, 1)


def _first(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i[0]) for i in np.nonzero(mask)) if mask.ndim else ()


def check_seed(findings: Findings, one: list[Any], other: list[Any], seed: int, cure: str) -> None:
    """Were two runs with one seed the same? Where something else is wrong already, that may be why they were not."""
    pairs = zip(one, other, strict=False)
    step = next((i for i, pair in enumerate(pairs) if not data_equivalence(*pair, exact=True)), None)
    if step is not None and not findings.problems:
        differ = f"Two runs with seed {seed} and the same actions differ from step {step} on."
        first = f"Two resets with seed {seed} gave different observations: the seed is not heeded."
        findings.problem("seeds", f"{differ if step else first} {cure}")


def check_lengths(findings: Findings, ends: list[bool]) -> None:
    """Does a reset take back what ended the episode? `ends` says of each step of a lane whether it was the last."""
    first, *others = np.diff(np.flatnonzero([True, *ends])).tolist() or [0]
    if first > 1 and len(others) >= ENOUGH and set(others) == {1}:
        fault = f"The first episode took {first} steps, but each of the {len(others)} after it ended in its first step"
        cure = "reset() does not take back what ended the episode. Set all state anew there, flags included."
        findings.problem("episodes of one step", f"{fault}: {cure}")
