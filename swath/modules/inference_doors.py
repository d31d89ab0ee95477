"""The ways from a client to its server: within one process, and between two.

NOTE [Waking one by one]: a thread that is woken wants the interpreter's lock, and if many are woken at once, they fight
for it, with the server and with each other, on all cores. So the server wakes one of those that it has answered, which
wakes the next as soon as it runs, and so on. An answer that no thread waits for passes the call on at once, and so does
a thread that gives up waiting: whoever sets the flag or the lock last sees what the other has done.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
from _thread import allocate_lock
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from torch import Tensor

from swath.errors import ChannelClosedError, ClosedError
from swath.keys import Key
from swath.modules.inference_connections import Connection, Request
from swath.modules.inference_forward import (
    Outputs,
    RequestLayout,
    arrays_of,
    entries_of,
    layout_of,
    look_of,
    tensors_of,
)
from swath.modules.inference_loop import InferenceLoop
from swath.modules.inference_wire import (
    CODES,
    Ask,
    Claimed,
    Desk,
    Goodbye,
    Hello,
    Introduce,
    Opened,
    Refused,
    TravellingEnd,
)
from swath.runtime.channel import Channel
from swath.runtime.columns import tensor_of
from swath.runtime.faults import Failure

Entries = list[tuple[Key, Tensor]]
RAISED = "Raised by the policy of the InferenceServer."
DIED = "The InferenceServer has ended without a word: its process was killed, or has crashed."


class LocalRequest(Request):
    """One of a thread of the server's own process."""

    _outcome: Outputs | Failure | ClosedError | None = None
    _at = 0
    _follower: Request | None = None
    _is_waited = False

    def __init__(
        self, layout: RequestLayout, tensors: list[Tensor], kind: InteractionType | None, loop: InferenceLoop
    ) -> None:
        """Not answered yet, by `loop`. It arrives now."""
        self.layout, self.tensors, self.kind, self.arrived = layout, tensors, kind, perf_counter()
        self._loop = loop
        self._done = allocate_lock()
        self._done.acquire()

    def answer(self, outputs: Outputs, at: int, follower: Request | None) -> Request:
        """Keep the answer for the thread that waits; it takes its rows itself."""
        self._at, self._follower, self._outcome = at, follower, outputs  # the last of them says that it is done
        return self

    def refuse(self, failure: Failure | ClosedError) -> None:
        """Wake the thread that waits."""
        if self._outcome is None:
            self._outcome = failure
            self.wake()

    def rouse(self) -> Request | None:
        """Wake the thread that waits, which then wakes the follower. Returns that if none does."""
        if self._done.locked():  # else it was woken before
            try:  # noqa: SIM105 - `suppress` takes as long as all else here
                self._done.release()
            except RuntimeError:  # just now, by another thread
                pass
        follower = None
        if not self._is_waited:
            follower, self._follower = self._follower, None
        return follower

    def is_done(self) -> bool:
        """Whether waiting takes no time."""
        return self._outcome is not None

    def wait(self, timeout_s: float | None) -> bool:
        """Wait; whether it is over. See NOTE [Waking one by one]."""
        deadline = None if timeout_s is None else monotonic() + timeout_s
        try:
            while self._outcome is None:
                wait_s = self._loop.lead(self)
                self._is_waited = True
                if self._outcome is not None:
                    break
                if deadline is not None:
                    wait_s = min(wait_s, max(0.0, deadline - monotonic()))
                if self._done.acquire(True, wait_s) or (deadline is not None and monotonic() >= deadline):
                    break
        finally:
            self._is_waited = False
            if self._outcome is None:
                self._loop.ring()  # others may have left it to us to have them served
            else:
                self.wake()  # which leaves the lock open for whoever asks again
        return self._outcome is not None

    def entries(self, timeout_s: float | None) -> Entries:
        """Wait, and take our rows."""
        if not self.wait(timeout_s):
            raise TimeoutError(f"The InferenceServer has not answered within {timeout_s} s.")
        outputs, at, size, device = self._outcome, self._at, self.layout.batch_size, self._loop.settings.output_device
        assert outputs is not None
        if not isinstance(outputs, Outputs):
            raise _error(outputs)
        stop, entries = at + self.layout.rows, Entries()
        for (key, leaf), array in zip(outputs.leaves, outputs.arrays, strict=True):
            rows = array[at:stop].reshape(*size, *leaf.shape) if size else array[at, ...]
            value = tensor_of(rows, leaf.dtype)
            entries.append((key, value if device is None else value.to(device)))
        return entries


