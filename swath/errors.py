"""The library's own errors and warnings, and how their texts are put together.

An error says what happened, where, the likely cause and what to try. Exceptions raised by a user's env or policy keep
their type; `annotate` adds the place to them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class SwathError(Exception):
    """Base class of the errors that are particular to swath."""


class UnsupportedSpaceError(SwathError, TypeError):
    """A gymnasium space whose values cannot be held in tensors of one fixed shape."""


class UnsupportedEnvError(SwathError, TypeError):
    """Something was given as an environment that cannot be stepped as one."""


class ShapeError(SwathError, ValueError):
    """An env or a policy produced an entry of the wrong shape."""


class PolicyError(SwathError, TypeError):
    """A policy that cannot be called with what the env offers, or does not give what the env needs."""


class ClosedError(SwathError, RuntimeError):
    """An env or a collector was used after it was closed."""


class EndlessError(SwathError, RuntimeError, TypeError):
    """A collector was asked for a length that it has not.

    A TypeError too: `list()` expects one where there is no length.
    """


class EnvCheckError(SwathError, ValueError):
    """`check_env` found problems; `problems` has a sentence for each."""

    def __init__(self, env: str, problems: list[str]) -> None:
        """List all `problems` of `env`."""
        super().__init__(env, problems)
        self.env, self.problems = env, problems

    def __str__(self) -> str:
        """The problems, numbered."""
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        listed = (f"{number}. {problem}" for number, problem in enumerate(self.problems, 1))
        return "\n".join((f"check_env found {count} in {self.env}:", *listed))


class EnvCheckWarning(UserWarning):
    """`check_env` found something doubtful, which may be meant so."""


class NotANumberWarning(UserWarning):
    """An env produced NaN in an observation or a reward."""


def annotate(error: BaseException, place: str) -> None:
    """Add `place` to the error's text; the type and the traceback stay as they are."""
    if hasattr(error, "add_note"):  # Python 3.11 and later
        error.add_note(place)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{place}", *error.args[1:])


def suggestion(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the known name nearest to `name`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def wrong_shape(key: Any, expected: Iterable[int], given: Iterable[int], where: str) -> ShapeError:
    """The error for an entry `key` of the wrong shape, made by `where`."""
    return ShapeError(
        f"{where} gave {key!r} of shape {tuple(given)}, but {tuple(expected)} was expected. "
        "The shape of every entry is fixed by the env's spaces and the policy's first call; "
        "run swath.envs.check_env(env) to see what is wrong with a custom env."
    )
