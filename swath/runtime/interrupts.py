"""Moments that nothing disturbs: no signal handler, and no other thread.

NOTE [Moments]: Python runs signal handlers in its main thread, between any two instructions, and what they raise
(Ctrl-C, for one) comes from there. What was half done then stays so: a message that was read and not yet kept, a lock
that was taken and not yet noted. So whatever must be done in full or not at all is done in a moment, in which handlers
wait: `undisturbed`. Where other threads change the same things, a `Section` keeps them out as well.

Both are short, and nobody waits in them for anybody else: a handler may call whatever it likes, because it is called
while nothing is half done, and a thread that has to wait for a section waits for microseconds. Should a moment last
all the same, as when a large buffer is saved, handlers no longer wait after `LONGEST_S`, but for those that would come
while a moment is being entered or left. A moment within another has its own time, which begins when nobody has to be
waited for any more: a long one may be disturbed between such parts of it, and never in the middle of one.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

LONGEST_S = 1.0
"""After how long a handler no longer waits for the end of a moment."""
SIGNALS = sorted(map(int, set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}))
OWN_FILES = {__file__, contextlib.__file__}
"""Where moments are entered and left."""


class Undisturbed:
    """A context, for moments only, in which handlers of signals wait; they come when the context ends.

    There is one, `undisturbed`, which may be entered again within itself. Outside of the main thread nothing is to be
    done: handlers never run there.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._since = 0.0
        self._outer: list[float] = []
        """The same of the moments that this one is within."""
        self._before: dict[int, Any] = {}
        """The handlers in whose place ours stands."""
        self._held: list[int] = []
        self._seen: list[Any] = []
        self._handled: list[tuple[int, Any]] = []

    def _hold(self, number: int, frame: FrameType | None) -> None:
        is_short = self._depth and time.monotonic() - self._since < LONGEST_S
        if is_short or (frame is not None and frame.f_code.co_filename in OWN_FILES):
            self._held.append(number)
            return
        before = self._before[number]
        if not self._depth:  # the handler of another signal has raised something while we stepped in or out
            signal.signal(number, before)
        before(number, frame)

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth:
            self._depth += 1
            self._outer.append(self._since)
            self._since = time.monotonic()
            return
        self._since = time.monotonic()
        seen = list(map(_signal.getsignal, SIGNALS))
        if seen != self._seen:
            own = [(n, found) for n, found in zip(SIGNALS, seen, strict=True) if callable(found)]
            self._handled, self._seen = [(n, found) for n, found in own if found != self._hold], seen
        self._depth = 1
        try:
            for number, before in self._handled:
                self._before[number] = before
                _signal.signal(number, self._hold)
        except BaseException:  # by a handler that did not have to wait yet
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        """Let them come, also those that have come meanwhile."""
        if not self._depth or threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth:
            self._since = self._outer.pop()
            return
        for number, before in list(self._before.items()):
            if _signal.getsignal(number) == self._hold:
                _signal.signal(number, before)
        self._before.clear()
        self._let_come()

    def _let_come(self) -> None:
        """Call the handlers of what was held; all of them, whatever they raise: later there may be none any more."""
        if self._held:
            try:
                signal.raise_signal(self._held.pop(0))
            finally:
                self._let_come()

    def breathe(self) -> None:
        """Let those come that have come meanwhile, as nothing is half done just now."""
        if self._held and self._depth == 1 and threading.current_thread() is threading.main_thread():
            try:
                self.__exit__()
            finally:
                self.__enter__()

    def renew(self) -> None:
        """The moment begins only now: until now somebody else was waited for."""
        if self._depth and threading.current_thread() is threading.main_thread():
            self._since = time.monotonic()

    def forget(self) -> None:
        """In a forked child: whoever was in a moment is not there."""
        self._depth = min(self._depth, 1)
        self._outer.clear()
        self._held.clear()
        self.__exit__()


undisturbed = Undisturbed()
os.register_at_fork(after_in_child=undisturbed.forget)


class Section:
    """A context, for moments only, of one thread at a time, which may enter it again; `undisturbed` as well."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Keeps other threads out, and no handlers: for what may be left half done if one of them raises something."""

    def __enter__(self) -> None:
        undisturbed.__enter__()
        try:
            if not self.lock.acquire(blocking=False):
                while not self.lock.acquire(timeout=LONGEST_S):  # somebody is stuck in there
                    undisturbed.breathe()
                undisturbed.renew()
        except BaseException:
            undisturbed.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        self.lock.release()
        undisturbed.__exit__()
