"""A worker's session: it does what messages ask for, one thing after the other.

NOTE [Two planes]: orders and questions come the same way, but wait in two queues. Whenever no order is being done,
questions come first: one is answered after the order that is being done, not after all that wait, and it never costs
one.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import NoReturn

from swath.errors import ChannelClosedError
from swath.runtime.carrier import Answer, Failed, Link, Message, Order, Packed, Question, Started, Stop, Subscribe, Task
from swath.runtime.channel import pack
from swath.runtime.faults import Failure
from swath.runtime.interrupts import undisturbed


class Session:
    """A worker at work."""

    def __init__(self, task: Task, link: Link) -> None:
        self._link = link
        self._control: deque[Message] = deque()
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
            message = self._next(wait)
        except Exception as error:  # what the parent can import, a worker may not
            self._fail(error, "reading a message")
        return message is None or self._do(message)

    def _do(self, message: Message) -> bool:
        """See to a message; whether more may come."""
        match message:
            case Stop():
                return False
            case Order():
                self._work(message)
            case Question():
                self._answer(message)
            case Subscribe(topic=topic, snapshots=snapshots):
                self.job.subscribe(topic, snapshots)
        return True

    def answer_questions(self) -> None:
        """See to all questions that have come, and to no order: an order may be under way."""
        while self.has_questions():
            self._do(self._control.popleft())

    def _next(self, wait: bool) -> Message | None:
        while not self.has_questions() and not self._orders:
            if not wait:
                return None
            self.job.idle()
            self._take_in(wait=True)
        return self._control.popleft() if self._control else self._orders.popleft()

    def has_questions(self) -> bool:
        """Whether something is to be seen to before the next order."""
        if self._link.has_news():
            self._take_in(wait=False)
        return bool(self._control)

    def _take_in(self, wait: bool) -> None:
        with undisturbed if self._link.is_local else contextlib.nullcontext():
            for message in self._link.receive(wait=wait):
                if isinstance(message, Order):
                    self._orders.append(message)
                else:
                    if isinstance(message, Question) and message.discards_work:
                        self._orders.clear()  # those that were sent before it: one that comes later is meant
                    self._control.append(message)

    def _work(self, order: Order) -> None:
        self._link.finish(order, self.perform(order))

    def perform(self, order: Order) -> object:
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
        except Exception as error:
            self._link.send(Answer(question.number, failure=error if is_local else Failure.of(error)))
        else:
            self._link.send(Answer(question.number, value))

    def _fail(self, error: BaseException, doing: str) -> NoReturn:
        if self._link.is_local or isinstance(error, ChannelClosedError):
            raise error
        self._link.send(Failed(Failure.of(error), doing))
        raise SystemExit(1) from error
