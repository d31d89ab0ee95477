"""FreeRunning: a delivery that goes on by itself, in a thread, into a replay buffer.

NOTE [Collecting in a thread]: the thread asks another delivery for one batch after another. Where the engine is in this
process, the thread is what runs it; where workers run elsewhere, it only waits for them, counts, and deals with their
failures. To rest means that nothing is being collected: all workers are interrupted, what they hold is written, so that
nothing is lost, and the thread waits. A caller who wants something of an engine in this process meanwhile (its state, a
reset) lets it rest first. New weights need no rest: they are copied when they are published, and adopted between two
batches. The thread holds the collector only weakly: one that is no longer used is freed, and its thread ends.

Threads share Python's interpreter, which by default is handed over every 5 ms only. A trainer gives it away in each
torch operation of some length, and would wait for as long to get it back; so it is handed over more often while a
collector runs in the background.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType

from swath.collectors.delivery import Delivery, Part
from swath.errors import annotate
from swath.runtime.interrupts import undisturbed
from swath.runtime.supervision import Patience

REST_S = 60.0
"""How long a step may take while a caller waits for the collector to rest."""
STOP_S, EXIT_S = 5.0, 1.0
"""How long a thread may take to end, and how long all may at the end of the program."""
ATTEND_S = 0.05
"""How often workers are attended to while they rest."""
SWITCH_S = 0.0001
"""How long a thread may keep the interpreter while a collector runs in the background."""


class FreeRunning:
    """Runs a delivery again and again in a thread, until there is no more, or it is stopped."""

    def __init__(
        self,
        delivery: Delivery,
        name: str,
        finish: Callable[[], object],
        begin: Callable[[], None],
        take: Callable[[list[Part]], None] | None = None,
    ) -> None:
        """Make ready; in the thread `begin` is called for every batch, `take` when it is there, `finish` at the end."""
        self._delivery, self._finish, self._begin, self._take = delivery, finish, begin, take
        self._name = name
        self._turn = threading.Condition()
        self._resters: list[int] = []
        """The threads that want the collector to rest."""
        self._is_resting = False
        self._is_stopping = False
        self.is_finished = False
        """Whether all frames are collected."""
        self.error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self.is_reported = False
        """Whether the error has reached the user."""
        self._thread = threading.Thread(target=self._run, name=f"swath-{name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        _Switching.begin()
        _running.add(self)
        self._thread.start()

    # -- the thread's side -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._may_go_on():
                self._begin()
                parts = self._delivery.next(in_bulk=True)
                if parts is None:
                    self._finish()
                    self.is_finished = True
                    return
                if self._take is not None:
                    self._take(parts)
                del parts  # its claims to slots
        except BaseException as error:
            if not (self._is_stopping and self._delivery.pool.is_closed):
                annotate(error, f"Raised while {self._name} collected in the background.")
                self.error, self._traceback = error, error.__traceback__
                _failed.add(self)
        finally:
            _running.discard(self)
            _Switching.end()
            with self._turn:
                self._turn.notify_all()

    def _may_go_on(self) -> bool:
        """Rest for as long as a caller wants it; whether to go on then."""
        is_settled = False
        while True:
            with self._turn:
                if not self._resters or self._is_stopping:
                    self._is_resting = False
                    return not self._is_stopping
                if is_settled:
                    self._rest()
            if not is_settled:  # whoever wants it from now on finds nothing under way
                self._delivery.settle()
                is_settled = True

    def _rest(self) -> None:
        """While the lock is held, which is let go meanwhile."""
        if not self._is_resting:  # what the caller asks for is not cut short
            for index in self._delivery.pool.indices:
                self._delivery.pool.carrier.resume(index)
        self._is_resting = True
        self._turn.notify_all()
        self._turn.wait(1.0 if self._delivery.pool.carrier.is_local else ATTEND_S)
        self._attend_at_rest()

    def _attend_at_rest(self) -> None:
        """Workers elsewhere may die while they rest. The lock is let go meanwhile, so that others can rest or leave."""
        pool = self._delivery.pool
        if not pool.carrier.is_local:
            self._turn.release()
            try:
                pool.attend(0.0)
            finally:
                self._turn.acquire()

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
    def is_busy(self) -> bool:
        """Whether it collects beside the caller: the thread lives, is another, and does not rest for the caller."""
        rests_for_caller = self._is_resting and threading.get_ident() in self._resters
        return self.is_alive and not self.is_here and not rests_for_caller

    def is_wanted(self) -> bool:
        """Whether a caller wants it to rest or to stop: asked while the replay buffer makes it wait."""
        return bool(self._resters) or self._is_stopping

    @contextlib.contextmanager
    def resting(self, timeout_s: float = REST_S) -> Iterator[None]:
        """A context in which the collector rests."""
        if self.is_here:  # a hook of the collector itself
            yield
            return
        caller = threading.get_ident()
        before = self._resters.count(caller)
        try:
            self._resters.append(caller)
            self._await_rest(timeout_s)
            yield
        finally:
            with undisturbed, self._turn:
                while self._resters.count(caller) > before:  # also what an interrupt has left
                    self._resters.remove(caller)
                self._turn.notify_all()

    def _await_rest(self, timeout_s: float) -> None:
        patience = Patience()
        while True:
            with undisturbed, self._turn:  # an interrupt within would leave it locked: one comes after each wait
                if self._is_resting or not self._thread.is_alive():
                    return
                self._interrupt()  # again, as a worker that has just been started was not there before
                self._turn.wait(0.05)
            if patience.waited_s() > timeout_s:
                raise TimeoutError(
                    f"{self._name} has not come to rest within {timeout_s:.0f} s: a step of its env or policy, a "
                    "hook, or a write takes that long, or a worker is stopped."
                )

    def _interrupt(self) -> None:
        for index in self._delivery.pool.indices:
            self._delivery.pool.carrier.interrupt(index)

    def ask_to_stop(self) -> None:
        """Let the thread end after its current step."""
        with undisturbed, self._turn:
            self._is_stopping = True
            self._turn.notify_all()
        self._interrupt()

    def stop(self, timeout_s: float | None = None) -> bool:
        """The same, and wait for it; whether it has ended in time."""
        self.ask_to_stop()
        if self.is_here or not self._thread.ident:
            return True
        self._thread.join(STOP_S if timeout_s is None else timeout_s)
        if self._thread.is_alive():
            _running.discard(self)  # at the end of the program it is not waited for again
            warnings.warn(
                f"{self._name} did not end in time: a step of its env or policy still runs, and its thread is left "
                "behind.",
                stacklevel=2,
            )
        return not self._thread.is_alive()

    def raise_failure(self) -> None:
        """Raise what went wrong in the thread, if something did."""
        if self.error is not None:
            self.mark_reported()
            if not self.is_here:  # the error tells the caller that the thread has ended
                self._thread.join(STOP_S)
            raise self.error.with_traceback(self._traceback)  # which would grow with each raise

    def mark_reported(self) -> None:
        """The error has reached the user."""
        self.is_reported = True
        _failed.discard(self)

    def complain(self) -> None:
        """Warn of an error that was never raised."""
        if self.error is not None and not self.is_reported:
            self.mark_reported()
            text = "".join(traceback.format_exception(self.error)).rstrip()
            warnings.warn(f"{self._name} had ended with an error that nobody has asked for:\n{text}", stacklevel=2)


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

    @classmethod
    def begin_in_child(cls) -> None:
        """A forked child has none of the threads, of which one may have held the lock."""
        if cls._users:
            sys.setswitchinterval(cls._before)
        cls._lock, cls._users = threading.Lock(), 0


os.register_at_fork(after_in_child=_Switching.begin_in_child)


_running: weakref.WeakSet[FreeRunning] = weakref.WeakSet()
_failed: set[FreeRunning] = set()
"""Those whose error may not have reached anybody."""


@atexit.register
def _stop_all() -> None:
    """A thread that runs while the interpreter is taken down may crash it."""
    deadline = time.monotonic() + EXIT_S
    for running in list(_running):
        running.stop(max(0.0, deadline - time.monotonic()))
    for running in list(_failed):
        running.complain()