def _error(failure: Failure | ClosedError) -> BaseException:
    """To be raised in this thread: an error of its own, as others may raise the same."""
    return ClosedError(*failure.args) if isinstance(failure, ClosedError) else failure.error(RAISED)


class LocalDoor:
    """To a server that is a thread of this process."""

    def __init__(self, loop: InferenceLoop) -> None:
        """Ask `loop`."""
        self._loop = loop
        self._layouts: dict[tuple[Any, ...], RequestLayout] = {}
        self._pid = os.getpid()

    def submit(self, tensordict: TensorDictBase, keys: Sequence[Key] | None, kind: Any, keep: bool) -> LocalRequest:
        """Hand the tensors over."""
        if os.getpid() != self._pid:
            raise _forked()
        entries, size = entries_of(tensordict, keys), tensordict.batch_size
        look = look_of(entries, size)
        layout = self._layouts.get(look)
        if layout is None:
            layout = self._layouts[look] = layout_of(entries, size)
        tensors = tensors_of(entries, layout)
        request = LocalRequest(layout, [tensor.clone() for tensor in tensors] if keep else tensors, kind, self._loop)
        self._loop.submit(request, rings=keep)  # otherwise it is waited for at once
        return request

    def travelling_end(self) -> TravellingEnd:
        """The loop keeps a copy of it until it is claimed."""
        if os.getpid() != self._pid:
            raise _forked()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._loop.add(Connection(ours, kept=theirs))
        return TravellingEnd(theirs)


def _forked() -> RuntimeError:
    return RuntimeError(
        "This client was inherited by a fork, where its server does not run. Send a client to the child instead, "
        "pickled: as an argument of a process that is started by 'spawn' or 'forkserver', or through a queue."
    )


class SentRequest(ABC):
    """One that is under way through a connection."""

    is_abandoned = False

    def is_done(self) -> bool:
        """Whether waiting takes no time."""
        return self.wait(0.0)

    @abstractmethod
    def wait(self, timeout_s: float | None) -> bool:
        """Wait; whether it is over."""

    def entries(self, timeout_s: float | None) -> Entries:
        """Wait for the answer."""
        if not self.wait(timeout_s):
            raise TimeoutError(f"The InferenceServer has not answered within {timeout_s} s.")
        outcome = self._outcome()
        if isinstance(outcome, Failure | ClosedError):
            raise _error(outcome)
        return outcome

    @abstractmethod
    def _outcome(self) -> Entries | Failure | ClosedError:
        """What has come of it."""


class AskedRequest(SentRequest):
    """One that is under way to another process."""

    def __init__(self, connection: RemoteConnection, layout: RequestLayout, desk: Desk | None) -> None:
        """Not answered yet."""
        self.layout, self.desk = layout, desk
        self.is_over = False
        self.failure: Failure | ClosedError | None = None
        self._connection = connection
        self._entries: Entries = []

    def take(self) -> None:
        """Copy the answer from the desk, which may be used for another request then."""
        assert self.desk is not None
        if not self.is_abandoned:
            pairs = zip(self.desk.written, self.desk.answers, strict=True)
            self._entries = [(key, tensor_of(array.copy(), leaf.dtype)) for (key, leaf), array in pairs]

    def wait(self, timeout_s: float | None) -> bool:
        """Wait; whether it is over."""
        return self._connection.wait(self, timeout_s)

    def _outcome(self) -> Entries | Failure | ClosedError:
        return self._entries if self.failure is None else self.failure


