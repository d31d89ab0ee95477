"""Keeping Ctrl-C out of the few moments in which it would leave something half done."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

LONGEST_S = 1.0
"""After how long an interrupt is no longer held: somebody is stuck, or was torn out of the context."""


class Undisturbed:
    """A context, for moments only, in which an interrupt (SIGINT) waits; it comes when the context ends.

    Python interrupts only its main thread; in others there is nothing to be done. May be entered again when it was
    left, but not within itself.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._since = 0.0
        self._held: tuple[int, FrameType | None] | None = None

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._since < LONGEST_S:
            self._held = (number, frame)
            return
        signal.signal(signal.SIGINT, self._before)
        if callable(self._before):
            self._before(number, frame)

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._held = None
        before = signal.getsignal(signal.SIGINT)
        if before is None:  # not Python's; it is left alone
            return
        if before != self._hold:  # else an exception has torn us out of the context before
            self._before = before
        self._since = time.monotonic()
        try:
            signal.signal(signal.SIGINT, self._hold)
        except BaseException:  # by the handler of another signal
            signal.signal(signal.SIGINT, self._before)
            raise

    def __exit__(self, *exc: object) -> None:
        """Let them come, also the one that has come meanwhile."""
        if signal.getsignal(signal.SIGINT) != self._hold or threading.current_thread() is not threading.main_thread():
            return
        signal.signal(signal.SIGINT, self._before)
        held, self._held = self._held, None
        if held is not None and callable(self._before):
            self._before(*held)
