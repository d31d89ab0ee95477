"""Keeping Ctrl-C out of the few moments in which it would leave something half done."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Undisturbed:
    """A context, for moments only, in which an interrupt (SIGINT) waits; it comes when the context ends.

    Python interrupts only its main thread; in others there is nothing to be done. May be entered again when it was
    left, but not within itself.
    """

    def __init__(self) -> None:
        """Not entered yet."""
        self._before: Any = None
        self._held: tuple[int, FrameType | None] | None = None

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held = (number, frame)

    def __enter__(self) -> None:
        """Hold back interrupts."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._hold)

    def __exit__(self, *exc: object) -> None:
        """Let them come, also the one that has come meanwhile."""
        before, self._before = self._before, None
        if before is None:  # another thread; or a handler that is not Python's, which was left alone
            return
        signal.signal(signal.SIGINT, before)
        held, self._held = self._held, None
        if held is not None and callable(before):
            before(*held)
