"""Workers: a collector's worker processes, what each of them is doing, and what happens when one fails."""

from __future__ import annotations

import itertools
import math
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from swath.collectors.board import Board
from swath.collectors.local import LocalCrew
from swath.collectors.messages import (
    Answer,
    Call,
    Collect,
    Collected,
    Failed,
    Fill,
    GoOn,
    Ready,
    Rest,
    RunFree,
    Spent,
    Task,
)
from swath.collectors.multi_config import MultiConfig
from swath.collectors.shared_arena import SharedArena
from swath.collectors.worker import CollectorWorker
from swath.errors import ClosedError, annotate
from swath.rollout import Slot
from swath.runtime import Crew, Died, StallWarning
from swath.weights import TakeFrom

REST_S = 60.0
"""How long a step may take while somebody waits for workers to rest."""
LASTING = ("episodes", "idle_frames", "dropped_frames", "time/env", "time/policy", "time/bookkeeping")
"""Numbers of a worker that count on when another takes its place."""
LOOK_S = 1.0
"""How often somebody who waits looks for workers that have stalled."""


class WorkerRestartedWarning(UserWarning):
    """A worker has failed, and collection goes on: with a new one in its place, or without it."""


@dataclass(eq=False)
class Work:
    """A part of a batch that a worker collects: into a slot, or into the replay buffer if there is none."""

    index: int
    steps: int
    random: bool = False
    arena: SharedArena | None = None
    slot: Slot | None = None
    first_row: int = 0
    ticket: int = 0
    version: int = 0
    """Of the weights when it was given out: it is done with these or newer ones."""
    receipt: Collected | None = None
    is_lost: bool = False
    """Whether its worker was dropped before it was done."""
    ends: int | None = None
    """The number of a worker whose open episodes end with it, as they cannot be gone on with."""
    claim: object = None
    """Keeps the slot for this work until it is delivered or forgotten; see NOTE [Slot ownership]."""

    def __post_init__(self) -> None:
        """Claim the slot."""
        self.claim = None if self.slot is None else self.slot.claim()

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be waited for."""
        return self.is_lost or self.receipt is not None


class Workers:
    """Gives out work, asks questions, and watches over those who do it.

    Whatever is waited for, everything that comes from any worker is attended to meanwhile: finished work, answers,
    warnings, errors and deaths. A failure is raised, or mended as `on_worker_failure` says: then whoever waits goes on
    waiting, for a new worker that does the same work.
    """

    def __init__(
        self,
        config: MultiConfig,
        make_task: Callable[[], Callable[[int, bool], Task] | None],
        on_loss: Callable[[], Callable[[int], None] | None],
        name: str,
    ) -> None:
        """Begin without workers.

        Args:
            config: of the collector.
            make_task: a reference to what says what a worker is made for, by index and whether it replaces another.
            on_loss: a reference to what is told the index of a worker whose open episodes are lost.
            name: the collector's, for messages.
        """
        self.config = config
        self.name = name
        self.board = Board(config.workers)
        self.ready: dict[int, Ready] = {}
        self.done: deque[Work] = deque()
        """Finished work in the order in which it was finished."""
        self.lanes: dict[int, int] = {}
        """How many lanes each worker has."""
        self.restarts = 0
        self.lost_frames = 0
        """Frames of workers that have failed, which nobody has got."""
        self.past = dict.fromkeys(LASTING, 0.0)
        """What workers that have failed had counted."""
        self.discarded_frames = 0
        """Frames that were collected, and given up on purpose: because of a new seed, or another state."""
        self.failure: BaseException | None = None
        self._make_task, self._on_loss = make_task, on_loss
        self._crew: Any = _crew(config)
        self._restarted: dict[int, int] = {}
        self._outstanding: dict[int, deque[Work]] = {index: deque() for index in range(config.workers)}
        self._asked: dict[int, tuple[int, Call | Rest]] = {}
        self._answers: dict[int, Answer] = {}
        self.last_ticket = dict.fromkeys(range(config.workers), 0)
        """Of the last work that each worker was given."""
        self.answered_after: dict[int, int] = {}
        """The ticket of the last work that each worker had done when it last answered."""
        self._known: dict[int, set[int]] = {}
        self._numbers = itertools.count(1)
        self._pulse: dict[int, tuple[float, float]] = {}
        self._stalled: set[int] = set()
        self._given_up: dict[int, str] = {}
        """Why we have killed a worker ourselves, by its process id."""
        self.free: RunFree | None = None
        """What workers that run free were told."""
        self.spent: set[int] = set()
        """Those of them that have nothing more to collect."""
        self._resting = 0
        self.is_closed = False
        self._attending = threading.RLock()
        """One thread at a time attends; others need not."""

    # -- beginning and ending ----------------------------------------------------------------------------------

    def hire_all(self) -> None:
        """Start all workers, and wait until each has made its collector."""
        for index in range(self.config.workers):
            self._hire(index, replaces=False)
        deadline = time.monotonic() + self.config.start_timeout_s
        while len(self.ready) < len(self._crew):
            self.attend(LOOK_S)
            if time.monotonic() > deadline:
                late = [index for index in self._crew.processes if index not in self.ready]
                raise TimeoutError(
                    f"Workers {late} have not made their env and policy within start_timeout_s="
                    f"{self.config.start_timeout_s:.0f} s."
                )

    def _hire(self, index: int, replaces: bool) -> None:
        make_task = self._make_task()
        assert make_task is not None, "The collector is gone."
        task = make_task(index, replaces)
        self._known[index] = set()
        self._crew.hire(index, CollectorWorker(task))

    @property
    def indices(self) -> list[int]:
        """Of all workers that there are."""
        return list(self._crew.processes)

    @property
    def alive(self) -> int:
        """How many of them have not ended."""
        return len(self._crew.alive())

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [process.pid for process in self._crew.processes.values()]

    def shutdown(self, timeout_s: float | None) -> None:
        """End all workers; see NOTE [Shutdown]."""
        self.is_closed = True
        for index in self._crew.processes:
            self.board.stop(index)
        self._crew.shutdown(timeout_s)

    # -- work --------------------------------------------------------------------------------------------------

    def issue(self, work: Work) -> None:
        """Let a worker do `work`."""
        work.ticket = self.last_ticket[work.index] = next(self._numbers)
        self._outstanding[work.index].append(work)
        self._pulse.pop(work.index, None)  # from now on it is expected to move
        self._send_work(work)

    def _send_work(self, work: Work) -> None:
        if work.slot is None or work.arena is None:
            self._crew.send(work.index, Fill(work.ticket, work.steps))
            return
        number, known = work.arena.number(work.slot), self._known[work.index]
        memory = work.arena.memory(number, work.first_row, is_known=number in known)
        forget = tuple(known - work.arena.numbers) if len(known) > len(work.arena) else ()
        known -= set(forget)
        known.add(number)
        self._crew.send(work.index, Collect(work.ticket, memory, work.random, forget))

    def outstanding(self, index: int) -> int:
        """How many pieces of work the worker has not finished."""
        return len(self._outstanding[index])

    @property
    def under_way(self) -> list[Work]:
        """All work that is not finished."""
        return [work for works in self._outstanding.values() for work in works]

    @property
    def frames_under_way(self) -> int:
        """Steps that workers were told to make and have not made."""
        return sum(work.steps for works in self._outstanding.values() for work in works)

    def preempt(self, work: Work) -> None:
        """Let a worker stop where it is, if it still does `work`."""
        self.board.stop(work.index, work.ticket)

    # -- questions ---------------------------------------------------------------------------------------------

    def ask(
        self,
        path: str,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        workers: Iterable[int] | None = None,
        clears: bool = False,
    ) -> dict[int, Any]:
        """What workers answer to a call of `path`, by their index."""
        calls = {index: (tuple(args), kwargs or {}) for index in (self.indices if workers is None else workers)}
        return self.ask_each(path, calls, clears=clears)

    def ask_each(
        self, path: str, calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]], *, clears: bool = False
    ) -> dict[int, Any]:
        """The same, with arguments for each worker."""
        asked = {}
        for index, (args, kwargs) in calls.items():
            number = next(self._numbers)
            if clears:
                self._outstanding[index].clear()
            asked[number] = index
            self._put(index, Call(number, path, args, kwargs, clears))
        return self._answered(asked, path)

    def _put(self, index: int, question: Call | Rest) -> None:
        self._asked[question.number] = (index, question)
        self._pulse.pop(index, None)
        try:
            self._crew.send(index, question, by_value=True)
        except BaseException:
            del self._asked[question.number]  # nobody will answer
            raise

    def _answered(self, asked: dict[int, int], path: str, timeout_s: float = math.inf) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        failure: BaseException | None = None
        found = self._awaited(asked, time.monotonic() + timeout_s)
        for number, index in asked.items():
            answer = found.get(number)
            if answer is None:
                continue  # of a worker that was dropped
            if answer.failure is not None and failure is None:
                failure = answer.failure.error(f"Raised in worker {index} by {path!r}.")
            elif answer.packed is not None:
                answers[index] = cloudpickle.loads(answer.packed)
        if failure is not None:
            raise failure
        return answers

    def _awaited(self, asked: dict[int, int], deadline: float) -> dict[int, Answer | None]:
        try:
            while late := [index for number, index in asked.items() if number in self._asked]:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"Workers {late} of {self.name} have not come to rest in time: a step of their env or policy, "
                        "a hook, or a write takes too long, or they are stopped."
                    )
                self.attend(LOOK_S)
            return {number: self._answers.get(number) for number in asked}
        finally:  # also if it was interrupted: nobody will ask for these answers again
            for number in asked:
                self._asked.pop(number, None)
                self._answers.pop(number, None)

    # -- running free ------------------------------------------------------------------------------------------

    def run_free(self, orders: RunFree) -> None:
        """Let all workers collect on their own."""
        self.free = orders
        for index in self.indices:
            self._crew.send(index, orders)

    def rest(self) -> None:
        """Wait until no worker collects; they collect nothing until `go_on`."""
        self._resting += 1
        if self._resting > 1:
            return
        asked = {}
        for index in self.indices:
            number = next(self._numbers)
            asked[number] = index
            self.board.stop(index)
            self._put(index, Rest(number))
        self._answered(asked, "rest", REST_S)

    def go_on(self) -> None:
        """End a rest."""
        self._resting -= 1
        if self._resting:
            return
        for index in self.indices:
            self.board.go_on(index)
            self._crew.send(index, GoOn())

    def tell(self, index: int, news: TakeFrom) -> None:
        """Tell a worker of a store of weights."""
        self._crew.send(index, news)

    # -- attending ---------------------------------------------------------------------------------------------

    def attend(self, timeout_s: float) -> None:
        """Wait for something to come from workers, and see to it; raises what cannot be mended."""
        if self.failure is not None:
            raise self.failure
        if not self._attending.acquire(timeout=timeout_s):
            return  # another thread sees to it
        try:
            if self.is_closed:
                raise ClosedError(f"{self.name} was shut down while it was waited for.")
            news = deque(self._crew.wait(timeout_s))
            try:
                while news:
                    index, message = news.popleft()
                    if isinstance(message, Failed | Died):  # nothing more is to be had of it; another may replace it
                        news = deque(pair for pair in news if pair[0] != index)
                    if index in self._crew.processes:
                        self._see_to(index, message)
            finally:
                self._crew.unread(news)  # if something was raised, nothing is lost by it
            self._look_for_stalls()
        finally:
            self._attending.release()

    def _see_to(self, index: int, message: Any) -> None:
        match message:
            case Collected():
                self._finish(index, message)
            case Answer():
                self.answered_after[index] = message.ticket
                if self._asked.pop(message.number, None) is not None:
                    self._answers[message.number] = message
            case Ready():
                self.ready[index] = message
                self.lanes[index] = math.prod(message.batch_size)
            case Spent():
                self.spent.add(index)
            case Failed(failure=failure, doing=doing):
                pid = self._crew.processes[index].pid
                self._fail(index, failure.error(f"Raised in worker {index} (pid {pid}) of {self.name} while {doing}."))
            case Died():
                cause = self._given_up.pop(self._crew.processes[index].pid, "")
                self._fail(index, self._crew.death(index, message, self._doing(index), cause))
            case _:
                raise TypeError(f"Nobody knows what to do with {message!r} of worker {index}.")

    def _doing(self, index: int) -> str:
        if index not in self.ready:
            return "it was being made"
        return "it was collecting" if self._outstanding[index] or self.free is not None else "it had nothing to do"

    def _finish(self, index: int, receipt: Collected) -> None:
        works = self._outstanding[index]
        if works and works[0].ticket == receipt.ticket:  # otherwise it was forgotten meanwhile
            work = works.popleft()
            work.receipt = receipt
            self.done.append(work)
        else:
            self.discarded_frames += receipt.frames

    def _look_for_stalls(self) -> None:
        now, limit = time.monotonic(), self.config.stall_timeout_s
        for index, process in self._crew.processes.items():
            is_busy = bool(self._outstanding[index]) or (self.free is not None and index not in self.spent)
            is_busy = (is_busy and not self._resting) or any(owner == index for owner, _ in self._asked.values())
            is_busy = is_busy or index not in self.ready
            beats = self.board.beats(index)
            last, since = self._pulse.get(index, (-1.0, now))
            if not is_busy or beats != last:
                self._pulse[index] = (beats, now)
                self._stalled.discard(index)
            elif now - since > self.config.stall_warning_s and index not in self._stalled:
                self._stalled.add(index)
                state = "a step or a call takes long" if index in self.ready else "it is making its env and policy"
                state = "it is stopped (SIGSTOP or a debugger)" if process.is_stopped else state
                outlook = "Waiting goes on" if limit is None else f"It is killed after stall_timeout_s={limit:g}"
                warnings.warn(
                    f"Worker {index} (pid {process.pid}) of {self.name} has made no step for {now - since:.0f} s: "
                    f"{state}. {outlook}; stall_warning_s={self.config.stall_warning_s:g} says when to warn.",
                    StallWarning,
                    stacklevel=4,
                )
            if is_busy and limit is not None and now - self._pulse.get(index, (beats, now))[1] > limit:
                process.signal(signal.SIGKILL)  # its end will be seen to as any other
                self._given_up[process.pid] = f"It had made no step for stall_timeout_s={limit:g} seconds."

    # -- failures ----------------------------------------------------------------------------------------------

    def _fail(self, index: int, error: BaseException) -> None:
        """Raise `error`, or mend what it has broken."""
        policy, made = self.config.on_worker_failure, self._restarted.get(index, 0)
        was_ready = self.ready.pop(index, None) is not None or made > 0
        is_hopeless = policy == "restart" and made >= self.config.max_restarts
        if policy == "raise" or not was_ready or is_hopeless or not isinstance(error, Exception):
            if is_hopeless and made:
                annotate(error, f"It was restarted {made} times before: max_restarts={self.config.max_restarts}.")
            self.failure = error
            raise error
        self._count_loss(index)
        if policy == "drop":
            self._drop(index, error)
        else:
            self._restart(index, error)

    def _count_loss(self, index: int) -> None:
        lanes, row = self.lanes.get(index, 1), self.board.row(index)
        self.lost_frames += lanes * self.board.unreported_steps(index) + int(row["pending_frames"])
        for name in self.past:
            self.past[name] += row[name]
        if self.free is not None:
            self.free.budget.settle(index, 0)
        self.board.clear(index)
        if (on_loss := self._on_loss()) is not None:
            on_loss(index)

    def _restart(self, index: int, error: BaseException) -> None:
        self._restarted[index] = self._restarted.get(index, 0) + 1
        self.restarts += 1
        self.spent.discard(index)
        self._hire(index, replaces=True)
        for owner, question in list(self._asked.values()):
            if owner == index:
                self._crew.send(index, question, by_value=True)
        if self._resting:
            self._crew.send(index, Rest(0))
        if self.free is not None:
            self._crew.send(index, self.free)
        for work in self._outstanding[index]:
            self._send_work(work)
        told = f"Worker {index} of {self.name} is restarted ({self._restarted[index]} of {self.config.max_restarts})"
        warnings.warn(f"{told}: {_summary(error)}", WorkerRestartedWarning, stacklevel=5)

    def _drop(self, index: int, error: BaseException) -> None:
        if len(self._crew) == 1:
            annotate(error, "No worker is left.")
            self.failure = error
            raise error
        self._crew.dismiss(index)
        if self.free is not None:  # there is more to collect for those who had nothing left
            self.spent.clear()
            for other in self.indices:
                self._crew.send(other, self.free)
        self._asked = {number: asked for number, asked in self._asked.items() if asked[0] != index}
        for work in self._outstanding[index]:
            work.is_lost = True
        self._outstanding[index].clear()
        self.spent.discard(index)
        told = f"Worker {index} of {self.name} is dropped, {len(self._crew)} are left"
        warnings.warn(f"{told}: {_summary(error)}", WorkerRestartedWarning, stacklevel=5)


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _crew(config: MultiConfig) -> Any:
    if config.debug:
        return LocalCrew()
    import swath

    return Crew(
        method=config.mp_start_method or "forkserver",
        threads=config.num_sub_threads,
        warns=not swath.filter_warnings_subprocess,
    )
