"""Pool: the workers of one carrier under supervision.

Everything that comes from any worker is attended to in one place, whatever is being waited for: finished work, answers,
warnings, errors and deaths. A failure is raised, or mended as the supervision says (`swath.runtime.recovery`): then the
caller goes on waiting, for a new worker that does the same work.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Generic

from swath.errors import ClosedError, StallWarning, WorkerDiedError
from swath.runtime.carrier import (
    Answer,
    Carrier,
    Ended,
    Failed,
    Finished,
    News,
    NotNowError,
    Order,
    Question,
    Started,
    Warned,
)
from swath.runtime.interrupts import Section, undisturbed
from swath.runtime.local import LocalCarrier
from swath.runtime.recovery import Recovery
from swath.runtime.supervision import Owner, Supervision, WorkerClocks
from swath.runtime.turns import Turns
from swath.runtime.work import W

LOOK_S = 1.0
"""How often a thread that waits looks for workers that have stalled."""


class Pool(Generic[W]):
    """Gives out work, asks questions, and watches over the workers that do it.

    May be used by several threads: one of them attends at a time, and the others see what has come of it.
    """

    def __init__(
        self,
        carrier: Carrier,
        workers: int,
        owner: Owner,
        supervision: Supervision,
        name: str,
        *,
        doing: Callable[[int], str] | None = None,
        is_busy: Callable[[int], bool] | None = None,
        pulse: Callable[[int], int] | None = None,
    ) -> None:
        """Begin without workers.

        There are to be so many, which `carrier` starts for what `owner` says; `name` is the owner's, for messages.
        Where workers have more to do than work of the pool, `doing` tells what one does, in words, `is_busy` whether it
        should make progress, and `pulse` gives a number that changes as long as it does.
        """
        self.carrier = carrier
        self.name = name
        self.started: dict[int, object] = {}
        """What each worker has said of itself when it was ready."""
        self.finished: deque[W] = deque()
        """Finished work that nobody has taken, in the order in which it was finished."""
        self.last_receipt: dict[int, object] = {}
        """Of each worker that has given one."""
        self.unclaimed: deque[tuple[int, object]] = deque()
        """Workers, and their receipts of work that was forgotten meanwhile."""
        self.failure: BaseException | None = None
        self.restarts, self.is_closed = 0, False
        self.supervision = supervision
        self.last_ticket = dict.fromkeys(range(workers), 0)
        """Of the last work that each worker was given."""
        self._size, self._owner = workers, owner
        self._doing, self._heartbeat, self._is_busy = doing, pulse or carrier.heartbeat, is_busy or (lambda _: False)
        self.recovery, self._clocks = Recovery(owner), WorkerClocks()
        self._dropped: set[int] = set()
        self._starter = 0  # the thread that is just starting a worker
        self._joining: dict[int, BaseException | None] = {}
        """Workers that were added later and are not ready yet, and what has kept them from it."""
        self._outstanding: dict[int, deque[W]] = {index: deque() for index in range(workers)}
        self._asked: dict[int, tuple[int, Question]] = {}
        self._answers: dict[int, Answer] = {}
        self.discarding: dict[int, int] = {}
        """The last question to each worker that has discarded work, until it tells by its answer what it did of it."""
        self._numbers = itertools.count(1)
        self._stalled: set[int] = set()
        self._killed: dict[int, str] = {}
        """Why a worker was killed by us."""
        self._inbox: deque[tuple[int, News]] = deque()
        self.section = Section()  # in which all that is known of work and questions changes; see NOTE [Moments]
        self._here = carrier if isinstance(carrier, LocalCarrier) and carrier.is_local else None
        """Lets workers work in this thread: nothing is sent then, and an interrupt ends the work that it comes to."""
        # A worker elsewhere may have to be waited for in a section: until it reads what it is sent.
        self._turns = Turns(None if self._here is None else self.section.lock)

    # -- starting and stopping ---------------------------------------------------------------------------------

    @property
    def indices(self) -> list[int]:
        """Of all workers that there are."""
        return list(self.carrier.workers)

    def start(self) -> None:
        """Start all workers, and wait until each is ready."""
        for index in range(self._size):
            self.start_worker(index, replaces=False)
        while len(self.started) < len(self.carrier.workers):
            self.attend(LOOK_S)

    def add(self, count: int, accept: Callable[[int], None] = lambda index: None) -> list[int]:
        """Start more workers, wait until each is ready, and `accept` it; their indices.

        If one cannot be started, or is not accepted, none is added and the error is raised. Nobody else is concerned.
        """
        indices = list(range(self._size, self._size + count))
        self._size += count
        self._dropped.difference_update(indices)
        self._joining = dict.fromkeys(indices)
        try:
            for index in indices:
                self.last_ticket[index], self._outstanding[index] = 0, deque()
                self.start_worker(index, replaces=False)
                self._owner.restarted(index)
            while any(index not in self.started for index in indices):
                for error in self._joining.values():
                    if error is not None:
                        raise error
                self.attend(LOOK_S)
            for index in indices:
                accept(index)
        except BaseException:
            for index in indices:
                self.remove(index)
            self._size -= count
            raise
        finally:
            self._joining = {}
        return indices

    def remove(self, index: int) -> None:
        """Stop a worker, and go on without it; what it had under way is lost."""
        self.started.pop(index, None)
        self.recovery.planned.pop(index, None)
        self.carrier.stop(index)
        with self.section:
            self._dropped.add(index)
            for number in [number for number, asked in list(self._asked.items()) if asked[0] == index]:
                self._asked.pop(number, None)
            self.discarding.pop(index, None)
            self._forget_work(index)

    def _forget_work(self, index: int, on_purpose: bool = False) -> None:
        for work in self._outstanding[index]:
            work.is_over, work.is_lost, work.is_given_up = True, True, on_purpose
        self._outstanding[index] = deque()  # another thread may be looking at the former
        for work in [work for work in list(self.finished) if on_purpose and work.index == index]:
            if self.take(work):
                work.is_lost = work.is_given_up = True
                self.unclaimed.append((index, work.receipt))

    def take(self, work: W) -> bool:
        """Take finished work; whether nobody else has. From any thread."""
        try:
            self.finished.remove(work)
        except ValueError:
            return False
        return True

    def start_worker(self, index: int, replaces: bool) -> None:
        """Start one, in the place of another that has failed or of none; it says later that it is ready."""
        self.started.pop(index, None)
        self.last_receipt.pop(index, None)
        self._clocks.start(index)
        self._stalled.discard(index)
        self._killed.pop(index, None)
        self.discarding.pop(index, None)
        self._starter = threading.get_ident()
        try:
            self.carrier.start(index, self._owner.task(index, replaces))
        finally:
            self._starter = 0
        if self.is_closed:  # meanwhile, and nobody has seen the new one
            self.carrier.stop(index)

    def shutdown(self, timeout_s: float | None) -> None:
        """Stop all workers; see NOTE [Shutdown]."""
        self.is_closed = True
        for index in self.indices:
            self.carrier.interrupt(index)
        self.carrier.shutdown(timeout_s)

    # -- work --------------------------------------------------------------------------------------------------

    def issue(self, work: W) -> None:
        """Let a worker do `work`: from now on or, if it is a local one, when it is waited for."""
        is_sent = self._here is None
        with self.section if is_sent else self.section.lock:
            if work.index in self._dropped:  # just now, by another thread
                work.is_over = work.is_lost = True
                return
            work.ticket = self.last_ticket[work.index] = next(self._numbers)
            self._outstanding[work.index].append(work)
            if is_sent:
                self._clocks.expect(work.index)
                self._send(work.index, Order(work.ticket, work.request, work.place))

    def _send(self, index: int, message: Order | Question) -> None:
        if self.recovery.restarting.get(index, me := threading.get_ident()) == me:  # else who restarts it sends all
            self.carrier.send(index, message)

    def send_again(self, index: int) -> None:
        """Send a new worker all that its predecessor has not answered or finished; in the section."""
        for question in [question for asked, question in list(self._asked.values()) if asked == index]:
            self.carrier.send(index, question)
        for work in self._outstanding[index]:
            self.carrier.send(index, Order(work.ticket, work.request, work.place))

    def do(self, work: W) -> bool:
        """Have a worker of this process do `work` in this thread, here and now; whether that was done.

        The same as to issue it, to attend until it is over and to take it, but in one turn and a fifth of the steps:
        there may be a batch for each frame. Not so, and nothing has happened, where anything else is to be seen to
        first; nor if the work was forgotten while it was done.
        """
        here, turns, lock, index, is_done = self._here, self._turns, self.section.lock, work.index, False
        if here is None or here.has_mail or self._inbox or self.failure is not None or self.is_closed:
            return False
        with lock:  # which that of the turns is, here
            works, session = self._outstanding[index], here.sessions.get(index)
            if works or session is None or not turns.begin(sys._getframe(), threading.get_ident()):
                return False
            work.ticket = self.last_ticket[index] = next(self._numbers)
            works.append(work)
            here.is_at_work = True
        try:
            receipt, is_done = session.perform(work), True
        finally:
            with lock:
                here.is_at_work, work.is_over, works = False, True, self._outstanding[index]
                if is_wanted := bool(works) and works[0] is work:
                    works.popleft()
                if not is_done:
                    work.is_lost = True
                elif is_wanted:
                    work.receipt = self.last_receipt[index] = receipt
                else:
                    self.unclaimed.append((index, receipt))
                turns.end()
        return is_wanted

    def outstanding(self, index: int) -> int:
        """How many pieces of work the worker has not finished."""
        return len(self._outstanding[index])

    @property
    def under_way(self) -> list[W]:
        """All work that is not finished."""
        return [work for works in list(self._outstanding.values()) for work in list(works)]

    # -- questions ---------------------------------------------------------------------------------------------

    def ask(
        self, requests: Mapping[int, object], what: str, *, discards_work: bool = False, timeout_s: float = math.inf
    ) -> dict[int, object]:
        """What workers answer to their requests, by index; without those that were dropped meanwhile.

        All answers together may take `timeout_s`. `what` says in messages what is asked for; `discards_work` tells
        whether work that waits is forgotten before.
        """
        is_making = discards_work and self.carrier.is_local and self._turns.is_mine  # perhaps what would be discarded
        if is_making or self._starter == threading.get_ident():
            raise NotNowError(f"this very thread makes a batch of {self.name}, or starts a worker")
        asked: dict[int, int] = {}
        deadline = time.monotonic() + timeout_s
        try:
            with self.section:  # all at once: what others issue is done before it by every worker, or after it
                for index in [index for index in requests if index not in self._dropped]:
                    question = Question(next(self._numbers), requests[index], discards_work, threading.get_ident())
                    if discards_work:
                        self._forget_work(index, on_purpose=True)
                        self.discarding[index] = question.number
                    asked[question.number] = index
                    self._asked[question.number] = (index, question)
                    self._clocks.expect(index)
                    self._send(index, question)
            while late := [index for number, index in asked.items() if number in self._asked]:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"Workers {late} of {self.name} have not answered in time: {what}.")
                self.attend(LOOK_S, works=False)
            # A worker that was dropped has not answered.
            answers = {index: self._answers[number] for number, index in asked.items() if number in self._answers}
        finally:  # also if it was interrupted: nobody will ask for these answers again
            for number in asked:
                self._asked.pop(number, None)
                self._answers.pop(number, None)
        return {index: answer.get(f"Raised in worker {index} by {what}.") for index, answer in answers.items()}

    # -- attending ---------------------------------------------------------------------------------------------

    def attend(self, timeout_s: float, *, works: bool = True) -> None:
        """Wait for news of workers, and see to them; raises what cannot be mended. Only if it `works` do local ones."""
        if self.failure is not None:
            raise self.failure
        self._turns.take(partial(self._attend, timeout_s, works), timeout_s)

    def _attend(self, timeout_s: float, works: bool, is_first: bool) -> None:
        if self.is_closed:
            raise ClosedError(f"{self.name} was shut down while it was waited for.")
        if self._here is not None:
            if self._here.has_mail or self._inbox:  # questions come first
                self._here.wait(0.0)
                self._take_in()
            if is_first and works:  # otherwise it would begin its next work within the one that it is at
                self._here.let_work(self._outstanding, self.section.lock, self.finish)
            return
        if self._inbox or self._clocks.wait(self.carrier.wait, self.recovery.patience_s(timeout_s)):
            self._take_in()
        self.recovery.replace_failed(self)
        self._look_for_stalls()

    def _take_in(self) -> None:
        """See to all news. If that raises, as warnings may, what is left waits for the next call."""
        self._hear()
        while self._inbox:
            with undisturbed:  # but others may go on: this may take longer
                if self._inbox:
                    self._see_to(*self._inbox.popleft())
            self._hear()

    def _hear(self) -> None:
        with self.section:
            self._inbox.extend(self.carrier.receive())
            while self._inbox and isinstance(self._inbox[0][1], Started | Finished | Answer):
                self._see_to(*self._inbox.popleft())

    def _see_to(self, index: int, news: News) -> None:
        if index in self.carrier.workers:
            match news:
                case Finished():
                    self.finish(index, news.ticket, news.receipt)
                case Answer():
                    if self.discarding.get(index) == news.number:
                        del self.discarding[index]
                    if news.number in self._asked:
                        # First: who has asked, perhaps in another thread, looks for it when it is asked for no more.
                        self._answers[news.number] = news
                        if self._asked.pop(news.number, None) is None:  # it was given up at this moment
                            self._answers.pop(news.number, None)
                case Started():
                    self.started[index] = news.description
                    self._clocks.expect(index)
                case Warned():
                    warnings.warn_explicit(f"Worker {index}: {news.text}", news.category, "swath", index)
                case Failed():
                    self._forget_news(index)
                    place = f"Raised in worker {index} (pid {self.carrier.pid(index)}) of {self.name}"
                    self.fail(index, news.failure.error(f"{place} while {news.doing}."))
                case Ended():
                    self._forget_news(index)
                    pid, cause = self.carrier.pid(index), self._killed.pop(index, "") or news.cause
                    self.fail(index, WorkerDiedError("Worker", index, pid, news.exitcode, self._activity(index), cause))

    def _forget_news(self, index: int) -> None:
        """Nothing more is to be had of a worker that has ended; another may replace it."""
        self._inbox = deque(pair for pair in self._inbox if pair[0] != index)

    def _activity(self, index: int) -> str:
        if self._doing is not None:
            return self._doing(index)
        if index not in self.started:
            return "it was being made"
        return "it was collecting" if self._outstanding[index] else "it had nothing to do"

    def finish(self, index: int, ticket: int, receipt: object) -> None:
        """Work is done, as its worker has said, or as its owner knows."""
        self.last_receipt[index] = receipt
        works = self._outstanding[index]
        if works and works[0].ticket == ticket:  # otherwise it was forgotten meanwhile
            work = works.popleft()
            work.receipt, work.is_over = receipt, True
            self.finished.append(work)
        else:
            self.unclaimed.append((index, receipt))

    def expect_progress(self, indices: Iterable[int]) -> None:
        """From now on, these workers are expected to move."""
        for index in indices:
            self._clocks.expect(index)

    def _look_for_stalls(self) -> None:
        clocks, supervision = self._clocks, self.supervision
        limit, start_s = supervision.stall_timeout_s, supervision.start_timeout_s
        clocks.look()
        asked = {index for index, _ in list(self._asked.values())}
        for index in [index for index in self.indices if index not in self.recovery.planned]:
            is_ready = index in self.started
            is_busy = bool(self._outstanding[index]) or index in asked or not is_ready or self._is_busy(index)
            still_s = clocks.still_s(index, self._heartbeat(index), is_busy)
            if not still_s:
                self._stalled.discard(index)
            elif still_s > supervision.stall_warning_s and index not in self._stalled:
                self._stalled.add(index)
                self._warn_of_stall(index, still_s)
            if is_ready and limit is not None and still_s > limit and index not in self._killed:
                self._killed[index] = f"It had made no step for stall_timeout_s={limit:g} seconds."
                self.carrier.kill(index)  # its end will be seen to as any other
            if not is_ready and clocks.starting_s(index) > start_s:
                late = f"Worker {index} of {self.name} has not made its env and policy within start_timeout_s="
                self.fail(index, TimeoutError(f"{late}{start_s:.0f} s."))

    def _warn_of_stall(self, index: int, seconds: float) -> None:
        waiting = "a step or a call takes long" if index in self.started else "it is making its env and policy"
        state = waiting if self._doing is None else self._doing(index)
        state = "it is stopped (SIGSTOP or a debugger)" if self.carrier.is_stopped(index) else state
        who = f"Worker {index} (pid {self.carrier.pid(index)}) of {self.name}"
        warnings.warn(self.supervision.stall_text(who, seconds, state), StallWarning, stacklevel=4)

    def fail(self, index: int, error: BaseException) -> None:
        """A worker is of no use any more: raise `error`, or mend what it has broken."""
        if index in self._joining:  # whoever adds it raises that
            self._joining[index] = error
            self.remove(index)
        elif index not in self.recovery.planned:
            self.recovery.begin(self, index, error, self._clocks.has_moved(index, self._heartbeat(index)))