class RemoteConnection:
    """A client's end of a connection; see NOTE [Connections].

    Requests of one thread go through it, but any thread may wait for their answers: one of them reads what comes, and
    the others see what has come of it.
    """

    def __init__(self, end: socket.socket, explain: Callable[[], str]) -> None:
        """Claim the connection; `explain` tells why the server is gone, if it does not say so itself."""
        self._channel, self._explain = Channel(end), explain
        self._numbers = itertools.count()
        self._layouts: dict[tuple[Any, ...], tuple[RequestLayout, list[Desk]]] = {}
        self._free: dict[RequestLayout, list[Desk]] = {}
        """Desks that nobody uses, by the layout of their requests."""
        self._waiting: dict[int, AskedRequest] = {}
        self._turn = threading.Condition()
        self._is_attended = False
        self._kept: dict[int, socket.socket] = {}
        self._closed: ClosedError | None = None
        self._send(Hello(os.getpid()))

    def submit(self, entries: dict[Key, Tensor], size: Any, kind: InteractionType | None) -> AskedRequest:
        """Write a request to a desk, or send it."""
        look = look_of(entries, size)
        known = self._layouts.get(look)
        if known is None:
            layout = layout_of(entries, size)
            known = self._layouts[look] = (layout, self._free.setdefault(layout, []))
        layout, free = known
        with self._turn:
            if self._closed is not None:
                raise _error(self._closed)
            desk = free.pop() if free else None
            number = next(self._numbers)
            request = self._waiting[number] = AskedRequest(self, layout, desk)
        arrays = arrays_of(entries, layout)
        if desk is None:
            self._send(Ask(number, layout, CODES[kind], arrays))
        else:
            for target, array in zip(desk.inputs, arrays, strict=True):
                target[...] = array
            self._send((number, desk.number, CODES[kind]))
        return request

    def introduce(self, *, keep: bool) -> socket.socket:
        """The client's end of another connection; with `keep`, it stays open here until it is claimed."""
        theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        number = next(self._numbers)
        if keep:
            self._kept[number] = ours
        with theirs:
            self._send(Introduce(number, TravellingEnd(theirs)))
        return ours

    def _send(self, message: object) -> None:
        try:
            self._channel.send(message)
        except (ChannelClosedError, OSError) as error:
            with self._turn:
                self._end(self._closed or ClosedError(self._explain()))
                assert self._closed is not None
                raise _error(self._closed) from error

    def wait(self, request: AskedRequest, timeout_s: float | None) -> bool:
        """Wait until `request` is over; whether it is."""
        deadline = None if timeout_s is None else monotonic() + timeout_s
        while not request.is_over:
            left = None if deadline is None else max(0.0, deadline - monotonic())
            with self._turn:
                if request.is_over:
                    break
                if self._is_attended:
                    if not self._turn.wait(left):
                        return request.is_over
                    continue
                self._is_attended = True
            message: object = None
            try:
                message = self._channel.receive(left)
            except TimeoutError:
                return False
            except (ChannelClosedError, OSError):
                message = Goodbye(self._explain())
            finally:
                with self._turn:
                    self._is_attended = False
                    self._hear(message)
                    self._turn.notify_all()
        return True

    def _hear(self, message: object) -> None:
        match message:
            case int():
                self._finish(self._waiting.pop(message))
            case Opened(number=number, desk=desk):
                request = self._waiting.pop(number)
                desk.release()
                request.desk = desk
                self._finish(request)
            case Refused(number=number, failure=failure):
                request = self._waiting.pop(number)
                request.failure = failure
                if request.desk is not None:
                    self._free[request.layout].append(request.desk)
                request.is_over = True
            case Claimed(number=number):
                if number in self._kept:  # else it was for a thread of this process
                    self._kept.pop(number).close()
            case Goodbye(reason=reason):
                self._end(ClosedError(reason))

    def _finish(self, request: AskedRequest) -> None:
        request.take()
        assert request.desk is not None
        self._free[request.layout].append(request.desk)
        request.is_over = True

    def _end(self, reason: ClosedError) -> None:
        """Nothing more will come."""
        self._closed = self._closed or reason
        for request in self._waiting.values():
            request.failure, request.is_over = self._closed, True
        self._waiting.clear()
        self.close()

    def close(self) -> None:
        """Close everything. May be called again."""
        self._channel.close()
        while self._kept:
            self._kept.popitem()[1].close()

    def __del__(self) -> None:
        """A thread that ends lets its connection go."""
        self.close()


class RemoteDoor:
    """To a server in another process. Each thread has a connection of its own."""

    def __init__(self, end: socket.socket, explain: Callable[[], str] = lambda: DIED) -> None:
        """Begin with `end`, the client's end of a connection."""
        self._pid = os.getpid()
        self._first = RemoteConnection(end, explain)
        self._explain = explain
        self._of_thread = threading.local()
        self._of_thread.connection = self._first

    def submit(self, tensordict: TensorDictBase, keys: Sequence[Key] | None, kind: Any, keep: bool) -> AskedRequest:
        """Ask through the connection of this thread."""
        if os.getpid() != self._pid:
            raise _forked()
        connection: RemoteConnection | None = getattr(self._of_thread, "connection", None)
        if connection is None:
            connection = RemoteConnection(self._first.introduce(keep=False), self._explain)
            self._of_thread.connection = connection
        return connection.submit(entries_of(tensordict, keys), tensordict.batch_size, kind)

    def travelling_end(self) -> TravellingEnd:
        """Introduced through our own connection."""
        if os.getpid() != self._pid:
            raise _forked()
        return TravellingEnd(self._first.introduce(keep=True))

    def close(self) -> None:
        """Close the first connection."""
        self._first.close()


Door = LocalDoor | RemoteDoor
Waiting = LocalRequest | AskedRequest
