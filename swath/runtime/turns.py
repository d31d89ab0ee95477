"""Turns: what one of several threads does for all of them."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType


class Turns:
    """One thread is at it, the others wait until it has done so once."""

    def __init__(self, lock: threading.RLock | None = None) -> None:
        """With a `lock` that is held for moments only, if there is one that is taken in any case."""
        # No section: what an interrupt leaves is found by `_is_attended`.
        self._lock = threading.RLock() if lock is None else lock
        self._attendant = 0
        """The thread that is at it,"""
        self._frame: FrameType | None = None
        """and the call by which it is."""
        self._waiting: deque[threading.Lock] = deque()
        """What wakes the others."""

    def take(self, do: Callable[[bool], None], timeout_s: float) -> None:
        """Call `do`, or wait until another thread has done it, but no longer than `timeout_s`.

        It is told whether it is the first: not so in what is called while this thread is at it, as by a signal handler.
        """
        me, is_first, other = threading.get_ident(), False, None
        try:
            with self._lock:
                if self.begin(sys._getframe(), me):
                    is_first = True
                elif self._attendant != me:
                    other = threading.Lock()
                    other.acquire()
                    self._waiting.append(other)
            if other is None:
                do(is_first)
            else:
                other.acquire(timeout=max(0.0, timeout_s))
        finally:
            if is_first:
                with self._lock:
                    self.end()

    def begin(self, frame: FrameType, me: int) -> bool:
        """Let thread `me` be at it for as long as its call `frame` lasts, if nobody is; with the lock, from there."""
        if self._attendant and self._is_attended():
            return False
        self._frame, self._attendant = frame, me
        return True

    def end(self) -> None:
        """This thread was at it; with the lock."""
        self._attendant, self._frame = 0, None
        if self._waiting:
            waiting, self._waiting = self._waiting, deque()  # a signal handler may come in between
            for one in waiting:
                one.release()

    @property
    def is_mine(self) -> bool:
        """Whether this very thread is at it, and the caller has come in between."""
        return self._attendant == threading.get_ident() and self._is_attended()

    def _is_attended(self) -> bool:
        """Whether the attendant is at it: an interrupt may have torn it away before it could say that it leaves.

        A call that is not over cannot be cleared. (To look for it among those of its thread, which goes on meanwhile,
        would be to look at memory that is in use for something else by then.)
        """
        frame = self._frame
        try:
            if frame is not None:
                frame.clear()
        except RuntimeError:
            return True
        return False
