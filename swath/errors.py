"""The library's own errors and warnings, and how their texts are put together.

An error says what happened, where, the likely cause and what to try. Exceptions raised by a user's env or policy keep
their type; `annotate` adds the place to them.
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class SwathError(Exception):
    """Base class of the errors that are particular to swath."""


class UnsupportedSpaceError(SwathError, TypeError):
    """A gymnasium space whose values cannot be held in tensors of one fixed shape."""


class UnsupportedEnvError(SwathError, TypeError):
    """Something was given as an environment that cannot be stepped as one."""


class ShapeError(SwathError, ValueError):
    """An env or a policy produced an entry of the wrong shape."""


class RowCountError(ShapeError, RuntimeError):
    """A policy answered another number of rows than it was asked for."""


class PolicyError(SwathError, TypeError):
    """A policy that cannot be called with what the env offers, or does not give what the env needs."""


class NoMeanError(NotImplementedError, AttributeError):
    """A distribution has no mean. torch raises the one, and what older versions of tensordict expect is the other."""


class ClosedError(SwathError, RuntimeError):
    """An env or a collector was used after it was closed."""


class EndlessError(SwathError, RuntimeError, TypeError):
    """A collector was asked for a length that it has not.

    A TypeError too: `list()` expects one where there is no length.
    """


class EnvCheckError(SwathError, ValueError):
    """`check_env` found problems; `problems` has a sentence for each."""

    def __init__(self, env: str, problems: list[str]) -> None:
        super().__init__(env, problems)
        self.env, self.problems = env, problems

    def __str__(self) -> str:
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        listed = (f"{number}. {problem}" for number, problem in enumerate(self.problems, 1))
        return "\n".join((f"check_env found {count} in {self.env}:", *listed))


class EnvCheckWarning(UserWarning):
    """`check_env` found something doubtful, which may be meant so."""


class UnsupportedArgumentError(SwathError, TypeError, ValueError):
    """An argument of TorchRL that cannot mean here what it means there."""


class NothingToSampleError(SwathError, RuntimeError):
    """There is not yet what a sampler could draw from."""


class CheckpointError(SwathError, ValueError):
    """A saved buffer is damaged, or does not fit where it is to be loaded; the text names the file."""


class BufferGoneError(SwathError, RuntimeError):
    """A replay buffer that lives in another process cannot be reached any more."""


class RateLimitError(SwathError, TimeoutError):
    """Writing or sampling waited too long for the other side."""


class NotANumberWarning(UserWarning):
    """An env produced NaN in an observation or a reward."""


class LongEpisodeWarning(UserWarning):
    """Whole episodes are waited for, and one of them does not end."""


LIKELY = {
    signal.SIGKILL: "Most often the system has ended it because memory ran out (see `dmesg`), or another user has.",
    signal.SIGSEGV: "A compiled library of the env or the policy has crashed; PYTHONFAULTHANDLER=1 shows where.",
    signal.SIGBUS: "Shared memory could not be had: the machine, or the container's limit, is full.",
    signal.SIGABRT: "A compiled library has given up; what it wrote to stderr tells why.",
    signal.SIGTERM: "Another program has ended it.",
}


class WorkerDiedError(SwathError, RuntimeError):
    """A worker process has ended without having been asked to.

    `index` and `pid` tell which; `exitcode` is what it ended with, negative for a signal, None if nobody knows.
    """

    def __init__(self, name: str, index: int, pid: int, exitcode: int | None, doing: str = "", cause: str = "") -> None:
        """Tell which worker, how it ended, and why if that is known."""
        super().__init__(name, index, pid, exitcode, doing, cause)
        self.name, self.index, self.pid, self.exitcode, self.doing = name, index, pid, exitcode, doing
        self.cause = cause

    def __str__(self) -> str:
        doing = f" while {self.doing}" if self.doing else ""
        cause = self.cause or _cause(self.exitcode)
        return f"{self.name} {self.index} (pid {self.pid}) {in_words(self.exitcode)}{doing}. {cause}"

    def __repr__(self) -> str:
        """For logs, the words as well."""
        return f"{type(self).__name__}({str(self)!r})"


class WorkerError(SwathError, RuntimeError):
    """An error of a worker whose own type could not be brought here."""


class RemoteTraceback(Exception):  # noqa: N818 - it is no error of its own, but where another was raised
    """The traceback of an error, in the process where it was raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class ChannelClosedError(ConnectionError):
    """The other side of a channel has closed its end, or has ended."""


class DoesNotFitError(SwathError, ValueError):
    """The extra values of a snapshot have outgrown their room: a store that holds `needed` bytes of them is needed."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"The extra values take {needed} bytes.")
        self.needed = needed


class StallWarning(UserWarning):
    """A worker has made no step for long."""


class WorkerRestartedWarning(UserWarning):
    """A worker has failed, and collection goes on: with a new one in its place, or without it."""


def in_words(exitcode: int | None) -> str:
    """How a process has ended."""
    if exitcode is None:
        return "has ended, how is not known"
    if exitcode >= 0:
        return f"has ended with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = "signal"
    return f"was killed by {name} (signal {-exitcode})"


def _cause(exitcode: int | None) -> str:
    if exitcode is None:
        return "The server that had started it is gone too."
    if exitcode < 0:
        return LIKELY.get(-exitcode, "")  # type: ignore[call-overload, no-any-return]
    return "Something in it has called os._exit or sys.exit, or its output tells more."


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


def check_foreign_arguments(
    owner: str,
    given: Mapping[str, Any],
    *,
    ignored: Iterable[str] = (),
    refused: Mapping[str, str] | None = None,
    harmless: Mapping[str, Sequence[Any]] | None = None,
    known: Iterable[str] = (),
) -> None:
    """Check arguments that `owner` does not have itself: those of TorchRL, and mistakes.

    Args:
        owner: the class, as users know it.
        given: the arguments.
        ignored: names that change nothing here, whatever the value.
        refused: names that cannot mean here what they mean in TorchRL, and for each the reason or what to do instead.
        harmless: values of refused arguments that change nothing, as the default there.
        known: the names that `owner` has, for a suggestion.

    Raises:
        UnsupportedArgumentError: one of `refused` was given, and not with a harmless value.
        TypeError: a name is in none of these.
    """
    ignored, refused = list(ignored), refused or {}
    names, unknown = [*known, *ignored], []
    for name, value in given.items():
        if name in refused:
            if not any(type(value) is type(each) and value == each for each in (harmless or {}).get(name, ())):
                raise UnsupportedArgumentError(f"{owner} does not support `{name}={value!r}`. {refused[name]}")
        elif name not in ignored:
            unknown.append(f"{name}={value!r}.{suggestion(name, names)}")
    if unknown:
        raise TypeError(f"{owner} got an unknown argument: {' Also '.join(unknown)}")


def wrong_shape(key: Any, expected: Iterable[int], given: Iterable[int], where: str) -> ShapeError:
    """The error for an entry `key` of the wrong shape, made by `where`."""
    return ShapeError(
        f"{where} gave {key!r} of shape {tuple(given)}, but {tuple(expected)} was expected. "
        "The shape of every entry is fixed by the env's spaces and the policy's first call; "
        "run swath.envs.check_env(env) to see what is wrong with a custom env."
    )
