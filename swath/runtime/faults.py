"""What goes wrong in another process, told in this one."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from swath.errors import RemoteTraceback, WorkerError, annotate


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # of a type that cannot say what it is about
        return f"<its __str__ raises {type(failure).__name__}>"


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
