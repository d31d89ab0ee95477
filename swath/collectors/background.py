"""Background: a collector that runs in a thread beside the trainer.

NOTE [Collecting in a thread]: the thread collects one batch after another. After every step it is asked whether it
should rest or stop; then the batch ends there, and what it holds is written, so that nothing is lost. Whoever wants
something of the collector meanwhile (its state, a reset) lets it rest first. New weights need no rest: they are copied
when they are published, left where the thread finds them, and adopted between two batches. The thread holds the
collector only while it collects: one that everybody has forgotten is freed, and its thread ends.

Both threads share Python's interpreter, which by default is handed over every 5 ms only. A trainer gives it away in
each torch operation of some length, and would wait for as long to get it back; so it is handed over more often while a
collector runs.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol

from swath.errors import annotate
from swath.rollout import Interruptor

REST_S = 60.0
"""How long a step may take while somebody waits for the collector to rest."""
STOP_S = 5.0
SWITCH_S = 0.0001
"""How long a thread may keep the interpreter while a collector runs in the background."""


class Runs(Protocol):
    """What is run in the background."""

    def fill(self) -> bool:
        """Collect once; whether there is more to do."""


class Background:
    """Runs `fill` of a collector again and again in a thread, until it says that there is no more, or is stopped."""

    def __init__(self, runs: Runs, name: str, interruptor: Interruptor | None) -> None:
        """Make ready; `interruptor` is the user's."""
        self._turn = threading.Condition()
        self._resters: list[int] = []
        """The threads that want the collector to rest."""
        self._is_resting = False
        self._is_stopping = False
        self._interruptor = interruptor
        self._name = name
        self.error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self.is_reported = False
        """Whether the error has reached the user."""
        self._thread = threading.Thread(target=self._run, args=(weakref.ref(runs),), name=f"swath-{name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        _Switching.begin()
        _running.add(self)
        self._thread.start()

    # -- the thread's side -------------------------------------------------------------------------------------

    def collection_stopped(self) -> bool:
        """Whether the batch should end here: asked after every step."""
        if self.is_here and self.wants_attention():  # whoever has let it rest may collect whole batches meanwhile
            return True
        return self._interruptor is not None and self._interruptor.collection_stopped()

    def wants_attention(self) -> bool:
        """Whether somebody wants the thread to rest or to stop."""
        return bool(self._resters) or self._is_stopping

    def may_go_on(self) -> bool:
        """Rest for as long as somebody wants it; whether to go on then."""
        with self._turn:
            while self._resters and not self._is_stopping:
                self._is_resting = True
                self._turn.notify_all()
                self._turn.wait(1.0)
            self._is_resting = False
            return not self._is_stopping

    # -- the others' side --------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    @property
    def is_here(self) -> bool:
        """Whether the caller is the thread itself."""
        return threading.current_thread() is self._thread

    @property
    def rests_for_caller(self) -> bool:
        """Whether the thread waits until the caller lets it go on."""
        return self._is_resting and threading.get_ident() in self._resters

    @contextlib.contextmanager
    def resting(self, timeout_s: float = REST_S) -> Iterator[None]:
        """A context in which the collector rests."""
        if self.is_here:  # a hook of the collector itself
            yield
            return
        caller = threading.get_ident()
        with self._turn:
            self._resters.append(caller)
        try:
            self._await_rest(timeout_s)
            yield
        finally:
            with self._turn:
                self._resters.remove(caller)
                self._turn.notify_all()

    def _await_rest(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._turn:
            while not self._is_resting and self._thread.is_alive():
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{self._name} has not come to rest within {timeout_s:.0f} s: a step of its env or policy, a "
                        "hook, or a write takes that long."
                    )
                self._turn.wait(0.05)

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread after its current step; whether it has ended in time."""
        with self._turn:
            self._is_stopping = True
            self._turn.notify_all()
        if self.is_here or not self._thread.ident:
            return True
        self._thread.join(STOP_S if timeout_s is None else timeout_s)
        if self._thread.is_alive():
            warnings.warn(
                f"{self._name} did not end in time: a step of its env or policy still runs, and its thread is left "
                "behind.",
                stacklevel=2,
            )
        return not self._thread.is_alive()

    def raise_failure(self) -> None:
        """Raise what went wrong in the thread, if something did."""
        if self.error is not None:
            self.is_reported = True
            _failed.discard(self)
            if not self.is_here:  # whoever is told of the error may count on the thread's end
                self._thread.join(STOP_S)
            raise self.error.with_traceback(self._traceback)  # which would grow with each raise

    def complain(self) -> None:
        """Warn of an error that nobody has asked for."""
        if self.error is not None and not self.is_reported:
            self.is_reported = True
            told = "".join(traceback.format_exception(self.error)).rstrip()
            warnings.warn(f"{self._name} had ended with an error that nobody has asked for:\n{told}", stacklevel=2)

    def _run(self, runs: weakref.ref[Any]) -> None:
        """What the thread does."""
        try:
            while self.may_go_on():
                collector = runs()
                if collector is None or not collector.fill():
                    return
                del collector
        except BaseException as error:
            annotate(error, f"Raised while {self._name} collected in the background.")
            self.error, self._traceback = error, error.__traceback__
            _failed.add(self)
        finally:
            _running.discard(self)
            _Switching.end()
            with self._turn:
                self._turn.notify_all()


class _Switching:
    """How often threads take turns: more often while any collector runs in the background."""

    _lock = threading.Lock()
    _users = 0
    _before = 0.0

    @classmethod
    def begin(cls) -> None:
        with cls._lock:
            if not cls._users:
                cls._before = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_S, cls._before))
            cls._users += 1

    @classmethod
    def end(cls) -> None:
        with cls._lock:
            cls._users -= 1
            if not cls._users:
                sys.setswitchinterval(cls._before)


_running: weakref.WeakSet[Background] = weakref.WeakSet()
_failed: set[Background] = set()
"""Those whose error may not have reached anybody."""


@atexit.register
def _stop_all() -> None:
    """A thread that runs while the interpreter is taken down may crash it."""
    for background in list(_running):
        background.stop()
    for background in _failed:
        background.complain()
