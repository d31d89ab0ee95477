"""What goes wrong in another process, told in this one."""

from __future__ import annotations

import signal
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from swath.errors import SwathError, annotate

LIKELY = {
    signal.SIGKILL: "Most often the system has ended it because memory ran out (see `dmesg`), or somebody has.",
    signal.SIGSEGV: "A compiled library of the env or the policy has crashed; PYTHONFAULTHANDLER=1 shows where.",
    signal.SIGBUS: "Shared memory could not be had: the machine, or the container's limit, is full.",
    signal.SIGABRT: "A compiled library has given up; what it wrote to stderr tells why.",
    signal.SIGTERM: "Somebody has ended it.",
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
        """In words."""
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
        """Keep the text."""
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        """As Python prints it."""
        return f'\n"""\n{self.text}"""'


class StallWarning(UserWarning):
    """A worker has made no step for long."""


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # of a type that cannot say what it is about
        return f"<its __str__ raises {type(failure).__name__}>"


def in_words(exitcode: int | None) -> str:
    """How a process has ended."""
    if exitcode is None:
        return "has ended, nobody knows how"
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


@dataclass(frozen=True)
class Failure:
    """An exception on its way to another process."""

    packed: bytes | None
    """(type, args, attributes) or the exception itself, if they can be pickled."""
    summary: str
    trace: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        """`error`, with its traceback."""
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        text = _text(error)
        summary = f"{type(error).__name__}: {text}"
        if not isinstance(error, Exception):  # such as SystemExit, which would end the process that is told of it
            return Failure(None, summary, trace)
        usable: bytes | None = None
        notes = {"__notes__": getattr(error, "__notes__", [])}
        kind, args = type(error), error.args
        for parts in ((kind, args, vars(error)), error, (kind, args, notes)):
            try:
                packed = cloudpickle.dumps(parts)
                rebuilt = _rebuilt(packed)
            except Exception:  # whatever an exception's own parts may do when they are pickled
                continue
            usable = usable or packed
            if _text(rebuilt) == text:
                return Failure(packed, summary, trace)
        return Failure(usable, summary, trace)

    def error(self, place: str) -> BaseException:
        """The exception: of its own type where possible, with its traceback as the cause and `place` as a note."""
        try:
            error = WorkerError(self.summary) if self.packed is None else _rebuilt(self.packed)
        except Exception:  # its type is not known here
            error = WorkerError(self.summary)
        error.__cause__ = RemoteTraceback(self.trace)
        annotate(error, place)
        return error


def _rebuilt(packed: bytes) -> BaseException:
    """Best without calling the type's constructor, whose arguments may be anything; some types have their own way."""
    parts = cloudpickle.loads(packed)
    if isinstance(parts, BaseException):
        return parts
    kind, args, content = parts
    error: Any = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(content)
    if not isinstance(error, BaseException):
        raise TypeError(f"{kind} is no exception.")
    return error
