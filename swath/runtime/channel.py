"""Channel: messages between two processes, in order and whole."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import cloudpickle

from swath.errors import ChannelClosedError
from swath.runtime import descriptors
from swath.runtime.interrupts import Section
from swath.runtime.pickling import unpicklable

HEADER = struct.Struct("<QI")
"""Bytes of the message, and how many descriptors come with it."""
SMALL, CHUNK = 1 << 12, 1 << 18
"""How many bytes are asked for first, and if there were as many: room for more takes longer to make than to fill."""
MOST_FDS = 128
SEND_S = 30.0
"""How long the other side may leave its end full: it is stopped, or stuck."""


@dataclass(eq=False)
class _Outgoing:
    """A message on its way."""

    rest: memoryview
    """What has not been sent of it."""
    fds: list[int]
    owns_fds: bool = False
    is_begun: bool = False

    def close_fds(self) -> None:
        """They are sent with the first byte, or not at all."""
        for fd in self.fds if self.owns_fds else ():
            os.close(fd)
        self.fds = []


class Channel:
    """One end of a connection: over a socket that has no name, or one to another machine.

    Any thread may send. That waits only while the other side's end is full, and not for ever; `post` never waits.
    Receiving never waits in the middle of a message: what has come is kept until the rest is there, so that a process
    that is killed or stopped while it sends does no harm.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._outgoing: deque[_Outgoing] = deque()
        """What the other side's end had no room for yet."""
        self._section = Section()
        """Parts of two messages must not be mixed, and what was read must be kept."""
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
        message = self.post_packed(packed)
        while message.rest and self._has_room(deadline):
            self.flush()
        if message.rest:
            with self._section:
                if not message.is_begun:
                    self._drop(message)
            raise TimeoutError("The other side of the channel takes no messages: it is stopped, or stuck.")

    def post(self, message: Any, *, by_value: bool = False) -> bool:
        """Send `message` as far as there is room, without waiting; whether that was all. `flush` sends the rest."""
        return not self.post_packed(pack(message, by_value=by_value)).rest

    def post_packed(self, packed: tuple[bytes, list[int]]) -> _Outgoing:
        """The same for what `pack` has made of a message."""
        data, fds = packed
        message = _Outgoing(memoryview(HEADER.pack(len(data), len(fds)) + data), fds)
        with self._section:
            self._outgoing.append(message)
            if not self.flush() and message.fds:  # whose owner may close them before there is room
                message.fds, message.owns_fds = [os.dup(fd) for fd in fds], True
        return message

    def flush(self) -> bool:
        """Send what waits, as far as there is room; whether nothing waits any more."""
        with self._section:
            while self._outgoing:
                first = self._outgoing[0]
                try:
                    if first.fds:
                        sent = socket.send_fds(self._socket, [first.rest], first.fds)
                    else:
                        sent = self._socket.send(first.rest)
                except BlockingIOError:
                    return False
                except OSError as error:
                    while self._outgoing:
                        self._drop(self._outgoing[0])
                    raise ChannelClosedError("The other side of the channel has ended.") from error
                first.close_fds()
                first.rest, first.is_begun = first.rest[sent:], True
                if not first.rest:
                    self._outgoing.popleft()
            return True

    @property
    def has_unsent(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._outgoing)

    def _drop(self, message: _Outgoing) -> None:
        message.close_fds()
        with contextlib.suppress(ValueError):
            self._outgoing.remove(message)

    def _has_room(self, deadline: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def receive_all(self) -> list[Any]:
        """All messages that have come; raises ChannelClosedError when there are none and none will come."""
        with self._section:
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
        room = SMALL
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, room, MOST_FDS, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return True
            except OSError:
                return False
            self._fds.extend(fds)
            if not data:
                return False
            self._bytes += data
            if len(data) < room:  # most often that was all; whoever waits for more will be told
                return True
            room = CHUNK

    def _next(self) -> Any:
        """The next whole message."""
        if len(self._bytes) < HEADER.size:
            return _NOTHING
        size, count = HEADER.unpack_from(self._bytes)
        if len(self._bytes) < HEADER.size + size:
            return _NOTHING
        data = bytes(memoryview(self._bytes)[HEADER.size : HEADER.size + size])
        del self._bytes[: HEADER.size + size]
        if not count:
            return pickle.loads(data)
        with descriptors.handed_out([self._fds.popleft() for _ in range(count)]):
            return pickle.loads(data)

    def end(self) -> None:
        """End the connection for both sides, whoever waits here or there. From any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        with self._section:
            self._socket.close()
            while self._outgoing:
                self._drop(self._outgoing[0])
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
        channel._section = Section()  # a thread that is not here may be in the former
        channel.close()


os.register_at_fork(after_in_child=close_all_in_child)
