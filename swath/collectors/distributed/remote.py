"""RemoteCarrier: workers at the other end of wires; see NOTE [Nodes]."""

# ruff: noqa: D102 - what the methods of carriers do is told in `swath.runtime.carrier`

from __future__ import annotations

import os
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swath.collectors.distributed.wire import (
    PULSE_S,
    Begin,
    Interrupt,
    Launch,
    Layout,
    Node,
    Parcel,
    Post,
    Pulse,
    Sent,
    Weights,
    Wire,
    pack_parcel,
)
from swath.errors import ChannelClosedError
from swath.keys import Key
from swath.runtime.board import Board
from swath.runtime.carrier import EVERYTHING, Ended, Failed, Finished, Message, News, Order, Stop, Task, Topic
from swath.runtime.columns import Columns, Leaf, Place, nbytes
from swath.runtime.faults import Failure
from swath.runtime.memory import PrivateBlock
from swath.runtime.processes import LAST_WORDS_S, SHUTDOWN_S
from swath.runtime.rounds import Event
from swath.runtime.snapshots import SnapshotContents, Snapshots, SnapshotStore, Values
from swath.runtime.supervision import Patience
from swath.runtime.watch import FdWatch

PULSE = pack_parcel(Pulse())
AGAIN_S = 0.001
"""How long somebody may take to publish, before it is looked at again."""
LOOK_S = 0.1
"""How often to look whether a node that was asked to end can hear that."""

STUCK_S = 10.0
"""How long the next parcel may take where nothing can be sent any more."""


def packed_memory(leaves: Mapping[Any, Leaf], shape: Sequence[int]) -> tuple[Columns, Tensor]:
    """Columns of this process, and all their bytes."""
    size = max(1, nbytes(leaves, shape))
    memory = Columns(leaves, shape, block=PrivateBlock(size))
    return memory, bytes_of(memory)


def bytes_of(memory: Columns) -> Tensor:
    """The bytes that columns lie in."""
    assert memory.block is not None
    return torch.from_numpy(memory.block.array((max(1, nbytes(memory.leaves, memory.shape)),), np.uint8))


class SentSnapshots(Snapshots):
    """Snapshots that are sent to the nodes that have subscribed to them."""

    def __init__(self, contents: SnapshotContents, published: Callable[[SentSnapshots], None]) -> None:
        """Call `published` when there is something new."""
        super().__init__(contents, private=True)
        self._published = published
        self._packing = threading.Lock()
        self._packed: tuple[Weights, Tensor] | None = None

    def publish(self, values: Values, version: int, *, releases: bool = True) -> None:
        with self._packing:  # a thread that packs just now must not be overtaken again and again
            super().publish(values, version, releases=False)
        if releases:
            self.release(version)

    def release(self, version: int) -> None:
        super().release(version)
        if self.version == version:
            self._published(self)

    def packed(self, topic: Topic) -> tuple[Weights, Tensor | None]:
        """The newest, as it is sent: put together once for all nodes."""
        with self._packing:
            version = self.newest_of(self.released)
            if version < 0:
                return Weights(topic, -1), None
            if self._packed is None or self._packed[0].version != version:
                tensors = self.contents.tensors
                memory, data = packed_memory(tensors, ())
                taken = self.copy_of(version) or {}
                memory.fill({name: value for name, value in taken.items() if name in tensors})
                names = tuple(name for name in tensors if name in taken)
                extras = {name: value for name, value in taken.items() if name not in tensors}
                self._packed = Weights(topic, version, names, extras, data.numel()), data
            return replace(self._packed[0], topic=topic), self._packed[1]


