"""Channel: messages between two processes, in order and whole."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from typing import Any

import cloudpickle

from swath.errors import ChannelClosedError
from swath.runtime import descriptors
from swath.runtime.pickling import unpicklable

HEADER = struct.Struct("<QI")
"""Bytes of the message, and how many descriptors come with it."""
CHUNK = 1 << 18
MOST_FDS = 128
SEND_S = 30.0
"""How long the other side may leave its end full: it is stopped, or stuck."""


class Channel:
    """One end of a connection: over a socket that has no name, or one to another machine.

    Sending waits only while the other side's end is full, and not for ever. Receiving never waits in the middle of a
    message: what has come is kept until the rest is there, so that a process that is killed or stopped while it sends
    does no harm.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent = b""
        self._sending = threading.Lock()
        """One thread at a time: parts of two messages must not be mixed."""
        self._bytes = bytearray()
        self._fds: deque[int] = deque()
        self._incoming = select.poll()
        self._incoming.register(end, select.POLLIN)
        _channels.add(self)

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """A channel, and the socket for whoever will be at the other end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(ours), theirs

    def fileno(self) -> int:
        """For `select` and `poll`; -1 once this end is closed."""
        return self._socket.fileno()

    @property
    def address(self) -> str:
        """Our own, by which we are connected to another machine; nothing on one machine."""
        name = self._socket.getsockname()
        return str(name[0]) if isinstance(name, tuple) else ""

    def send(self, message: Any, *, by_value: bool = False, timeout_s: float = SEND_S) -> None:
        """Send `message`; `by_value` if it may hold what the other side cannot import, such as lambdas."""
        self.send_packed(pack(message, by_value=by_value), timeout_s)

    def send_packed(self, packed: tuple[bytes, list[int]], timeout_s: float = SEND_S) -> None:
        """Send what `pack` has made of a message.

        Raises TimeoutError if the other side does not take all of it: what is left then goes before the next message.
        """
        deadline = time.monotonic() + timeout_s
        if self._sending.acquire(timeout=timeout_s):
            try:
                if self._unsent:
                    self._unsent = self._rest_of(self._unsent, [], deadline)
                if not self._unsent:
                    data, fds = packed
                    message = HEADER.pack(len(data), len(fds)) + data
                    rest = self._rest_of(message, fds, deadline)
                    if not rest:
                        return
                    self._unsent = rest if len(rest) < len(message) else b""
            finally:
                self._sending.release()
        raise TimeoutError("The other side of the channel takes no messages: it is stopped, or stuck.")

    def _rest_of(self, data: bytes, fds: list[int], deadline: float) -> bytes:
        """Send `data`, and return what could not be sent in time."""
        view = memoryview(data)
        while view:
            try:
                sent = socket.send_fds(self._socket, [view], fds) if fds else self._socket.send(view)
            except BlockingIOError:
                if not self._has_room(deadline):
                    break
                continue
            except OSError as error:
                raise ChannelClosedError("The other side of the channel has ended.") from error
            view, fds = view[sent:], []
        return bytes(view)

    def _has_room(self, deadline: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def receive_all(self) -> list[Any]:
        """All messages that have come; raises ChannelClosedError when there are none and none will come."""
        is_open = self._pump()
        messages = self._whole_ones()
        if not messages and not is_open:
            raise ChannelClosedError("The other side of the channel has ended.")
        return messages

    def receive_rest(self) -> list[Any]:
        """All that has come from a process that has ended: nothing more will, even if a child of it has its end."""
        while self._incoming.poll(0) and self._pump():
            pass
        return self._whole_ones()

    def _whole_ones(self) -> list[Any]:
        messages = []
        while (message := self._next()) is not _NOTHING:
            messages.append(message)
        return messages

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message; raises TimeoutError if none comes in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        is_open = True
        while (message := self._next()) is _NOTHING:
            if not is_open:
                raise ChannelClosedError("The other side of the channel has ended.")
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            if not self._incoming.poll(left):
                raise TimeoutError(f"No message has come within {timeout_s} s.")
            is_open = self._pump()
        return message

    def take_in(self) -> None:
        """Read what has come, so that the other side need not wait; it is there for whoever receives."""
        if self._incoming.poll(0):
            while self._pump() and self._incoming.poll(5):  # for as long as more comes
                pass

    def has_news(self) -> bool:
        """Whether something has come, which may be the end."""
        return bool(self._bytes) or bool(self._incoming.poll(0))

    @property
    def has_ended(self) -> bool:
        """Whether the other side has ended, and everything that it had sent was received. From any thread."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _pump(self) -> bool:
        """Take in what has come; whether more may come."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, CHUNK, MOST_FDS, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return True
            except OSError:
                return False
            self._fds.extend(fds)
            if not data:
                return False
            self._bytes += data
            if len(data) < CHUNK:  # most often that was all; whoever waits for more will be told
                return True

    def _next(self) -> Any:
        """The next whole message."""
        if len(self._bytes) < HEADER.size:
            return _NOTHING
        size, count = HEADER.unpack_from(self._bytes)
        if len(self._bytes) < HEADER.size + size:
            return _NOTHING
        data = bytes(memoryview(self._bytes)[HEADER.size : HEADER.size + size])
        del self._bytes[: HEADER.size + size]
        fds = [self._fds.popleft() for _ in range(count)]
        with descriptors.handed_out(fds):
            return pickle.load(io.BytesIO(data))

    def end(self) -> None:
        """End the connection for both sides, whoever waits here or there. From any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
        while self._fds:
            os.close(self._fds.popleft())


def pack(message: Any, *, by_value: bool = False) -> tuple[bytes, list[int]]:
    """`message` as bytes, and the descriptors that go with them; what it was made of must live until it is sent."""
    with descriptors.collected() as fds:
        if by_value:
            try:
                data = cloudpickle.dumps(message)
            except Exception as error:
                raise unpicklable(message, error) from error
        else:
            data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    if len(fds) > MOST_FDS:
        raise ValueError(f"A message may bring {MOST_FDS} descriptors, not {len(fds)}.")
    return data, fds


_NOTHING = object()
_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def close_all_in_child() -> None:
    """A forked child has copies of our ends: as long as it lives, the other sides would not notice our death."""
    for channel in list(_channels):
        channel.close()


os.register_at_fork(after_in_child=close_all_in_child)
