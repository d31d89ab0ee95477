"""ProcessCarrier: workers are processes of their own on this machine.

Messages go through channels; batches and snapshots lie in memory that both sides map, and so need not be carried at
all. What a worker makes progress with is seen on a board in shared memory.
"""

# ruff: noqa: D102 - what the methods of carriers and links do is told in `swath.runtime.carrier`

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from swath.errors import ChannelClosedError
from swath.keys import Key
from swath.runtime.board import Board
from swath.runtime.carrier import Ended, Finished, Message, News, Order, Stop, Subscribe, Task, Topic
from swath.runtime.channel import Channel
from swath.runtime.columns import Columns, Leaf, Place
from swath.runtime.interrupts import Section
from swath.runtime.process import START_S, Process, end_all, start
from swath.runtime.session import Session
from swath.runtime.snapshots import SnapshotContents, Snapshots, SnapshotStore
from swath.runtime.watch import FdWatch

LAST_WORDS_S = 1.0
"""How long a worker whose channel has ended may take to have ended itself."""
SHUTDOWN_S = 4.0
LISTEN_S = 0.1
"""How often a worker that collects looks for messages that are too large to wait on their way."""


class ProcessCarrier:
    """Workers by their index.

    A caller who waits for one of them waits for messages and for the end of all of them, with a deadline: nothing that
    happens to a worker can make it wait for ever.
    """

    is_local = False

    def __init__(
        self,
        workers: int,
        fields: Sequence[str] = (),
        *,
        method: str = "forkserver",
        threads: int = 1,
        warns: bool = False,
        start_s: float = START_S,
    ) -> None:
        """Begin without workers: there will be so many at most, and they report `fields`.

        They are started by a `method` of `process.METHODS`, with so many `threads` for torch in each; `warns` if they
        may show all warnings, not only those of this library. What starts them may take `start_s` to be ready.
        """
        self._processes: dict[int, Process] = {}
        """Replaced, never changed: other threads may be looking."""
        board = self._board = Board(workers, fields)
        self.interrupt, self.resume, self.heartbeat = board.interrupt, board.resume, board.heartbeat
        self.report, self.unreported_steps = board.report, board.unreported_steps
        self._start_options = (method, threads, warns, start_s)
        self._watch = FdWatch()
        self._section = Section()
        self._by_fd: dict[int, int] = {}
        self._numbers: weakref.WeakKeyDictionary[Columns, int] = weakref.WeakKeyDictionary()
        """Of all memory that was leased and is still used."""
        self._leased = 0
        self._known: dict[int, set[int]] = {}
        """The numbers of memory that each worker has been sent."""
        self._owner = os.getpid()

    # -- control -----------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[int]:
        return list(self._processes)

    def start(self, index: int, task: Task) -> None:
        if (former := self._processes.get(index)) is not None:
            self._release(index)
            end_all([former], Stop(), 0.0)
        self._board.clear(index)
        self._known[index] = set()
        process = start(WorkerProcess(index, task, self._board), *self._start_options)
        with self._section:
            self._processes = dict(sorted({**self._processes, index: process}.items()))
            for fd in (process.channel.fileno(), process.sentinel):
                self._watch.add(fd)
                self._by_fd[fd] = index

    def stop(self, index: int, timeout_s: float = 0.0) -> None:
        with self._section:
            process = self._processes.get(index)
            self._processes = {key: other for key, other in self._processes.items() if key != index}
            self._release(index)
        if process is not None:
            end_all([process], Stop(), timeout_s)

    def _release(self, index: int) -> None:
        """Wait no longer for a worker that has ended."""
        with self._section:
            for fd in [fd for fd, owner in self._by_fd.items() if owner == index]:
                self._watch.remove(fd)
                del self._by_fd[fd]

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Stop all workers; see NOTE [Shutdown]. May be called again."""
        if os.getpid() != self._owner:
            return
        with self._section:
            processes, self._processes = self._processes, {}
            for index in processes:
                self._release(index)
        end_all(list(processes.values()), Stop(), SHUTDOWN_S if timeout_s is None else timeout_s)
        self._board.release()

    def send(self, index: int, message: Message) -> None:
        with self._section:
            process = self._processes.get(index)
            if process is None:
                return
            if isinstance(message, Order) and message.place is not None:
                message = replace(message, place=self._mention(index, message.place))
            with contextlib.suppress(ChannelClosedError):
                if not process.channel.post(message, by_value=not isinstance(message, Order | Subscribe)):
                    self._watch.add(process.channel.fileno(), for_room=True)  # whoever waits sends the rest

    def watch(self, fd: int) -> None:
        """Let `wait` return when `fd` is readable, too."""
        self._watch.add(fd)

    def wait(self, timeout_s: float) -> bool:
        return bool(self._watch.wait(timeout_s))

    def receive(self) -> list[tuple[int, News]]:
        """What has come, in order: messages, and `Ended` after the last one of a worker that has ended."""
        with self._section:
            indices = dict.fromkeys(self._by_fd[fd] for fd in self._watch.wait(0.0) if fd in self._by_fd)
            return [(index, news) for index in indices for news in self._heard(index)]

    def _heard(self, index: int) -> Iterator[News]:
        process = self._processes.get(index)
        if process is None:  # another thread has stopped it
            return
        has_ended = process.wait(0.0)
        try:
            if process.channel.has_unsent:
                self._send_rest(process)
            yield from process.channel.receive_rest() if has_ended else process.channel.receive_all()
        except ChannelClosedError:
            if not process.wait(LAST_WORDS_S):  # it has closed its channel, and lives on: nothing is to be had of it
                process.signal(9)
                process.wait(LAST_WORDS_S)
            has_ended = True
        if has_ended:
            self._release(index)
            yield Ended(process.exitcode)

    def _send_rest(self, process: Process) -> None:
        with contextlib.suppress(ChannelClosedError):  # what it has said before comes first
            if process.channel.flush():
                self._watch.add(process.channel.fileno())

    # -- the processes ---------------------------------------------------------------------------------------------

    def alive(self) -> list[int]:
        # A channel ends with its process at once; the server's word on how it ended comes a little later.
        return [index for index, one in self._processes.items() if not one.channel.has_ended and one.is_alive]

    def is_stopped(self, index: int) -> bool:
        return (process := self._processes.get(index)) is not None and process.is_stopped

    def kill(self, index: int) -> None:
        if (process := self._processes.get(index)) is not None:
            process.signal(9)

    def pid(self, index: int) -> int:
        return 0 if (process := self._processes.get(index)) is None else process.pid

    # -- data and weights ----------------------------------------------------------------------------------------

    def lease(self, leaves: Mapping[Key, Leaf], shape: Sequence[int], device: torch.device | None) -> Columns:
        """Shared memory, which workers write to themselves; always the CPU's."""
        memory = Columns.shared(leaves, shape)
        self._leased += 1
        self._numbers[memory] = self._leased
        return memory

    def _mention(self, index: int, place: Place) -> Place:
        """A place as a worker is told of it: with the memory itself only the first time."""
        assert place.memory is not None
        number, known = self._numbers[place.memory], self._known[index]
        forget = tuple(known - set(self._numbers.values())) if len(known) > len(self._numbers) else ()
        known.difference_update(forget)
        memory = None if number in known else place.memory
        known.add(number)
        return replace(place, memory=memory, number=number, forget=forget)

    def open_snapshots(self, contents: SnapshotContents) -> SnapshotStore:
        return Snapshots(contents)

    def subscribe(self, index: int, topic: Topic, snapshots: SnapshotStore) -> None:
        assert isinstance(snapshots, Snapshots)
        self.send(index, Subscribe(topic, snapshots))