class RemoteCarrier:
    """Workers by their index, each a node."""

    is_local = False

    def __init__(self, workers: int, fields: Sequence[str], launch: Launch, node_timeout_s: float) -> None:
        """Begin without workers: there will be so many at most, which `launch` starts, and which report `fields`."""
        self.workers: list[int] = []
        self._fields, self._launch, self._timeout_s = tuple(fields), launch, node_timeout_s
        board = self._board = Board(workers, fields, private=True)
        self.heartbeat, self.report, self.unreported_steps = board.heartbeat, board.report, board.unreported_steps
        self._connections: dict[int, NodeConnection] = {}
        self._came = Event()
        self._watch = FdWatch(self._came.fd)
        self._owner = os.getpid()

    # -- control -----------------------------------------------------------------------------------------------

    def start(self, index: int, task: Task) -> None:
        if (former := self._connections.get(index)) is not None:  # it stays until there is another
            self._end([former], 0.0)
        self._board.clear(index)
        begin = Begin(task, self._fields, self._timeout_s)
        node, address = self._launch.start(index), self._launch.address
        self._connections[index] = NodeConnection(node, address, begin, self._board, index, self._came)
        self.workers = sorted({*self.workers, index})

    def stop(self, index: int, timeout_s: float = 0.0) -> None:
        if index in self.workers:
            self.workers = [worker for worker in self.workers if worker != index]
            self._end([self._connections.pop(index)], timeout_s)

    def shutdown(self, timeout_s: float | None = None) -> None:
        if os.getpid() == self._owner:
            self.workers = []
            ending, self._connections = list(self._connections.values()), {}
            self._end(ending, SHUTDOWN_S if timeout_s is None else timeout_s)
            self._launch.close()

    def _end(self, ending: Sequence[NodeConnection], timeout_s: float) -> None:
        """End nodes within the time: they are asked first, all at once."""
        deadline = time.monotonic() + timeout_s
        for connection in ending:
            connection.put(Post(Stop()))
        for connection in ending:
            connection.end(deadline)

    def send(self, index: int, message: Message) -> None:
        if (connection := self._connections.get(index)) is not None:
            connection.post(message)

    def wait(self, timeout_s: float) -> bool:
        for connection in list(self._connections.values()):
            connection.look_for_silence(self._timeout_s)
        return bool(self._watch.wait(timeout_s))

    def receive(self) -> list[tuple[int, News]]:
        self._came.lower()
        heard: list[tuple[int, News]] = []
        for index, connection in list(self._connections.items()):
            heard.extend((index, connection.news.popleft()) for _ in range(len(connection.news)))
        return heard

    def interrupt(self, index: int, ticket: int = EVERYTHING) -> None:
        if (connection := self._connections.get(index)) is not None:
            connection.put(Interrupt(ticket))

    def resume(self, index: int) -> None:
        self.interrupt(index, 0)

    # -- the nodes -----------------------------------------------------------------------------------------------

    def alive(self) -> list[int]:
        connections = dict(self._connections)
        return [index for index in self.workers if index in connections and not connections[index].is_over.is_set()]

    def is_stopped(self, index: int) -> bool:
        return (connection := self._connections.get(index)) is not None and connection.node.is_stopped()

    def kill(self, index: int) -> None:
        if (connection := self._connections.get(index)) is not None:
            connection.node.kill()

    def pid(self, index: int) -> int:
        return 0 if (connection := self._connections.get(index)) is None else connection.node.pid()

    # -- data and weights ----------------------------------------------------------------------------------------

    def lease(self, leaves: Mapping[Key, Leaf], shape: Sequence[int], device: torch.device | None) -> Columns:
        return packed_memory(leaves, shape)[0]

    def open_snapshots(self, contents: SnapshotContents) -> SnapshotStore:
        return SentSnapshots(contents, self._published)

    def subscribe(self, index: int, topic: Topic, snapshots: SnapshotStore) -> None:
        assert isinstance(snapshots, SentSnapshots)
        if (connection := self._connections.get(index)) is not None:
            connection.subscribe(topic, snapshots)

    def _published(self, snapshots: SentSnapshots) -> None:
        for connection in list(self._connections.values()):
            connection.published(snapshots)


