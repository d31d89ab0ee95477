"""Descriptors that travel with a message: outside of the pickled bytes, as only the system can hand them over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_leaving: ContextVar[list[int] | None] = ContextVar("leaving", default=None)
_arriving: ContextVar[list[int] | None] = ContextVar("arriving", default=None)


@contextmanager
def collected() -> Iterator[list[int]]:
    """A context in which what is pickled leaves its descriptors in the list."""
    luggage: list[int] = []
    token = _leaving.set(luggage)
    try:
        yield luggage
    finally:
        _leaving.reset(token)


@contextmanager
def handed_out(fds: list[int]) -> Iterator[None]:
    """A context in which what is unpickled claims its descriptors from `fds`; those that nobody claims are closed."""
    left: list[int] = list(fds)
    token = _arriving.set(left)
    try:
        yield
    finally:
        _arriving.reset(token)
        for fd in left:
            if fd >= 0:
                os.close(fd)


def leaving() -> list[int] | None:
    """Where to leave descriptors; None unless a message is being packed."""
    return _leaving.get()


def claimed(place: int) -> int:
    """The descriptor that was left at `place`, which is the caller's from now on."""
    arriving = _arriving.get()
    if arriving is None:
        raise RuntimeError("A descriptor can only be claimed while a message of a channel is unpacked.")
    fd = arriving[place]
    if fd < 0:
        raise RuntimeError("This descriptor was claimed already.")
    arriving[place] = -1
    return fd
