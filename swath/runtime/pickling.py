"""Saying what it is that cannot be sent to another process."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

DEPTH = 6


def unpicklable(message: Any, error: BaseException) -> RuntimeError:
    """An error that names the part of `message` that cannot be pickled."""
    path, part = _culprit(message)
    what = f"{path} is {type(part).__name__} ({_short(part)})" if path else f"{type(part).__name__} ({_short(part)})"
    return RuntimeError(
        f"This cannot be sent to a worker process: {what}. It fails with {type(error).__name__}: {error} Make it "
        "inside the factory, in the worker, instead of bringing it along."
    )


def _culprit(message: Any) -> tuple[str, Any]:
    """The innermost part that cannot be pickled, and the path to it."""
    path, part = "", message
    for _ in range(DEPTH):
        for name, inner in _parts(part):
            if not _is_picklable(inner):
                path, part = (f"{path}.{name}" if path and not name.startswith("[") else path + name), inner
                break
        else:
            return path, part
    return path, part


def _parts(whole: Any) -> Iterator[tuple[str, Any]]:
    """What `whole` is made of, by name, as far as it can be seen."""
    if dataclasses.is_dataclass(whole) and not isinstance(whole, type):
        for field in dataclasses.fields(whole):
            yield field.name, getattr(whole, field.name)
    elif isinstance(whole, Mapping):
        for key, value in whole.items():
            yield f"[{key!r}]", value
    elif isinstance(whole, Sequence) and not isinstance(whole, str | bytes):
        for index, value in enumerate(whole):
            yield f"[{index}]", value
    elif isinstance(whole, types.FunctionType):
        for name, cell in zip(whole.__code__.co_freevars, whole.__closure__ or (), strict=False):
            yield name, cell.cell_contents
        for name in whole.__code__.co_names:
            if name in whole.__globals__ and not isinstance(whole.__globals__[name], types.ModuleType):
                yield name, whole.__globals__[name]
        for index, value in enumerate(whole.__defaults__ or ()):
            yield f"(default {index})", value
    elif isinstance(whole, types.MethodType):
        yield "__self__", whole.__self__
    elif hasattr(whole, "func") and hasattr(whole, "keywords"):  # functools.partial
        yield "func", whole.func
        yield "args", whole.args
        yield "keywords", whole.keywords
    elif hasattr(whole, "__dict__"):
        yield from vars(whole).items()


def _is_picklable(part: Any) -> bool:
    try:
        cloudpickle.dumps(part)
    except Exception:
        return False
    return True


def _short(part: Any) -> str:
    text = repr(part)
    return text if len(text) <= 80 else text[:77] + "..."
