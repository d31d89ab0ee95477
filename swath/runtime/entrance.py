"""Entrances: where others come to a process from elsewhere.

NOTE [Entrance]: a process listens at one address, never at all that its machine has. Who comes there must prove that he
knows the secret, which is not told, and is shown that the process knows it, before anything is unpickled. Until then a
stranger costs two threads, some hundred bytes, and `CHECK_S` seconds at most. What is said later is not encrypted.
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
from contextvars import ContextVar
from multiprocessing import connection

CHECK_S = 10.0
"""How long somebody may take to prove that he knows the secret."""
STRANGERS = 64
"""How many are checked at the same time; others wait."""
Admit = Callable[[connection.Connection], Callable[[socket.socket], None] | None]
"""Is called with one who knows the secret; what to do with the socket to him, or None to turn him away."""


class Entrance:
    """Listens for those who know a secret: see NOTE [Entrance]."""

    def __init__(self, address: str, port: int = 0, secret: bytes | None = None, *, admit: Admit) -> None:
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
            problem = f"Nobody can be waited for at {address}:{port}: {error.strerror}; see address= and tcp_port="
            raise OSError(error.errno, problem) from error
        self.address, self.port = self._listener.getsockname()[:2]
        self.secret = secret or secrets.token_bytes(32)
        self.is_closed = False
        self._admit, self._room = admit, threading.BoundedSemaphore(STRANGERS)
        self._thread = threading.Thread(target=self._accept, daemon=True, name="swath entrance")
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self.is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(1.0)
        self._listener.close()

    def _accept(self) -> None:
        while not self.is_closed:
            try:
                end, _ = self._listener.accept()
            except OSError:
                time.sleep(0.05)  # it is closed, or no descriptor is left for a moment
                continue
            self._room.acquire()
            threading.Thread(target=self._check, args=(end,), daemon=True, name="swath entrance").start()

    def _check(self, end: socket.socket) -> None:
        use: Callable[[socket.socket], None] | None = None
        try:
            with _checked(end) as way:
                connection.deliver_challenge(way, self.secret)
                connection.answer_challenge(way, self.secret)
                use = self._admit(way)
            if use is not None:
                use(end)
        except Exception:  # too slow, gone, or whatever a stranger's bytes may lead to
            use = None
        finally:
            self._room.release()
            if use is None:
                end.close()


@contextmanager
def entered(address: str, port: int, secret: bytes) -> Iterator[tuple[socket.socket, connection.Connection]]:
    """Come to an entrance: the socket, and within the context a way to say something before it is used."""
    end = socket.create_connection((address, port), timeout=CHECK_S)
    try:
        end.settimeout(None)
        with _checked(end) as way:
            connection.answer_challenge(way, secret)
            connection.deliver_challenge(way, secret)
            yield end, way
    except BaseException:
        end.close()
        raise


@contextmanager
def _checked(end: socket.socket) -> Iterator[connection.Connection]:
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


_address: ContextVar[str] = ContextVar("address", default="")


@contextmanager
def leaving_from(address: str) -> Iterator[None]:
    """A context in which what is pickled goes to another machine, from where this one is reached at `address`."""
    token = _address.set(address)
    try:
        yield
    finally:
        _address.reset(token)


def way_back() -> str:
    """The address at which this machine is reached from where goes what is being pickled; nothing if it stays here."""
    return _address.get()
