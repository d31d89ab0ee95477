"""Carriers: how commands, batches and weights get to workers and back.

NOTE [Carriers]: a pool (`swath.runtime.pool`) supervises workers; a carrier knows what a worker is: an object in this
process, a child process, or something on another machine. It has three planes:

- control: `start` and `stop` a worker, `send` it messages, `receive` what it has sent. A worker's messages come in
  order, and `Ended` after its last one, whatever has ended it;
- data: `lease` memory for a batch. An `Order` names the place of a worker's part in it; when its `Finished` has been
  received, the part is there, whether the worker has written it itself or the carrier has brought it;
- weights: `open_snapshots` and `subscribe` workers to them. Publishing never waits for a worker, dead or alive.

Beside these there is what can be seen without asking: a heartbeat that counts steps, and a worker's last report. And
what can be said without a message: `interrupt`, which ends work after the current step.

On the worker's side a `Link` is the other end of all this, and a `Session` (`swath.runtime.session`) does what messages
ask for. Messages are frozen dataclasses; what they bring for a worker's own job is an object that only job and pool's
owner understand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import cloudpickle
import torch

from swath.keys import Key
from swath.runtime.columns import Columns, Leaf, Place
from swath.runtime.faults import Failure
from swath.runtime.snapshots import SnapshotContents, Snapshots, SnapshotStore

EVERYTHING = 2**62
"""A ticket above all others: interrupts whatever is being done."""
Topic = tuple[str, int | None]
"""What snapshots are of: a model, and the worker that they are for if it is one alone."""


# -- to a worker ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """Work: done in the order in which it is sent, answered by one `Finished`."""

    ticket: int
    request: object
    place: Place | None = None


class Ordered(Protocol):
    """What a worker is to do: an `Order` that was sent, or the pool's own note of it where nothing has to be."""

    @property
    def ticket(self) -> int:
        """Its number: a later one has a higher."""

    @property
    def request(self) -> object:
        """What it is."""

    @property
    def place(self) -> Place | None:
        """Where to write, if there is such a place."""


@dataclass(frozen=True)
class Question:
    """Control: answered by one `Answer` as soon as no work is being done, before work that waits."""

    number: int
    request: object
    discards_work: bool = False
    """Whether orders that wait are forgotten before; they are not answered."""
    asker: int = 0
    """The thread that waits for the answer."""


@dataclass(frozen=True)
class Subscribe:
    """From now on take snapshots of `topic` from there."""

    topic: Topic
    snapshots: Snapshots


@dataclass(frozen=True)
class Stop:
    """Finish what is being done and end."""


Message = Order | Question | Subscribe | Stop

# -- from a worker -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """A worker's first news: it is ready for work, and what it says of itself."""

    description: object


@dataclass(frozen=True)
class Finished:
    """An order is done."""

    ticket: int
    receipt: object


@dataclass(frozen=True)
class Answer:
    """To a question."""

    number: int
    value: object = None
    """What was asked for; as `Packed` bytes if it comes from another process."""
    failure: Failure | Exception | None = None

    def get(self, place: str) -> object:
        """What was answered; raises what was raised, at that place."""
        if self.failure is not None:
            raise self.failure.error(place) if isinstance(self.failure, Failure) else self.failure
        return cloudpickle.loads(self.value.data) if isinstance(self.value, Packed) else self.value


@dataclass(frozen=True)
class Packed:
    """An answer pickled by value: whether it can be read here concerns only the thread that has asked."""

    data: bytes


@dataclass(frozen=True)
class Failed:
    """A worker cannot go on; it ends after this."""

    failure: Failure
    doing: str


@dataclass(frozen=True)
class Warned:
    """A warning that the user should see."""

    category: type[Warning]
    text: str


@dataclass(frozen=True)
class Ended:
    """A worker is gone without having been stopped: comes after everything that it had sent."""

    exitcode: int | None = None
    cause: str = ""
    """Why, if the carrier knows."""


News = Started | Finished | Answer | Failed | Warned | Ended

# -- both sides ----------------------------------------------------------------------------------------------------


class NotNowError(RuntimeError):
    """Something cannot be answered just now: it is asked for again afterwards, unless that waits for the asker."""

    def __init__(self, doing: str) -> None:
        """While what is being done."""
        super().__init__(
            f"A collector or env was asked for something, as by a signal handler, that it cannot do while {doing}: let "
            "the handler set a flag, and look at that afterwards."
        )


