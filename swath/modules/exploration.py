"""How a policy explores: tensordict's interaction type under the name that RL users know.

NOTE [Exploring in a thread]: tensordict keeps the type in one place for the whole process. A collector that runs in the
background must not touch it: the trainer, in its own thread, may just be evaluating. So there it is set for us alone,
by a context variable, which every thread has for itself. Plans ask `acting_type`, and known modules never look at the
process's type; only around a call of a module that we do not know is it set for the process, for as long as the call
takes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from functools import partial
from typing import Any

from tensordict.nn import probabilistic

from swath.envs.utils import ExplorationType, exploration_type, set_exploration_type

_of_all: Any = getattr(probabilistic, "_interaction_type", None)
"""Where tensordict keeps the type of the process."""
_is_known = hasattr(_of_all, "_mode")
_of_this_thread: ContextVar[ExplorationType | None] = ContextVar("swath_exploration", default=None)


class Exploring:
    """tensordict's `set_interaction_type` in a tenth of its calls; it may be entered again once it was left.

    No interrupt comes in the middle of a line without a call: it is entered or not, and what is not need not be left.
    """

    def __init__(self, kind: ExplorationType) -> None:
        self._kind, self._is_set = kind, False

    def __enter__(self) -> None:
        self._before, _of_all._mode, self._is_set = _of_all._mode, self._kind, True

    def __exit__(self, *exc: object) -> None:
        if self._is_set:
            _of_all._mode, self._is_set = self._before, False


def exploring(kind: ExplorationType) -> AbstractContextManager[Any]:
    """A context in which all policies of this process explore like `kind`."""
    return Exploring(kind) if _is_known else set_exploration_type(kind)


class ExploringHere:
    """A context in which policies that we run in this thread explore like `kind`; see NOTE [Exploring in a thread].

    May be entered again once it was left.
    """

    def __init__(self, kind: ExplorationType) -> None:
        self._kind = kind
        self._token: Token[ExplorationType | None] | None = None

    def __enter__(self) -> None:
        self._token = _of_this_thread.set(self._kind)

    def __exit__(self, *exc: object) -> None:
        token, self._token = self._token, None
        if token is not None:
            _of_this_thread.reset(token)


def acting_type() -> ExplorationType | None:
    """The exploration type that counts here."""
    kind: ExplorationType | None = _of_this_thread.get()
    if kind is None:
        kind = _of_all._mode if _is_known else exploration_type()  # tensordict takes a lock to look at it
    return kind


def as_explored(call: Callable[..., Any]) -> Callable[..., Any]:
    """What calls a module that we do not know so that it sees the type that counts here and now."""
    kind = _of_this_thread.get()
    return call if kind is None else partial(_explored, kind, call)


def _explored(kind: ExplorationType, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with set_exploration_type(kind):
        return call(*args, **kwargs)


__all__ = ["ExplorationType", "exploration_type", "set_exploration_type"]
