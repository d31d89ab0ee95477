"""Where a trainer and the nodes that come from elsewhere find each other.

NOTE [Meeting]: a trainer has an entrance (NOTE [Entrance]), at one address and with the secret of this run.

Behind the secret, a node has its index, and a generation: the trainer has given up all but the last of an index, and
does not take back one that comes late.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NoReturn

from swath.errors import ClosedError
from swath.runtime.channel import Channel
from swath.runtime.child import run
from swath.runtime.entrance import Entrance, entered

GREETING_BYTES = 300
WELCOME, REFUSED = b"welcome", b"refused"
Come = Callable[[Channel, str, int], None]
"""Is called when a node is there, with the way to it, its host and its pid."""


class Meeting:
    """The trainer's side: see NOTE [Meeting]."""

    def __init__(self, address: str, port: int = 0, secret: bytes | None = None) -> None:
        """Listen at `address`; the port is one that is free, if it is not given."""
        self._expected: dict[int, tuple[int, Come | None]] = {}
        """Generation of each index, and whom to tell as long as it has not come."""
        self._turn = threading.Lock()
        self._entrance = Entrance(address, port, secret, admit=self._admit)
        self.address, self.port = self._entrance.address, self._entrance.port

    def expect(self, index: int, come: Come) -> Invitation:
        """Wait for the node of that index, and not for a former one; what to give to it."""
        with self._turn:
            if self._entrance.is_closed:
                raise ClosedError("The collector was shut down: no node is started any more.")
            generation = self._expected[index][0] + 1 if index in self._expected else 0
            self._expected[index] = generation, come
        return Invitation(self.address, self.port, self._entrance.secret, index, generation)

    def close(self) -> None:
        """Listen no more."""
        self._entrance.close()

    def _admit(self, way: Connection) -> Callable[[socket.socket], None] | None:
        index, generation, pid, host = way.recv_bytes(GREETING_BYTES).decode().split(" ", 3)
        come: Come | None = None
        with self._turn:
            if self._expected.get(int(index), (-1, None))[0] == int(generation):
                come = self._expected[int(index)][1]
                self._expected[int(index)] = int(generation), None
        way.send_bytes(REFUSED if come is None else WELCOME)
        return None if come is None else lambda end: come(Channel(end), host, int(pid))


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
            with entered(self.address, self.port, self.secret) as (end, way):
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
