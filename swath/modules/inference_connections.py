"""Requests as a server sees them, and its ends of the connections that bring some of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Callable
from time import perf_counter

import numpy as np
from tensordict.nn import InteractionType
from torch import Tensor

from swath.errors import ChannelClosedError, ClosedError
from swath.modules.inference_forward import Leaves, Outputs, RequestLayout
from swath.modules.inference_wire import KINDS, Desk, Opened, Refused
from swath.runtime.channel import Channel
from swath.runtime.columns import tensor_of
from swath.runtime.faults import Failure
from swath.runtime.liveness import watch


class Request:
    """Something to be answered. There are many of them: what is seldom set is an attribute of the class until then."""

    layout: RequestLayout
    tensors: list[Tensor]
    kind: InteractionType | None
    arrived: float
    is_abandoned = False
    """Whether nobody waits for the answer any more."""
    missing = 0
    """How many others were expected in its batch when it was last looked at."""

    def answer(self, outputs: Outputs, at: int, follower: Request | None) -> Request | None:
        """The answer are the rows from `at` on. Returns what is to be woken; that wakes the `follower` then."""
        raise NotImplementedError

    def is_done(self) -> bool:
        """Whether it is known to be answered or refused."""
        return False

    def rouse(self) -> Request | None:
        """Wake the thread that waits, if there is one; returns what is to be woken then."""
        return None

    def wake(self) -> None:
        """Wake the thread that waits, or that of the first follower for whose answer one does."""
        request: Request | None = self
        while request is not None:
            request = request.rouse()

    def refuse(self, failure: Failure | ClosedError) -> None:
        """There is none."""
        raise NotImplementedError


class RemoteRequest(Request):
    """One that has come through a connection."""

    def __init__(
        self, connection: Connection, number: int, layout: RequestLayout, kind: int, source: Desk | list[np.ndarray]
    ) -> None:
        """It lies on a desk, or came as arrays. It arrives now."""
        self.layout, self.kind, self.arrived = layout, KINDS[kind], perf_counter()
        if isinstance(source, Desk):
            self.tensors = source.tensors
        else:
            self.tensors = [
                tensor_of(array, leaf.dtype) for array, (_, leaf) in zip(source, layout.leaves, strict=True)
            ]
        self._connection, self._number = connection, number
        self._desk = source if isinstance(source, Desk) else None

    def answer(self, outputs: Outputs, at: int, follower: Request | None) -> Request | None:
        """Put the answer on the desk, on a new one if it does not fit there."""
        if self._connection.is_closed:
            return follower
        desk, is_new = self._desk, False
        if desk is None or (desk.written is not outputs.leaves and desk.written != outputs.leaves):
            desk, is_new = self._connection.open(self.layout, outputs.leaves, desk), True
        stop = at + self.layout.rows
        for target, array in zip(desk.answers, outputs.arrays, strict=True):
            target[...] = array[at:stop].reshape(target.shape)
        self._connection.send(Opened(self._number, desk) if is_new else self._number)
        if is_new:
            desk.release()
        return follower

    def refuse(self, failure: Failure | ClosedError) -> None:
        """Send the failure."""
        if isinstance(failure, Failure):  # that the server ends is said to everybody once
            self._connection.send(Refused(self._number, failure))


class Connection:
    """The server's end of a connection to a client in another process."""

    def __init__(self, end: socket.socket, kept: socket.socket | None = None) -> None:
        """Own `end`, and until it is claimed a copy of the other one."""
        self.channel = Channel(end)
        self.watched: int | None = None
        """A descriptor that tells of the end of the client's process."""
        self.is_closed = False
        self._kept = kept
        self._claimed: Callable[[], None] | None = None
        self._desks: dict[int, Desk] = {}
        self._numbers = itertools.count()

    def when_claimed(self, tell: Callable[[], None]) -> None:
        """Call `tell` then."""
        self._claimed = tell

    def claim(self, pid: int) -> None:
        """The process `pid` is at the other end."""
        with contextlib.suppress(OSError):  # it is gone already, or of another namespace
            self.watched = watch(pid)
        if self._claimed is not None:
            self._claimed()
        if self._kept is not None:
            self._kept.close()

    def desk(self, number: int) -> Desk:
        """The desk of that number."""
        return self._desks[number]

    def open(self, layout: RequestLayout, written: Leaves, replaced: Desk | None) -> Desk:
        """A new desk, in the place of one on which the answer does not fit."""
        if replaced is not None:
            del self._desks[replaced.number]
        desk = Desk(next(self._numbers), layout, written)
        self._desks[desk.number] = desk
        return desk

    def send(self, message: object) -> None:
        """Send without waiting; a client that takes nothing is given up."""
        if not self.is_closed:
            try:
                self.channel.send(message, timeout_s=0.0)
            except (ChannelClosedError, TimeoutError, OSError):
                self.is_closed = True  # the loop lets it go

    def close(self) -> None:
        """Let the client, and its memory, go."""
        self.is_closed = True
        self._desks.clear()
        self.channel.close()
        if self._kept is not None:
            self._kept.close()
        watched, self.watched = self.watched, None
        if watched is not None:
            os.close(watched)
