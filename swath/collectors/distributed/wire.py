"""What goes between a trainer and its nodes.

NOTE [Nodes]: a node is a worker on another machine, or one that could be. Between it and the trainer's carrier there is
a wire: the only part that differs between process groups, RPC and Ray. Everything else is the same for all:

- A parcel is a small object, and may have a body: one run of bytes. A batch is the body of its `Finished`: the node
  collects into memory that is laid out as the trainer's slot is, so that it is sent as it lies and received where it
  belongs. Weights are a body, too, made once for all nodes.
- What a board in shared memory shows on one machine comes with every parcel of a node, and with a pulse when there is
  nothing else to say. So both sides know that the other is there: a trainer gives up a node that has been silent for
  `node_timeout_s`, and a node that hears nothing of its trainer for so long ends by itself.
- Sending is the work of a thread for each node: nobody who publishes weights or gives out work waits for a node.
  Weights that have not been sent when newer ones are published are never sent.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import cloudpickle
from torch import Tensor

from swath.keys import Key
from swath.runtime.carrier import Message, News, Order, Task, Topic
from swath.runtime.channel import Channel
from swath.runtime.columns import Leaf
from swath.runtime.entrance import leaving_from
from swath.runtime.pickling import unpicklable
from swath.runtime.snapshots import SnapshotContents

Layout: TypeAlias = tuple[Mapping[Key, Leaf], tuple[int, ...]]
"""Leaves and shape of columns."""

PULSE_S = 0.1
"""How often each side shows that it is there."""

# -- to a node -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begin:
    """The first parcel: what the node is for, which numbers it reports, and how long it waits for a lost trainer."""

    task: Task
    fields: tuple[str, ...]
    node_timeout_s: float


@dataclass(frozen=True)
class Post:
    """A message for the worker. An order for a batch names a layout, which comes along the first time."""

    message: Message
    layout: int | None = None
    new_layout: Layout | None = None


@dataclass(frozen=True)
class Interrupt:
    """End orders up to `ticket`; 0 interrupts nothing more."""

    ticket: int


@dataclass(frozen=True)
class Weights:
    """A snapshot: the tensors of these names are in its body. With `contents`, the node subscribes to `topic` anew.

    The last of those that belong together says up to which version they may all be taken.
    """

    topic: Topic
    version: int
    names: tuple[str, ...] = ()
    extras: Mapping[str, Any] | None = None
    size: int = 0
    contents: SnapshotContents | None = None
    released: int = -1


# -- from a node ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sent:
    """News of the worker, with what its board shows; the body of a `Finished` is its batch."""

    news: News
    numbers: tuple[float, ...]
    size: int = 0


# -- both ways -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pulse:
    """A sign of life; a node's, with what its board shows."""

    numbers: tuple[float, ...] = ()


Parcel: TypeAlias = Begin | Post | Interrupt | Weights | Sent | Pulse | News


def pack_parcel(parcel: Parcel, address: str = "") -> bytes:
    """A parcel as bytes; by value if it may hold what the other side cannot import, or has to find us at `address`."""
    if isinstance(parcel, Begin) or (isinstance(parcel, Post) and not isinstance(parcel.message, Order)):
        try:
            with leaving_from(address):
                return bytes(cloudpickle.dumps(parcel))
        except Exception as error:
            raise unpicklable(parcel, error) from error
    return pickle.dumps(parcel, pickle.HIGHEST_PROTOCOL)


class Wire(Protocol):
    """One end of the connection between a trainer and a node. ChannelClosedError tells that nobody is there."""

    def send(self, parcel: bytes, body: Tensor | None = None, number: int = 0) -> None:
        """Send a parcel and its body, which is bytes on the CPU. Both have left when it returns. From any thread.

        `number` is the body's, if the other side expects it.
        """

    def receive(self) -> bytes:
        """Wait for a parcel. By one thread alone, as `fetch`."""

    def expect(self, number: int, space: Tensor) -> None:
        """The body of that number will be fetched to `space`, if it ever comes: it may be put there before."""

    def fetch(self, space: Tensor, number: int = 0) -> None:
        """Put the body of the last parcel into `space`, which has its size."""

    def close(self) -> None:
        """End the connection: whoever sends or receives, at either end, is told. From any thread, more than once."""


class Node(Protocol):
    """What a launcher has started, seen from the trainer."""

    @property
    def where(self) -> str:
        """Where it runs, and how it is doing as far as that is known, for messages; empty on this machine."""

    def connect(self) -> Wire:
        """Wait until it is there. ChannelClosedError if it will not be."""

    def pid(self) -> int:
        """Of its process, on its machine; 0 as long as nobody knows."""

    def exitcode(self, timeout_s: float) -> int | None:
        """How it has ended, if that becomes known in time."""

    def is_stopped(self) -> bool:
        """Whether the system has stopped it, as far as can be seen from here."""

    def kill(self) -> None:
        """End it at once."""

    def end(self, timeout_s: float) -> None:
        """It was asked to end: wait for that, and kill it if it takes longer."""


@dataclass(frozen=True)
class Launch:
    """How nodes get to where they run."""

    start: Callable[[int], Node]
    """Starts the node of an index, in the place of a former one."""
    address: str = "127.0.0.1"
    """Where nodes reach this process."""
    close: Callable[[], None] = lambda: None
    """No more will be started; all that were have ended. May be called again."""


WireKind: TypeAlias = Callable[[Channel, int], Wire]
"""Makes the end of a wire over a channel, of `TRAINER` or `NODE`. ChannelClosedError if that cannot be."""
TRAINER, NODE = 0, 1