@dataclass(frozen=True)
class WorkerProcess:
    """What a worker process runs."""

    index: int
    task: Task
    board: Board

    def __call__(self, channel: Channel) -> None:
        Session(self.task, ProcessLink(channel, self.board, self.index)).run()


class ProcessLink:
    """A worker's end."""

    is_local = False

    def __init__(self, channel: Channel, board: Board, index: int) -> None:
        self._channel = channel
        self._row = board.row(index)
        self._listened_at = perf_counter()
        self._memory: dict[int, Columns] = {}
        self.is_interrupted = self._row.is_interrupted
        self.report = self._row.report
        self.has_news = channel.has_news

    def fileno(self) -> int:
        """For `poll`: readable when a message comes."""
        return self._channel.fileno()

    def send(self, news: News) -> None:
        self._channel.send(news)

    def receive(self, *, wait: bool) -> list[Message]:
        """Messages that have come. Memory is taken note of at once: it comes along only once."""
        messages: list[Message] = [self._channel.receive()] if wait else self._channel.receive_all()
        for message in messages:
            if isinstance(message, Order) and message.place is not None:
                self._note(message.place)
        return messages

    def _note(self, place: Place) -> None:
        for number in place.forget:
            self._memory.pop(number, None)
        if place.memory is not None:
            self._memory[place.number] = place.memory
            assert place.memory.block is not None
            place.memory.block.release()

    def memory(self, place: Place) -> Columns:
        return self._memory[place.number].part(place.first_row, place.first_row + place.rows)

    def finish(self, order: Order, receipt: object) -> None:
        """Say that an order is done: the pool sees what was written."""
        self._channel.send(Finished(order.ticket, receipt))

    def beat(self, ticket: int) -> bool:
        if perf_counter() - self._listened_at > LISTEN_S:
            self._channel.take_in()
            self._listened_at = perf_counter()
        return self._row.beat(ticket)
