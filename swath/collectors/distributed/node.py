"""The node's side: a worker's link over a wire; see NOTE [Nodes]."""

# ruff: noqa: D102 - what the methods of links do is told in `swath.runtime.carrier`

from __future__ import annotations

import os
import pickle
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from torch import Tensor

from swath.collectors.distributed.remote import packed_memory
from swath.collectors.distributed.wire import (
    PULSE_S,
    Begin,
    Interrupt,
    Parcel,
    Post,
    Pulse,
    Sent,
    Weights,
    Wire,
    pack_parcel,
)
from swath.errors import ChannelClosedError
from swath.runtime.board import Board
from swath.runtime.carrier import Failed, Finished, Message, News, Order, Subscribe, Topic
from swath.runtime.columns import Columns, Place
from swath.runtime.faults import Failure
from swath.runtime.session import Session
from swath.runtime.snapshots import Snapshots
from swath.runtime.supervision import Patience

GRACE_S = 3.0
"""How long a node whose trainer is gone may take to end by itself."""


def serve(wire: Wire) -> None:
    """Be a worker at this end of a wire, until it is stopped or the trainer is gone."""
    try:
        parcel = wire.receive()
        try:
            begin = pickle.loads(parcel)
        except Exception as error:  # what the trainer can import, a node may not
            return wire.send(pack_parcel(Failed(Failure.of(error), "reading its task")))
        assert isinstance(begin, Begin)
        link = NodeLink(wire, begin)
        with suppress(ChannelClosedError, SystemExit):  # nobody is there any more, or it has said why it ends
            Session(begin.task, link).run()
        link.stop()
    finally:
        wire.close()


class NodeLink:
    """A worker's end of a wire."""

    is_local = False

    def __init__(self, wire: Wire, begin: Begin) -> None:
        """Take in what comes, and show that this node is there, in threads."""
        self._wire, self._timeout_s = wire, begin.node_timeout_s
        self._board = Board(1, begin.fields, private=True)
        self._row = self._board.row(0)
        self.report = self._row.report
        self._mail: queue.SimpleQueue[Message | Exception] = queue.SimpleQueue()
        self._snapshots: dict[Topic, Snapshots] = {}
        self._memory: list[tuple[Columns, Tensor]] = []
        """Where batches are collected, one for each layout: a batch has been sent when the next is begun."""
        self._weights: tuple[Columns, Tensor] | None = None
        self._silence = Patience()
        self._is_over = False
        self._telling = threading.Lock()
        self._has_stopped = threading.Event()
        for run in (self._receive_all, self._pulsate):
            threading.Thread(target=run, daemon=True, name="swath node").start()

    # -- threads ---------------------------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        try:
            while True:
                parcel = pickle.loads(self._wire.receive())
                if isinstance(parcel, Weights) and parcel.size:
                    self._wire.fetch(self._space(parcel))
                self._silence.renew()
                match parcel:
                    case Post():
                        self._take(parcel)
                    case Interrupt(ticket=ticket):
                        self._board.interrupt(0, ticket)
                    case Weights():
                        self._keep(parcel)
        except (ChannelClosedError, OSError):
            self._lose_trainer()
        except Exception as error:  # what cannot be read here: the session tells
            self._mail.put(error)

    def _pulsate(self) -> None:
        with suppress(ChannelClosedError, OSError):
            while not self._has_stopped.wait(PULSE_S):
                if self._silence.waited_s() > self._timeout_s:
                    break
                self._tell(Pulse)
        if not self._has_stopped.is_set():
            self._lose_trainer()

    def _lose_trainer(self) -> None:
        """End, whatever the env is doing: nobody will ask for what it makes."""
        self._is_over = True
        self._board.interrupt(0)
        self._mail.put(ChannelClosedError("The trainer is gone."))
        self._wire.close()
        if not self._has_stopped.wait(GRACE_S):
            os._exit(1)

    def stop(self) -> None:
        """The worker has ended."""
        self._has_stopped.set()

    # -- what has come -----------------------------------------------------------------------------------------------

    def _take(self, post: Post) -> None:
        message = post.message
        if post.new_layout is not None:
            self._memory.append(packed_memory(*post.new_layout))
        if isinstance(message, Order) and post.layout is not None:
            memory = self._memory[post.layout][0]
            message = replace(message, place=Place(memory, 0, memory.shape[0], post.layout))
        self._mail.put(message)

    def _space(self, parcel: Weights) -> Tensor:
        """Where weights are received."""
        contents = parcel.contents or self._snapshots[parcel.topic].contents
        if self._weights is None or self._weights[0].leaves != dict(contents.tensors):
            self._weights = packed_memory(contents.tensors, ())
        return self._weights[1]

    def _keep(self, weights: Weights) -> None:
        if weights.contents is not None:
            self._snapshots[weights.topic] = Snapshots(weights.contents, private=True)
        if weights.version >= 0:
            assert self._weights is not None
            tensors = self._weights[0].tensors
            values = {name: tensors[name] for name in weights.names}
            store, version = self._snapshots[weights.topic], weights.version
            store.publish({**values, **(weights.extras or {})}, version, releases=False)
        if weights.released >= 0:
            for own in self._snapshots.values():
                own.release(weights.released)
        if weights.contents is not None:
            self._mail.put(Subscribe(weights.topic, self._snapshots[weights.topic]))

    # -- what a session asks for ---------------------------------------------------------------------------------

    def _tell(self, parcel: Callable[[tuple[float, ...]], Parcel], body: Tensor | None = None, number: int = 0) -> None:
        """Send a parcel with the numbers of this moment: what the trainer sees must not go back."""
        with self._telling:
            self._wire.send(pack_parcel(parcel(self._board.numbers(0))), body, number)

    def send(self, news: News) -> None:
        self._tell(partial(Sent, news))

    def has_news(self) -> bool:
        return not self._mail.empty()

    def receive(self, *, wait: bool) -> list[Message]:
        mail = [self._mail.get()] if wait else []
        while not self._mail.empty():
            mail.append(self._mail.get())
        for one in mail:
            if isinstance(one, Exception):
                raise one
        return mail  # type: ignore[return-value]

    def memory(self, place: Place) -> Columns:
        assert place.memory is not None
        return place.memory

    def finish(self, order: Order, receipt: object) -> None:
        """Say that an order is done, and send the batch as it lies."""
        finished = Finished(order.ticket, receipt)
        if order.place is None:
            self.send(finished)
        else:
            data = self._memory[order.place.number][1]
            self._tell(partial(Sent, finished, size=data.numel()), data, order.ticket)

    def beat(self, ticket: int) -> bool:
        if self._is_over:
            raise ChannelClosedError("The trainer is gone.")
        return self._row.beat(ticket)

    def is_interrupted(self, ticket: int) -> bool:
        if self._is_over:
            raise ChannelClosedError("The trainer is gone.")
        return self._row.is_interrupted(ticket)
