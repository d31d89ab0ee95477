"""SocketCarrier: workers behind sockets, with nothing in common between the two sides but bytes. Not made for speed.

It stands for a network: workers are threads of this process, but all that they get or send is pickled at one end of a
socket pair and unpickled at the other. A worker collects into memory of its own, which comes with `Finished` and is
copied to where the order wanted it. Weights are sent when they are published, steps and reports when they are made;
a board here shows them at any moment. A worker is killed by closing its connection, which it notices at its next step.
"""

import pickle
import queue
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import cloudpickle

from swath.errors import ChannelClosedError
from swath.runtime.board import Board
from swath.runtime.carrier import EVERYTHING, Ended, Finished, Message, News, Order, Stop, Subscribe, Task, Topic
from swath.runtime.columns import Columns, Place
from swath.runtime.session import Session
from swath.runtime.snapshots import SnapshotContents, Snapshots, Values


class End:
    """One end of a connection, which calls functions of the other by name. What comes is taken in by a thread."""

    def __init__(self, end: socket.socket, over: Any, **functions: Any) -> None:
        self._end, self._turn, self.is_over = end, threading.Lock(), threading.Event()
        self._over, self._functions = over, functions
        threading.Thread(target=self._listen, daemon=True).start()

    def call(self, name: str, *args: object) -> None:
        data = cloudpickle.dumps((name, args))
        with suppress(OSError), self._turn:  # nothing gets to an end that is closed
            self._end.sendall(data)

    def _listen(self) -> None:
        with suppress(EOFError, OSError, pickle.UnpicklingError), self._end, self._end.makefile("rb") as stream:
            while True:
                name, args = pickle.load(stream)
                self._functions[name](*args)
        self._over()
        self.is_over.set()

    def close(self) -> None:
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # what was sent can still be read, but neither end can send more


class SocketLink:
    """A worker's end."""

    def __init__(self, end: socket.socket) -> None:
        self.is_local, self._interrupted = False, 0
        self._mail: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._snapshots: dict[Topic, Snapshots] = {}
        functions = {"post": self._post, "interrupt": partial(setattr, self, "_interrupted"), "weights": self._keep}
        self.pool = End(end, partial(self._mail.put, None), **functions)
        self.send, self.report = partial(self.pool.call, "news"), partial(self.pool.call, "report")
        self.is_interrupted = partial(self.beat, sign="is_interrupted")

    def run(self) -> None:
        with suppress(ChannelClosedError, SystemExit):  # it was killed, or has said why it ends
            Session(self._mail.get(), self).run()
        self.pool.close()

    def _post(self, message: Task | Message, layout: Any = None) -> None:
        """The task, or a message; an order that brings data comes with their leaves and shape."""
        place = None if layout is None else Place(Columns(*layout), 0, layout[1][0])
        self._mail.put(message if place is None else replace(message, place=place))

    def _keep(
        self, topic: Topic, values: Values | None, version: int, released: int, contents: SnapshotContents | None = None
    ) -> None:
        """Weights: the first that come from where the worker has just been subscribed to come with `contents`."""
        if contents is not None:
            self._snapshots[topic] = Snapshots(contents, private=True)
            self._mail.put(Subscribe(topic, self._snapshots[topic]))
        if values is not None and version >= 0:
            self._snapshots[topic].publish(values, version, releases=False)
        self._snapshots[topic].release(released)

    def has_news(self) -> bool:
        return not self._mail.empty()

    def receive(self, *, wait: bool) -> list[Message]:
        mail = [self._mail.get()] if wait else []
        while self.has_news():
            mail.append(self._mail.get())
        if None in mail:
            raise ChannelClosedError("The connection has ended.")
        return mail

    def memory(self, place: Place) -> Columns:
        return place.memory

    def finish(self, order: Order, receipt: object) -> None:
        self.send(Finished(order.ticket, receipt), None if order.place is None else order.place.memory.arrays)

    def beat(self, ticket: int, sign: str = "beat") -> bool:
        if self.pool.is_over.is_set():
            raise ChannelClosedError("The connection has ended.")
        self.pool.call(sign, ticket)
        return self._interrupted >= ticket


