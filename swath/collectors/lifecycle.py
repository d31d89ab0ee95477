"""Lifecycle: how a collector runs in the background, tells of failures, and ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

from swath.collectors.config import CommonConfig
from swath.collectors.control import Control
from swath.collectors.first_come import FirstCome
from swath.collectors.free_running import FreeRunning
from swath.collectors.pausing import Pause
from swath.collectors.worker import Call, EngineJob
from swath.data.ray_buffer import OwnBuffer
from swath.errors import ClosedError

Self = TypeVar("Self", bound="Lifecycle")
NOTICE_S = 1.0
"""How long a question after the background waits for a death to be dealt with."""
EXIT_S = 2.0
"""How long the workers of all collectors may take to close their envs when the interpreter exits."""


class Lifecycle(Control):
    """What begins with `start()` and ends with `shutdown()`, on its own or because all frames are collected."""

    def __init__(self, config: CommonConfig) -> None:
        """Keep the checked `config`; a subclass makes the rest and then calls `_open`."""
        super().__init__(config)
        self._stream: Iterator[Any] | None = None
        self._owner, self._is_fork = os.getpid(), False
        self._closing = threading.RLock()
        self._is_reported = False
        """Whether a failure has reached the user."""

    def _open(self) -> None:
        self.closed = False
        _open_collectors.add(self)

    # -- in the background -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Collect into the replay buffer in the background, until `total_frames` are collected or it is shut down.

        The policy that acts is a copy: what is trained meanwhile counts when `update_policy_weights_` publishes it.
        What goes wrong is raised by `sample()` of the buffer, `is_running()` and `async_shutdown()`.
        """
        if self.config.replay_buffer is None:
            raise RuntimeError(
                f"{type(self).__name__}.start() collects in the background into a replay buffer, but has none: iterate "
                "over the collector instead."
            )
        self._must_be_open()
        if self._free is not None:
            self._free.raise_failure()
            return
        self._iterating, self._stream = True, None
        before = self._delivery
        before.settle()  # what somebody has iterated over is in the buffer, and counts
        if self._pool.carrier.is_local:
            self._ask(Call(EngineJob.move_to_thread))
        slots = getattr(self.config, "slots_per_worker", 1)
        free = FirstCome(self._pool, before.terms, before.budget, slots_per_worker=slots)
        free.take_over(before)
        self._delivery, pool = free, self._pool
        self._roster.watch(pool, free)
        notice, sink = self._weights.notice_training, self._sink
        if sink is None:
            call = Call(EngineJob.finish_episodes)
            self._free = FreeRunning(free, repr(self), lambda: pool.ask(dict.fromkeys(pool.indices, call), ""), notice)
        else:
            self._free = FreeRunning(free, repr(self), sink.finish, notice, sink.take)
            sink.stopping = self._free.is_wanted
        if isinstance(self.config.replay_buffer, OwnBuffer):
            self.config.replay_buffer.attach(self)
        self._weights.free = self._free
        self._free.start()

    def pause(self) -> contextlib.AbstractContextManager[None]:
        """A context in which background collection rests: nothing is written, and everything may be asked of it."""
        if self._free is None:
            raise RuntimeError("pause() is for a collector that runs in the background: start() it first.")
        return Pause(self._at_rest)

    def is_running(self) -> bool:
        """Whether it collects in the background; raises what went wrong there."""
        if self._free is None or self.closed:
            self.raise_failure()
            return False
        self._notice_deaths()
        is_alive = self._free.is_alive  # first: a thread that has ended since then has left its error
        self.raise_failure()
        if not is_alive and self._free.is_finished:
            self._end()
        return is_alive

    def _notice_deaths(self) -> None:
        """Let the thread that attends to workers deal with those that have just died."""
        if self._free is None:
            return
        deadline, carrier = time.monotonic() + NOTICE_S, self._pool.carrier
        while self._free is not None and self._free.is_alive and time.monotonic() < deadline:
            missing = len(carrier.workers) - len(carrier.alive())
            if self._free.is_here or missing <= len(self._pool.recovery.planned):
                return
            time.sleep(0.005)

    def is_feeding(self) -> bool:
        """Whether more frames may come into the replay buffer. For the buffer; users ask `is_running`."""
        return self._free is not None and not self.closed and self._free.is_busy

    def raise_failure(self) -> None:
        """Raise what went wrong, if something did. The buffer asks too, whenever it is sampled."""
        if self._free is not None and self._free.error is not None:
            self._is_reported = True
            if not self._pool.carrier.is_local and not self._pool.is_closed:
                self._pool.shutdown(None)  # the buffer goes on to tell of the failure until the user shuts down
            self._free.raise_failure()
        if self._pool.failure is not None:
            self._is_reported = True
            if self._free is not None:
                self._free.mark_reported()
            raise self._pool.failure

    def _must_not_run(self) -> None:
        if self.is_feeding():
            raise RuntimeError(
                "This collector runs in the background: sample from its replay buffer, or use it inside `with "
                "collector.pause():`."
            )

    def _must_be_open(self) -> None:
        if os.getpid() != self._owner:
            raise ClosedError(f"This collector belongs to the process {self._owner}, of which this one is a fork.")
        if not self.closed:
            self._notice_deaths()
        self.raise_failure()
        if self.closed:
            raise ClosedError("This collector is shut down; make a new one.")

    # -- the end -----------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """All frames are collected: the workers are no longer needed."""
        self.raise_failure()
        if not self.closed:
            if self._sink is not None:
                self._sink.finish()
            elif self.config.replay_buffer is not None:
                self._ask(Call(EngineJob.finish_episodes))
            if not self._is_direct:
                with contextlib.suppress(Exception):  # of a worker that fails when it is no longer needed
                    self._last_state = self.state_dict()
            self.shutdown()

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Stop and free everything, within `timeout` seconds whatever the workers do; see NOTE [Shutdown].

        May be called again, and after any error. `close_env=False` leaves an env of this process open.
        """
        if not close_env and not self._is_direct:
            raise RuntimeError("The envs of workers end with them: shutdown(close_env=False) cannot be.")
        if os.getpid() != self._owner:  # a forked child, which has no part in its parent's workers
            self.closed = True
            return
        if raise_on_error and not self.closed:
            self._notice_deaths()
        with self._closing:  # another thread may be at it: then it is over when that one is done
            was_open, self.closed, self._stream = not self.closed, True, None
            try:
                self._shut_down(timeout, close_env, was_open)
            except Exception:
                if raise_on_error:
                    raise
            free = self._free
            if free is not None and not free.is_here:
                if isinstance(self.config.replay_buffer, OwnBuffer):
                    self.config.replay_buffer.detach(self)
                if self._is_reported:
                    free.mark_reported()
                elif raise_on_error and not free.is_reported:
                    self._is_reported = True
                    free.raise_failure()
                free.complain()

    def _shut_down(self, timeout: float | None, close_env: bool, was_open: bool) -> None:
        """Stop threads and workers; again, if something was left to do."""
        raise NotImplementedError

    _is_direct = False
    """Whether env and policy are objects of this process, which the user may hold when the collector is gone."""

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Shut down a collector that was started in the background; raises what went wrong there."""
        self.shutdown(timeout=timeout, close_env=close_env)
        if not self._is_reported:
            self.raise_failure()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse `copy`, `deepcopy` and `pickle`, which all begin here."""
        raise TypeError(
            f"{self!r} cannot be copied or pickled: its workers and memory are there once, and its copy would end "
            "them. Make another, and give it collector.state_dict() with load_state_dict()."
        )

    def __enter__(self: Self) -> Self:
        """Use the collector in a `with` block, at whose end it is shut down."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        """Shut down; nothing that goes wrong then hides the error that ended the block."""
        self.shutdown(raise_on_error=kind is None)

    def __del__(self) -> None:
        """Free what a forgotten `shutdown` left; at the interpreter's end, others see to it."""
        if not getattr(self, "closed", True) and not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.shutdown(close_env=not self._is_direct, raise_on_error=False)


_open_collectors: weakref.WeakSet[Lifecycle] = weakref.WeakSet()


def _begin_in_child() -> None:
    """Tell those of which this process has a copy by a fork: to ask for its number takes a while, in every batch."""
    for collector in list(_open_collectors):
        collector._is_fork = True


os.register_at_fork(after_in_child=_begin_in_child)


@atexit.register
def _shut_down_forgotten() -> None:
    """Before the interpreter is taken down: workers get the chance to close their envs."""
    deadline = time.monotonic() + EXIT_S
    for collector in list(_open_collectors):
        collector.shutdown(timeout=max(0.0, deadline - time.monotonic()), raise_on_error=False)
