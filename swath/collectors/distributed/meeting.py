"""Where a trainer and the nodes that come from elsewhere find each other.

NOTE [Meeting]: a trainer listens at one address, never at all that its machine has. Who comes there must prove that he
knows the secret of this run, which is not told, and is shown that the trainer knows it, before anything is unpickled.
Until then a stranger costs the trainer two threads, some hundred bytes, and `CHECK_S` seconds at most. What is said
later is not encrypted.

Behind the secret, a node has its index, and a generation: the trainer has given up all but the last of an index, and
does not take back one that comes late.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import NoReturn

from swath.errors import ClosedError
from swath.runtime.channel import Channel
from swath.runtime.child import run

CHECK_S = 10.0
"""How long somebody may take to prove that he knows the secret."""
STRANGERS = 64
"""How many are checked at the same time; others wait."""
GREETING_BYTES = 300
WELCOME, REFUSED = b"welcome", b"refused"
Come = Callable[[Channel, str, int], None]
"""Is called when a node is there, with the way to it, its host and its pid."""


class Meeting:
    """The trainer's side: see NOTE [Meeting]."""

    def __init__(self, address: str, port: int = 0, secret: bytes | None = None) -> None:
        """Listen at `address`; the port is one that is free, if it is not given."""
        family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(str(place[0]).partition("%")[0]).is_unspecified:
            raise ValueError(f"address={address!r} is every address of this machine: give the one that nodes reach.")
        self._listener = socket.socket(family, kind)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind(place)
            self._listener.listen(STRANGERS)
        except OSError as error:
            self._listener.close()
            problem = f"Nodes cannot be waited for at {address}:{port}: {error.strerror}; see address= and tcp_port="
            raise OSError(error.errno, problem) from error
        self.address, self.port = self._listener.getsockname()[:2]
        self._secret = secret or secrets.token_bytes(32)
        self._expected: dict[int, tuple[int, Come | None]] = {}
        """Generation of each index, and whom to tell as long as it has not come."""
        self._is_closed = False
        self._turn, self._room = threading.Lock(), threading.BoundedSemaphore(STRANGERS)
        self._thread = threading.Thread(target=self._accept, daemon=True, name="swath meeting")
        self._thread.start()

    def expect(self, index: int, come: Come) -> Invitation:
        """Wait for the node of that index, and not for a former one; what to give to it."""
        with self._turn:
            if self._is_closed:
                raise ClosedError("The collector was shut down: no node is started any more.")
            generation = self._expected[index][0] + 1 if index in self._expected else 0
            self._expected[index] = generation, come
        return Invitation(self.address, self.port, self._secret, index, generation)

    def close(self) -> None:
        """Listen no more."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(1.0)
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                end, _ = self._listener.accept()
            except OSError:
                time.sleep(0.05)  # it is closed, or no descriptor is left for a moment
                continue
            self._room.acquire()
            threading.Thread(target=self._meet, args=(end,), daemon=True, name="swath meeting").start()

    def _meet(self, end: socket.socket) -> None:
        come: Come | None = None
        try:
            with checked(end) as way:
                connection.deliver_challenge(way, self._secret)
                connection.answer_challenge(way, self._secret)
                index, generation, pid, host = way.recv_bytes(GREETING_BYTES).decode().split(" ", 3)
                with self._turn:
                    if self._expected.get(int(index), (-1, None))[0] == int(generation):
                        come = self._expected[int(index)][1]
                        self._expected[int(index)] = int(generation), None
                way.send_bytes(REFUSED if come is None else WELCOME)
            if come is not None:
                come(Channel(end), host, int(pid))
        except Exception:  # too slow, gone, or whatever a stranger's bytes may lead to
            come = None
        finally:
            self._room.release()
            if come is None:
                end.close()


@dataclass(frozen=True)
class Invitation:
    """What a node must know to come to the meeting."""

    address: str
    port: int
    secret: bytes = field(repr=False)
    index: int
    generation: int = 0

    def accept(self) -> NoReturn:
        """Be the node, to the end of this process."""
        place, host = f"{self.address}:{self.port}", socket.gethostname()
        try:
            end = socket.create_connection((self.address, self.port), timeout=CHECK_S)
            end.settimeout(None)
            with checked(end) as way:
                connection.answer_challenge(way, self.secret)
                connection.deliver_challenge(way, self.secret)
                way.send_bytes(f"{self.index} {self.generation} {os.getpid()} {host}".encode()[:GREETING_BYTES])
                answer = way.recv_bytes(GREETING_BYTES)
        except Exception as error:
            raise ConnectionError(
                f"Node {self.index} on {host} does not reach its trainer at {place} ({error!r}): it has ended, or a "
                "firewall is between, or nodes need another address of it, by address=."
            ) from error
        if answer != WELCOME:
            raise ConnectionError(f"The trainer at {place} does not expect node {self.index}, or no more.")
        run(end)
        raise AssertionError("A node ends with its process.")


@contextmanager
def checked(end: socket.socket) -> Iterator[connection.Connection]:
    """A way to exchange runs of bytes, which is over after `CHECK_S`."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    timer = threading.Timer(CHECK_S, end.shutdown, (socket.SHUT_RDWR,))
    timer.daemon = True
    timer.start()
    try:
        with connection.Connection(os.dup(end.fileno())) as way:
            yield way
    finally:
        timer.cancel()