class SentSnapshots(Snapshots):
    """Snapshots that are sent to those who have subscribed."""

    def __init__(self, contents: SnapshotContents) -> None:
        super().__init__(contents, private=True)
        self.subscribers: list[tuple[End, Topic]] = []

    def release(self, version: int) -> None:
        super().release(version)
        values = self.snapshot() if self.version == version else None
        for worker, topic in self.subscribers:
            worker.call("weights", topic, values, version, version)


class SocketCarrier:
    def __init__(self, workers: int, fields: tuple[str, ...] = ()) -> None:
        self.is_local, self.workers, self.open_snapshots = False, list[int](), SentSnapshots
        self._board = board = Board(workers, fields, private=True)
        self.heartbeat, self.report, self.unreported_steps = board.heartbeat, board.report, board.unreported_steps
        self._ends: dict[int, End] = {}
        self._places: dict[tuple[int, int], Place] = {}  # where data go, by worker and ticket
        self._inboxes: dict[int, queue.SimpleQueue[News]] = {}
        self._came = threading.Event()
        self.wait, self.resume = self._came.wait, partial(self.interrupt, ticket=0)

    def start(self, index: int, task: Task) -> None:
        self.stop(index, forgets=False)
        self._board.clear(index)
        self._inboxes[index] = queue.SimpleQueue()
        ours, theirs = socket.socketpair()
        row, take = self._board.row(index), partial(self._take, index)
        seen = {"beat": row.beat, "is_interrupted": row.is_interrupted, "report": row.report}
        self._ends[index] = End(ours, partial(take, Ended(-9)), news=take, **seen)
        self.workers = sorted({*self.workers, index})
        threading.Thread(target=SocketLink(theirs).run, daemon=True).start()
        self.send(index, task)

    def stop(self, index: int, timeout_s: float = 0.0, forgets: bool = True) -> None:
        if index in self.workers:
            self.workers = [worker for worker in self.workers if worker != index or not forgets]
            self.send(index, Stop())
            self._ends[index].is_over.wait(timeout_s)
            self._ends[index].close()
            self._ends[index].is_over.wait()  # nothing more of it will come

    def shutdown(self, timeout_s: float | None = None) -> None:
        deadline = time.monotonic() + (4.0 if timeout_s is None else timeout_s)
        for index in self.workers:
            self.stop(index, max(0.0, deadline - time.monotonic()))

    def send(self, index: int, message: Task | Message) -> None:
        layout = None
        if isinstance(message, Order) and message.place is not None:
            place = self._places[index, message.ticket] = message.place
            layout = (place.memory.leaves, (place.rows, *place.memory.shape[1:]))
            message = replace(message, place=None)
        self._ends[index].call("post", message, layout)

    def _take(self, index: int, news: News, arrays: dict[Any, Any] | None = None) -> None:
        if arrays is not None:
            for ticket in [own for worker, own in list(self._places) if worker == index and own <= news.ticket]:
                place = self._places.pop((index, ticket))  # those before it were discarded
            for key, column in place.memory.part(place.first_row, place.first_row + place.rows).arrays.items():
                column[...] = arrays[key]
        self._inboxes[index].put(news)
        self._came.set()

    def receive(self) -> list[tuple[int, News]]:
        self._came.clear()
        return [(i, self._inboxes[i].get()) for i in self.workers for _ in range(self._inboxes[i].qsize())]

    def interrupt(self, index: int, ticket: int = EVERYTHING) -> None:
        self._ends[index].call("interrupt", ticket)

    def alive(self) -> list[int]:
        return [index for index in self.workers if not self._ends[index].is_over.is_set()]

    def is_stopped(self, index: int) -> bool:
        return False

    def kill(self, index: int) -> None:
        self._ends[index].close()

    def pid(self, index: int) -> int:
        return 2**22 + id(self._ends[index]) % 2**30  # no process has such a number

    def lease(self, leaves: dict[Any, Any], shape: tuple[int, ...], device: Any) -> Columns:
        return Columns(leaves, shape)

    def subscribe(self, index: int, topic: Topic, snapshots: SentSnapshots) -> None:
        snapshots.subscribers.append((self._ends[index], topic))
        values = {} if snapshots.version < 0 else snapshots.snapshot()
        self._ends[index].call("weights", topic, values, snapshots.version, snapshots.released, snapshots.contents)