class Job(Protocol):
    """What a worker does: made there, by its task."""

    def describe(self) -> object:
        """What the pool is told first."""

    def work(self, order: Ordered, has_questions: Callable[[], bool]) -> object:
        """Do an order and return its receipt. What is raised ends the worker.

        Where an order is done in parts, `has_questions` tells between them whether it should end early.
        """

    def answer(self, request: object) -> object:
        """Answer a question. What is raised goes to the thread that has asked, and the worker goes on."""

    def idle(self) -> None:
        """Nothing is left to do until the next message comes; may return before."""

    def subscribe(self, topic: Topic, snapshots: Snapshots) -> None:
        """Take snapshots of `topic` from there."""

    def stop(self) -> None:
        """Free everything."""


class Task(Protocol):
    """What a worker is started for. It is sent by value."""

    def begin(self, link: Link) -> Job:
        """Make the job, in the worker."""


class Link(Protocol):
    """A worker's end of its carrier. Once the pool's end is gone, its methods raise ChannelClosedError."""

    @property
    def is_local(self) -> bool:
        """Whether this is the pool's own process and thread, where errors are simply raised."""

    def send(self, news: News) -> None:
        """Send to the pool."""

    def has_news(self) -> bool:
        """Whether a message has come."""

    def receive(self, *, wait: bool) -> list[Message]:
        """Messages that have come, in order; with `wait`, at least one."""

    def memory(self, place: Place) -> Columns:
        """Where to write a part of a batch; the same object each time that the place is the same."""

    def finish(self, order: Order, receipt: object) -> None:
        """Send `Finished`, with what was written to the order's place where the pool does not see it by itself."""

    def beat(self, ticket: int) -> bool:
        """Count a step, made for the order `ticket`; whether that order is to end here."""

    def is_interrupted(self, ticket: int) -> bool:
        """Whether the order is to end. A sign of life too, for a worker that waits without stepping."""

    def report(self, numbers: Mapping[str, float]) -> None:
        """Let the pool see `numbers`. All steps so far have been reported with it.

        A local link takes a function of no arguments too, and calls it when the numbers are looked at.
        """


class Carrier(Protocol):
    """The pool's end; see NOTE [Carriers]. Methods are called by one thread at a time, except where said."""

    @property
    def is_local(self) -> bool:
        """Whether workers work in the thread that waits for them, so that they can be asked only while none does."""

    @property
    def workers(self) -> list[int]:
        """The indices of workers that were started and not stopped, in order, whether they live or not.

        A worker that is being replaced stays among them. From any thread.
        """

    def start(self, index: int, task: Task) -> None:
        """Start a worker, in the place of a former one of that index."""

    def stop(self, index: int, timeout_s: float = 0.0) -> None:
        """Stop a worker and forget it."""

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Stop all workers within the time, whatever they do. May be called again, and from any thread."""

    def send(self, index: int, message: Message) -> None:
        """Send to a worker. One that has ended gets nothing: `Ended` tells of it."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for news; whether there may be some. Takes nothing away: it can be interrupted at any moment."""

    def receive(self) -> list[tuple[int, News]]:
        """All news, without waiting."""

    def interrupt(self, index: int, ticket: int = EVERYTHING) -> None:
        """End orders up to `ticket` after the current step, also those still to be sent, until `resume`. Any thread."""

    def resume(self, index: int) -> None:
        """Interrupt nothing more. From any thread."""

    def heartbeat(self, index: int) -> int:
        """A number that grows as long as the worker makes progress. From any thread."""

    def report(self, index: int) -> dict[str, float]:
        """The last numbers that the worker has reported, and the `steps` that it has made. From any thread."""

    def unreported_steps(self, index: int) -> int:
        """Steps that the worker has made since its last report."""

    def alive(self) -> list[int]:
        """The indices of workers that have not ended. From any thread."""

    def is_stopped(self, index: int) -> bool:
        """Whether the system has stopped the worker, as by SIGSTOP or a debugger. From any thread."""

    def kill(self, index: int) -> None:
        """End a worker at once; its end is reported as any other. From any thread."""

    def pid(self, index: int) -> int:
        """The process that the worker runs in; 0 if it has none, or has just been stopped. From any thread."""

    def lease(self, leaves: Mapping[Key, Leaf], shape: Sequence[int], device: torch.device | None) -> Columns:
        """Memory for a batch."""

    def open_snapshots(self, contents: SnapshotContents) -> SnapshotStore:
        """Where to publish snapshots of `contents`."""

    def subscribe(self, index: int, topic: Topic, snapshots: SnapshotStore) -> None:
        """Let a worker take snapshots of `topic` from there."""
