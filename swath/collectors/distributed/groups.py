"""Process groups: parcels go through a channel, batches and weights through a group of two ranks.

Trainer and node have a group of their own, in which the trainer is rank 0: a node that dies breaks nobody else's group,
and another can take its place. The two find each other through the channel that they have already, so that there is no
store at which strangers could knock.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swath.errors import ChannelClosedError
from swath.runtime.channel import Channel
from swath.runtime.rounds import Event

BACKENDS = ("gloo", "nccl", "mpi", "ucc")
LOOPBACK = "127.0.0.1"
MOST_TAGS = 2**30
MEET_S = 60.0
"""How long two sides that are connected may take to form a group."""
FORM_S = 10.0
"""How long one that has told where it listens may take to come, if it has not ended; gloo tries five times."""


def check_backend(backend: str) -> None:
    """Refuse a backend that is unknown, or that this torch has not."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown: use one of {', '.join(BACKENDS)}.")
    if not dist.is_available() or not getattr(dist, f"is_{backend}_available")():
        raise RuntimeError(
            f"backend={backend!r}: this torch ({torch.__version__}) was built without it; use backend='gloo', or a "
            "torch that has it."
        )


class MeetingStore(dist.Store):
    """What two ranks tell each other to form a group, told through their channel."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self.channel = channel
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:  # noqa: D102 - see torch's Store
        value = value.encode() if isinstance(value, str) else bytes(value)
        self._known[key] = value
        self.channel.send((key, value))

    def get(self, key: str) -> bytes:  # noqa: D102 - see torch's Store
        deadline = time.monotonic() + MEET_S
        while key not in self._known:
            name, value = self.channel.receive(max(0.0, deadline - time.monotonic()))
            self._known[name] = value
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: D102 - see torch's Store
        for key in keys:
            self.get(key)


class GroupWire:
    """A channel for parcels, and a process group of two for their bodies."""

    def __init__(self, channel: Channel, rank: int, backend: str, timeout_s: float) -> None:
        """Form the group, as `rank`, with the other side of `channel`; listen where that has reached us, if at all."""
        self._channel, self._peer = channel, 1 - rank
        self._turn = threading.Lock()
        """A body must follow its parcel."""
        self._is_gloo = backend == "gloo"
        self._expected: dict[int, Any] = {}
        """Bodies by their numbers. Gloo's sender waits until it is told where they go, which they spare it."""
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        store, timeout = MeetingStore(channel), timedelta(seconds=timeout_s)
        self._patience = (timeout,) if self._is_gloo else ()
        """How long gloo may take, told each time: once it has formed a group, it takes no other."""
        kind: Any = getattr(dist, "ProcessGroupGloo" if backend == "gloo" else f"ProcessGroup{backend.upper()}")
        how: Any = timeout
        if self._is_gloo:
            how = kind._Options()
            how._devices = [kind.create_device(hostname=channel.address or LOOPBACK)]
            how._timeout = min(timeout, timedelta(seconds=FORM_S))

        def form() -> Any:
            group = kind(store, rank, 2, how)
            group.barrier().wait(*self._patience)  # both are there, and what was told is read
            return group

        with self._until_it_ends():
            self._group = self._formed(form)

    def _formed(self, form: Callable[[], Any]) -> Any:
        """What `form` returns, unless the other side ends before.

        Gloo waits for one that has told where it listens, also when it has been killed, or that was reached and goes no
        further, and cannot be stopped: so it does that in a thread of its own, which is left to itself then.
        """
        group, is_over = Future[Any](), Event()

        def run() -> None:
            try:
                group.set_result(form())
            except BaseException as error:
                group.set_exception(error)
            is_over.lift()

        thread = threading.Thread(target=run, daemon=True, name="swath group")
        thread.start()
        watch = select.poll()
        watch.register(is_over.fd, select.POLLIN)
        watch.register(self._channel, select.POLLRDHUP)
        try:
            watch.poll()
        finally:
            has_ended = not group.done()
            if has_ended:  # or this was interrupted
                self.close()
                thread.join(0.2)  # if it waits for the channel: one that is in torch while Python ends, aborts it
        if has_ended:
            raise ChannelClosedError("The other side has ended before there was a process group.")
        return group.result()

    def send(self, parcel: bytes, body: Tensor | None = None, number: int = 0) -> None:  # noqa: D102 - see `Wire`
        with self._turn:
            self._channel.send(parcel)
            if body is not None:
                with self._until_it_ends():
                    self._group.send([body.to(self._device)], self._peer, self._tag(number)).wait(*self._patience)

    def receive(self) -> bytes:  # noqa: D102 - see `Wire`
        parcel = self._channel.receive()
        return parcel if isinstance(parcel, bytes) else pickle.dumps(parcel)  # what a process tells by itself

    def _tag(self, number: int) -> int:
        return number % MOST_TAGS if self._is_gloo else 0  # others have no tags, or few

    def expect(self, number: int, space: Tensor) -> None:  # noqa: D102 - see `Wire`
        if self._is_gloo:
            with self._until_it_ends():
                self._expected[number] = self._group.recv([space], self._peer, self._tag(number))

    def fetch(self, space: Tensor, number: int = 0) -> None:  # noqa: D102 - see `Wire`
        landed = space if self._device.type == "cpu" else torch.empty_like(space, device=self._device)
        with self._until_it_ends():
            work = self._expected.pop(number, None)
            (work or self._group.recv([landed], self._peer, self._tag(number))).wait(*self._patience)
        for own in [own for own in list(self._expected) if own < number]:  # which the node has discarded
            del self._expected[own]
        if landed is not space:
            space.copy_(landed)

    @contextlib.contextmanager
    def _until_it_ends(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what a group raises when the other side is gone, or too slow
            self.close()
            raise ChannelClosedError(f"The process group has ended: {error}") from error

    def close(self) -> None:  # noqa: D102 - see `Wire`
        self._channel.end()
