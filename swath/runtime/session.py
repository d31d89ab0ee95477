"""A worker's session: it does what messages ask for, one thing after the other.

NOTE [Two planes]: orders and questions come the same way, but wait in two queues. Whenever no order is being done,
questions come first: one is answered after the order that is being done, not after all that wait, and it never costs
one.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import NoReturn

from swath.errors import ChannelClosedError
from swath.runtime.carrier import (
    Answer,
    Failed,
    Link,
    Message,
    NotNowError,
    Order,
    Ordered,
    Packed,
    Question,
    Started,
    Stop,
    Subscribe,
    Task,
)
from swath.runtime.channel import pack
from swath.runtime.faults import Failure
from swath.runtime.interrupts import undisturbed


class Session:
    """A worker at work."""

    def __init__(self, task: Task, link: Link) -> None:
        self._link = link
        self.control: deque[Message] = deque()
        """What is to be seen to before the next order."""
        self._orders: deque[Order] = deque()
        try:
            self.job = task.begin(link)
            described = self.job.describe()
        except BaseException as error:
            self._fail(error, "being made")
        link.send(Started(described))

    def run(self) -> None:
        """Work until it is stopped, or nobody is there any more."""
        try:
            while self.step(wait=True):
                pass
        except ChannelClosedError:  # this process may live on; what the job holds must not
            with contextlib.suppress(Exception):
                self.job.stop()
            raise
        self.job.stop()

    def step(self, *, wait: bool) -> bool:
        """Do the next thing, if there is one or with `wait` when there is; whether more may come."""
        try:
            is_there = self._has_next(wait)
        except Exception as error:  # what the parent can import, a worker may not
            self._fail(error, "reading a message")
        if is_there and self.control:
            return self._see_to(self.control[0])
        if self._orders:  # a signal handler may just have discarded them
            self._work(self._orders.popleft())
        return True

    def _see_to(self, message: Message, within_work: bool = False) -> bool:
        """See to what is no order; whether more may come.

        If that is interrupted it stays to be seen to: others wait for it, unless it is the asker who was interrupted;
        or work was discarded for it.
        """
        try:
            if message not in self.control:  # who has come in between has seen to it
                return True
            if within_work and isinstance(message, Question) and message.discards_work:
                return True  # it waits for the end of what it discards
            self.control.remove(message)
            match message:
                case Stop():
                    return False
                case Question():
                    self._answer(message)
                case Subscribe(topic=topic, snapshots=snapshots):
                    self.job.subscribe(topic, snapshots)
        except BaseException as error:
            is_interrupt = not isinstance(error, Exception) and message not in self.control
            is_vain = (
                isinstance(message, Question) and message.asker == threading.get_ident() and not message.discards_work
            )
            if is_interrupt and not is_vain:
                self.control.appendleft(message)
            raise
        return True

    def answer_questions(self, within_work: bool = False) -> None:
        """See to all questions that have come, and to no order; some have to wait if this is within one."""
        self.has_questions()
        for message in list(self.control):
            self._see_to(message, within_work)

    def _has_next(self, wait: bool) -> bool:
        while not self.has_questions() and not self._orders:
            if not wait:
                return False
            self.job.idle()
            self._take_in(wait=True)
        return True

    def has_questions(self) -> bool:
        """Whether something is to be seen to before the next order."""
        if self._link.has_news():
            self._take_in(wait=False)
        return bool(self.control)

    def _take_in(self, wait: bool) -> None:
        with undisturbed if self._link.is_local else contextlib.nullcontext():
            for message in self._link.receive(wait=wait):
                if isinstance(message, Order):
                    self._orders.append(message)
                else:
                    if isinstance(message, Question) and message.discards_work:
                        self._orders.clear()  # those that were sent before it: one that comes later is meant
                    self.control.append(message)

    def _work(self, order: Order) -> None:
        self._link.finish(order, self.perform(order))

    def perform(self, order: Ordered) -> object:
        """Do an order; its receipt."""
        try:
            return self.job.work(order, self.has_questions)
        except BaseException as error:
            self._fail(error, "collecting")

    def _answer(self, question: Question) -> None:
        is_local = self._link.is_local
        try:
            value = self.job.answer(question.request)
            if not is_local:
                value = Packed(pack(value, by_value=True)[0])
        except NotNowError as error:
            if question.asker != threading.get_ident():
                self.control.append(question)  # it is answered when the order is done
            else:  # a signal handler, for whose end that waits
                self._link.send(Answer(question.number, failure=error))
        except Exception as error:
            self._link.send(Answer(question.number, failure=error if is_local else Failure.of(error)))
        else:
            self._link.send(Answer(question.number, value))

    def _fail(self, error: BaseException, doing: str) -> NoReturn:
        if self._link.is_local or isinstance(error, ChannelClosedError):
            raise error
        self._link.send(Failed(Failure.of(error), doing))
        raise SystemExit(1) from error
