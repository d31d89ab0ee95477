"""A lock between processes whose holder may die."""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref

from swath.runtime.interrupts import OWN_FILES, undisturbed
from swath.runtime.memory import Block

PATIENCE_S = 120.0
"""Longer than a large buffer takes to be saved, during which its lock is held."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 2e-3
LOOK_S = 0.1
"""How often a thread that waits for another looks whether it was interrupted."""
OWN_FILES.add(__file__)


class ProcessLock:
    """Held by one thread of one process at a time, which may take it again; the system takes it back from the dead.

    NOTE [Locks that outlive nobody]: the lock is the `flock` of an open file description, which ends with the process
    that opened it, at whatever instruction it was killed. Semaphores and condition variables do not: whoever is killed
    with one locks out all others for ever. The price is that waiting means asking again: `flock` knows no deadline, and
    a holder that is stopped (not dead) must end in an error, not in a hang. It is held for microseconds.

    Whoever has it is undisturbed (NOTE [Moments]): an interrupt can neither come between taking and noting it, nor
    between the end of a `with` block and giving it back. Waiting for it can be interrupted.
    """

    def __init__(self, block: Block) -> None:
        """Lock `block`: all processes that have it share the lock."""
        self._block = block
        self._begin()
        _locks.add(self)

    def _begin(self) -> None:
        # A description of our own: one that is inherited by a child would be held by both, and survive either.
        self._fd = os.open(f"/proc/self/fd/{self._block.fd}", os.O_RDWR | os.O_CLOEXEC)
        self._owner = os.getpid()
        self._threads = threading.RLock()
        self._depth = 0

    def acquire(self, timeout_s: float = PATIENCE_S) -> None:
        """Take the lock, or raise TimeoutError."""
        if os.getpid() != self._owner:  # we are a forked child
            os.close(self._fd)
            self._begin()
        deadline = time.monotonic() + timeout_s
        undisturbed.__enter__()
        try:
            self._await_threads(deadline, timeout_s)
            try:
                if not self._depth:  # otherwise this thread has it already
                    self._await_processes(deadline)
            except BaseException:
                self._threads.release()
                raise
        except BaseException:  # also an interrupt
            undisturbed.__exit__()
            raise
        if time.monotonic() > deadline - timeout_s + LOOK_S:  # it was waited for
            undisturbed.renew()
        self._depth += 1

    def _await_threads(self, deadline: float, timeout_s: float) -> None:
        while not self._threads.acquire(timeout=max(0.0, min(LOOK_S, deadline - time.monotonic()))):
            if time.monotonic() > deadline:
                raise TimeoutError(f"Another thread of this process has held a shared lock for {timeout_s:.0f} s.")
            undisturbed.breathe()

    def _await_processes(self, deadline: float) -> None:
        pause = FIRST_PAUSE_S
        while True:
            try:
                return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        "Another process has held a shared lock for too long: it is stopped, or the machine is "
                        "overloaded."
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            undisturbed.breathe()

    def _is_owned(self) -> bool:
        """Whether this very thread has it: by the name that other locks have for it."""
        return bool(self._threads._is_owned())  # type: ignore[attr-defined]

    def release(self) -> None:
        """Give the lock back."""
        self._depth -= 1
        if not self._depth:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._threads.release()
        undisturbed.__exit__()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __reduce__(self) -> tuple[type[ProcessLock], tuple[Block]]:
        return ProcessLock, (self._block,)

    def __del__(self) -> None:
        if getattr(self, "_owner", None) == os.getpid():
            os.close(self._fd)


_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def _begin_in_child() -> None:
    """After a fork: a child that keeps its parent's description would keep what the parent has locked when it dies."""
    for lock in list(_locks):
        os.close(lock._fd)
        lock._begin()


os.register_at_fork(after_in_child=_begin_in_child)