class NodeConnection:
    """A node as its carrier sees it: one thread sends to it, one receives from it."""

    def __init__(self, node: Node, address: str, begin: Begin, board: Board, index: int, came: Event) -> None:
        self.node, self.is_over = node, threading.Event()
        self._address = address
        self.news: deque[News] = deque()
        self._board, self._index, self._came = board, index, came
        self._wire: Wire | None = None
        self._silence: Patience | None = None
        """How long nothing has come; None before the node is there."""
        self._given_up = ""
        self._outbox: queue.SimpleQueue[bytes | tuple[Topic, SnapshotContents | None] | None] = queue.SimpleQueue()
        self._stores: dict[Topic, SentSnapshots] = {}
        self._unsent: set[Topic] = set()
        """Topics whose newest weights are still to be sent."""
        self._announced: set[Topic] = set()
        """Topics that the node knows of."""
        self._turn = threading.Lock()
        self._layouts: list[Layout] = []
        """Of all batches that it was asked for."""
        self._places: dict[int, tuple[Place, Columns, Tensor]] = {}
        """Where batches go, by ticket, and where they are received: there, if the slot is of this node alone."""
        self._expected = 0
        """The last of these that the wire knows of."""
        self._spare: Columns | None = None
        self.put(begin)
        self._threads: list[threading.Thread] = []
        self._threads.append(self._thread(self._send_all))

    def _thread(self, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, daemon=True, name=f"swath node {self._index}")
        thread.start()
        return thread

    # -- to the node ---------------------------------------------------------------------------------------------

    def put(self, parcel: Parcel) -> None:
        """Send a parcel, later. What cannot be sent is an error here and now."""
        self._outbox.put(pack_parcel(parcel, self._address))

    def post(self, message: Message) -> None:
        """Send a message. Only what the layout of the place is goes with an order."""
        if not isinstance(message, Order) or message.place is None:
            return self.put(Post(message))
        place, memory = message.place, message.place.memory
        assert memory is not None
        layout: Layout = (memory.leaves, (place.rows, *memory.shape[1:]))
        if place.rows < memory.shape[0]:
            memory, self._spare = self._spare, None
            if memory is None or (memory.leaves, memory.shape) != layout:
                memory = packed_memory(*layout)[0]
        self._places[message.ticket] = place, memory, bytes_of(memory)
        is_new = layout not in self._layouts
        if is_new:
            self._layouts.append(layout)
        number = self._layouts.index(layout)
        return self.put(Post(replace(message, place=None), number, layout if is_new else None))

    def subscribe(self, topic: Topic, store: SentSnapshots) -> None:
        """Send what `store` has, and what is published there from now on."""
        with self._turn:
            self._stores[topic] = store
            self._unsent.add(topic)
        self._outbox.put((topic, store.contents))

    def published(self, store: SentSnapshots) -> None:
        """There is something newer in `store`."""
        with self._turn:
            due = [topic for topic, own in self._stores.items() if own is store and topic not in self._unsent]
            self._unsent.update(due)
        for topic in due:
            self._outbox.put((topic, None))

    def _send_all(self) -> None:
        try:
            wire = self._wire = self.node.connect()
            self._silence = Patience()
            receiving = self._thread(self._receive_all)
            self._threads.append(receiving)
            while not self.is_over.is_set():
                self._silence.waited_s()  # counted here, too, while nobody waits for nodes
                try:
                    item = self._outbox.get(timeout=PULSE_S)
                except queue.Empty:
                    item = PULSE
                if item is None:
                    break
                if isinstance(item, bytes):
                    for ticket in [ticket for ticket in list(self._places) if ticket > self._expected]:
                        self._expected = ticket
                        wire.expect(ticket, self._places[ticket][2])
                    wire.send(item)
                    continue
                for weights, data in self._publication(*item):
                    wire.send(pack_parcel(weights), data)
        except (ChannelClosedError, OSError) as error:
            if self._wire is None or self._silence is None:
                self._over(error)
            else:
                self._wire.close()  # the other thread takes what has come, and tells, unless Ray never lets it go
                while receiving.is_alive() and self._silence.waited_s() < STUCK_S:
                    receiving.join(LAST_WORDS_S)
                self._over()

    def _publication(self, topic: Topic, contents: SnapshotContents | None) -> list[tuple[Weights, Tensor | None]]:
        """The newest of `topic` and of all others that are due, as of a moment in which none was being published."""
        while not self.is_over.is_set():
            with self._turn:
                if contents is None and topic not in self._unsent:  # it was sent together with another
                    break
                self._announced.add(topic)
                stores = {known: self._stores[known] for known in self._announced}
                due = [topic, *(other for other in self._unsent if other != topic and other in self._announced)]
            released = {store.released for store in stores.values()}
            found = [(other, *stores[other].packed(other)) for other in due]
            with self._turn:
                if len(released) == 1 and {store.released for store in stores.values()} == released:
                    self._unsent.difference_update(due)
                    new = {topic: contents}
                    parcels = [(replace(weights, contents=new.get(other)), data) for other, weights, data in found]
                    last, data = parcels[-1]
                    return [*parcels[:-1], (replace(last, released=released.pop()), data)]
            time.sleep(AGAIN_S)
        return []

    # -- from the node -------------------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        assert self._wire is not None
        assert self._silence is not None
        with suppress(ChannelClosedError, OSError):
            while True:
                parcel: Parcel = pickle.loads(self._wire.receive())
                if isinstance(parcel, Sent) and parcel.size:
                    assert isinstance(parcel.news, Finished)
                    self._wire.fetch(self._places[parcel.news.ticket][2], parcel.news.ticket)
                self._silence.renew()
                match parcel:
                    case Pulse(numbers=numbers):
                        self._board.show(self._index, numbers)
                    case Sent(news=news, numbers=numbers):
                        self._board.show(self._index, numbers)
                        if isinstance(news, Finished):
                            self._settle(news.ticket)
                        self._tell(news)
                    case _:  # what a process tells by itself
                        self._tell(parcel)  # type: ignore[arg-type]
        self._over()

    def _settle(self, ticket: int) -> None:
        """Bring a batch to where it belongs, and forget the places of orders that were discarded before it."""
        place, received, _ = self._places.get(ticket, (None, None, None))
        if place is not None and place.memory is not None and place.memory is not received:
            assert received is not None
            place.memory.part(place.first_row, place.first_row + place.rows).fill(received.tensors)
            self._spare = received
        for own in [own for own in list(self._places) if own <= ticket]:
            del self._places[own]

    def _tell(self, news: News) -> None:
        self.news.append(news)
        self._came.lift()

    def look_for_silence(self, timeout_s: float) -> None:
        """Give up a node that has not been heard of for so long."""
        silence = self._silence
        if silence is None or self.is_over.is_set() or silence.waited_s() < timeout_s:
            return
        if not self._given_up:
            self._given_up = (
                f"Nothing has been heard of its node ({self.node.where or 'on this machine'}) for "
                f"node_timeout_s={timeout_s:g} seconds: its machine, or the way to it, is gone."
            )
            assert self._wire is not None
            self._wire.close()
            self._thread(self.node.kill)  # which may take long, where it is not known whether anybody listens

    def _over(self, never_came: Exception | None = None) -> None:
        if self.is_over.is_set():
            return
        if self._wire is not None:
            self._wire.close()
        if isinstance(never_came, TimeoutError):
            self._tell(Failed(Failure.of(never_came), "being waited for"))
        else:
            code = None if self._given_up else self.node.exitcode(LAST_WORDS_S)
            where = f"It ran on {self.node.where}." if self.node.where else ""
            self._tell(Ended(code, self._given_up or f"{never_came or ''} {where}".strip()))
        self.is_over.set()
        self._outbox.put(None)

    def end(self, deadline: float) -> None:
        """The node was asked to stop: wait for that until the deadline, then end it in any case."""
        while not self.is_over.wait(max(0.0, min(LOOK_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline or self.node.is_stopped():  # which hears nothing
                break
        self.node.end(max(0.0, deadline - time.monotonic()))
        if self._wire is not None:
            self._wire.close()
        self._outbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(LAST_WORDS_S)
