"""What an inference server and clients in other processes say to each other.

NOTE [Connections]: a client in another process has a connection of its own: a pair of sockets without a name, of which
the server has one end. There is no listener. Whoever has a connection can introduce another, by sending the server its
end of a new pair; the other end travels as a descriptor, with the pickled client. The connection is claimed by a first
word from the process where the client was unpickled. Until then whoever has introduced it keeps a copy of the client's
end, which must stay open on its way; so the server does not rely on the end of the stream to learn that a client is
gone, but watches its process too.

NOTE [Desks]: the first request of a layout goes as bytes. Its answer tells what answers look like, and lies in memory
that the server has made for both: a desk, with room for one request and its answer. From then on the client writes to
the desk and says its number, and the server does the same with the answer. A client with several requests under way
gets a desk for each. Everything that the server sends is small, so that a client that takes nothing (a stopped process)
cannot make it wait: what does not fit into the socket ends the connection.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

import numpy as np
from tensordict.nn import InteractionType

from swath.keys import Key, as_path
from swath.modules.inference_forward import Leaves, RequestLayout
from swath.runtime import descriptors
from swath.runtime.columns import Columns, Leaf, tensor_of
from swath.runtime.faults import Failure

KINDS: tuple[InteractionType | None, ...] = (None, *InteractionType)
"""Exploration types by the number under which they are sent."""
CODES = {kind: code for code, kind in enumerate(KINDS)}

# -- from a client -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The first word: claims the connection for this process."""

    pid: int


@dataclass(frozen=True)
class Introduce:
    """One more connection, and a number to say when it was claimed."""

    number: int
    end: TravellingEnd


@dataclass(frozen=True)
class Ask:
    """A request for which there is no desk."""

    number: int
    layout: RequestLayout
    kind: int
    arrays: list[np.ndarray]


AskAtDesk = tuple[int, int, int]
"""(number, desk, kind): a request that lies on a desk."""

# -- from the server -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """The answer to a request lies on a new desk."""

    number: int
    desk: Desk


AnsweredAtDesk = int
"""The number of the request whose answer lies on its desk."""


@dataclass(frozen=True)
class Refused:
    """A request has failed."""

    number: int
    failure: Failure


@dataclass(frozen=True)
class Claimed:
    """A connection that was introduced under this number has found its process."""

    number: int


@dataclass(frozen=True)
class Goodbye:
    """The server ends, and why."""

    reason: str


# -- both ----------------------------------------------------------------------------------------------------------


class TravellingEnd:
    """A socket on its way to another process. It is closed with this object."""

    def __init__(self, end: socket.socket) -> None:
        """Own `end`."""
        self.end = end

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as a descriptor: through our channels, or as `multiprocessing` does it."""
        if descriptors.is_packing():
            return _arrived, (descriptors.leave(self.end.fileno()),)
        return _rebuilt, (reduction.DupFd(self.end.fileno()),)


def _arrived(place: int) -> TravellingEnd:
    return TravellingEnd(socket.socket(fileno=descriptors.claim(place)))


def _rebuilt(handle: Any) -> TravellingEnd:
    return TravellingEnd(socket.socket(fileno=handle.detach()))


class Desk:
    """Shared memory for one request of a layout and its answer; see NOTE [Desks].

    Attributes:
        layout: of the request.
        written: what the answer holds.
        inputs: the request's entries as `arrays_of` gives them.
        tensors: the same as tensors.
        answers: the answer's entries, `[*batch_size, ...]`.
    """

    def __init__(self, number: int, layout: RequestLayout, written: Leaves, columns: Columns | None = None) -> None:
        """Lay it out, in new memory unless it lies in `columns`."""
        self.number, self.layout, self.written = number, layout, written
        size = layout.batch_size
        if columns is None:
            sides = {"in": layout.leaves, "out": written}
            columns = Columns.shared(
                {
                    (side, *as_path(key)): Leaf((*size, *leaf.shape), leaf.dtype)
                    for side, leaves in sides.items()
                    for key, leaf in leaves
                },
                (),
            )
        self._columns = columns
        arrays = columns.arrays
        self.inputs = [arrays[("in", *as_path(key))] for key, _ in layout.leaves]
        if len(size) > 1:
            pairs = zip(self.inputs, layout.leaves, strict=True)
            self.inputs = [array.reshape(layout.rows, *leaf.shape) for array, (_, leaf) in pairs]
        self.tensors = [
            tensor_of(array, leaf.dtype) for array, (_, leaf) in zip(self.inputs, layout.leaves, strict=True)
        ]
        self.answers = [arrays[("out", *as_path(key))] for key, _ in written]

    def release(self) -> None:
        """Close the descriptor; the memory stays for as long as the desk is held."""
        if self._columns.block is not None:
            self._columns.block.release()

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the memory."""
        return Desk, (self.number, self.layout, self.written, self._columns)


@dataclass(frozen=True)
class PolicySignature:
    """What a client knows of the server's policy.

    Attributes:
        in_keys: what it reads; None if it does not say.
        out_keys: what it writes; None if it does not say.
        state_guesses: shapes that its recurrent state may have.
    """

    in_keys: tuple[Key, ...] | None = None
    out_keys: tuple[Key, ...] | None = None
    state_guesses: tuple[tuple[int, ...], ...] = ()
