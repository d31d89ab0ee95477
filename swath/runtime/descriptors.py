"""Descriptors that travel with a message: outside of the pickled bytes, as only the system can hand them over."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

KEPT = 0.75
"""Up to which part of the descriptors that a process may have we keep some for later."""
_leaving: ContextVar[list[int] | None] = ContextVar("leaving", default=None)
_arriving: ContextVar[list[int]] = ContextVar("arriving")


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
    left = list(fds)
    token = _arriving.set(left)
    try:
        yield
    finally:
        _arriving.reset(token)
        for fd in left:
            if fd >= 0:
                os.close(fd)


class Descriptor:
    """What lies behind a descriptor of the system, which it owns: `fd`, or -1. Travels through a channel."""

    fd = -1

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def release(self) -> None:
        """Close the descriptor. May be called again.

        Also by two threads at once: the second would close what another has got under this number meanwhile.
        """
        if (fd := vars(self).pop("fd", -1)) >= 0:
            os.close(fd)

    def __reduce__(self) -> tuple[Any, ...]:
        if not is_packing():
            raise TypeError(f"{type(self).__name__} can only be sent through a Channel.")
        return _arrived, (type(self), leave(self.fd))

    def __del__(self) -> None:
        """Close what was forgotten."""
        with contextlib.suppress(Exception):
            self.release()


def _arrived(kind: type[Descriptor], place: int) -> Descriptor:
    made = kind.__new__(kind)
    made.fd = claim(place)
    return made


def leave(fd: int) -> int:
    """Let `fd`, which must stay open until then, go along with the message that is being packed; its place there."""
    luggage = _leaving.get()
    assert luggage is not None
    luggage.append(fd)
    return len(luggage) - 1


def claim(place: int) -> int:
    """The descriptor that came at this place of a message, which is the caller's from now on."""
    arriving = _arriving.get()
    fd, arriving[place] = arriving[place], -1
    return fd


def is_scarce(fd: int) -> bool:
    """Whether descriptors had become few when `fd` was made.

    The system gives out the lowest number that is free: it tells how many there were, whoever has them.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit != resource.RLIM_INFINITY and fd >= KEPT * limit


def is_packing() -> bool:
    """Whether a message of a channel is being pickled."""
    return _leaving.get() is not None
