"""Ray: nodes are actors. Imported where Ray is used.

NOTE [Ray]: three methods of an actor run in threads of their own:

- `push` brings a parcel. Ray keeps the order of calls. Weights go by way of the object store, where they are put once
  for all actors, and from where each machine fetches them once.
- `stream` takes parcels away: a generator, each of whose elements Ray sends to the driver as soon as it is made, so
  that nobody polls. A batch is written to the object store from where it was collected, and copied by the driver from
  there to its slot. When the generator is resumed, it has been written.
- `run` is the node itself: its result is what Ray knows of its end.

Ray restarts no actor by itself, as the pool does that: a new actor is placed on any machine that has room.
"""

# ruff: noqa: D102 - what the methods of wires and nodes do is told in `wire`

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from swath.collectors.distributed.node import serve
from swath.collectors.distributed.wire import PULSE_S, pack_parcel
from swath.errors import ChannelClosedError
from swath.runtime.child import settle
from swath.runtime.liveness import state_of
from swath.runtime.ray_calls import FAILURES, LOOK_S, Spot, check_ray, first_answer, get, kill, put, said_of, wait

GROUPS = {"in": 1, "out": 1}
"""The threads of an actor beside that of its node."""
INTO, OUT = {"concurrency_group": "in"}, {"concurrency_group": "out", "num_returns": "streaming"}
SMALL = 64 * 1024
"""Up to so many bytes a body goes along with its parcel, which is faster than by way of the object store."""
COME = 0.9
"""The part of `start_timeout_s` within which an actor must be there: so the error tells that it was this."""


class BodyWire:
    """What both ends have in common: the body of the last parcel."""

    _body: np.ndarray | None = None

    def expect(self, number: int, space: Tensor) -> None:
        pass

    def fetch(self, space: Tensor, number: int = 0) -> None:
        assert self._body is not None
        np.copyto(space.numpy(), self._body)
        self._body = None  # its memory in the object store is free again


# -- in the actor ----------------------------------------------------------------------------------------------------


class ActorWire(BodyWire):
    """The node's end, to which the methods of the actor bring parcels and from which they take them."""

    def __init__(self) -> None:
        self._incoming: queue.SimpleQueue[tuple[bytes, np.ndarray | None] | None] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[tuple[bytes, np.ndarray | None, threading.Event] | None] = queue.SimpleQueue()
        self._is_closed = False

    def bring(self, parcel: bytes, body: np.ndarray | None) -> None:
        """A parcel has come."""
        self._incoming.put((parcel, body))

    def taken(self) -> Iterator[tuple[bytes, np.ndarray | None]]:
        """All that is sent, until the end."""
        while (one := self._outgoing.get()) is not None:
            parcel, body, has_left = one
            yield parcel, body
            has_left.set()

    def send(self, parcel: bytes, body: Tensor | None = None, number: int = 0) -> None:
        has_left = threading.Event()
        self._outgoing.put((parcel, None if body is None else body.numpy(), has_left))
        while not self._is_closed:
            if body is None or has_left.wait(PULSE_S):
                return
        raise ChannelClosedError("The connection to the trainer has ended.")

    def receive(self) -> bytes:
        if (one := self._incoming.get()) is None:
            raise ChannelClosedError("The connection to the trainer has ended.")
        parcel, self._body = one
        return parcel

    def close(self) -> None:
        self._is_closed = True
        self._incoming.put(None)
        self._outgoing.put(None)


class ActorNode:
    """What becomes an actor; see NOTE [Ray]."""

    def __init__(self) -> None:
        self._wire = ActorWire()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # otherwise Ray would wait for `run` to return

    def arrive(self) -> Spot:
        """Where it runs."""
        return Spot.here()

    def push(self, parcel: bytes, body: np.ndarray | None = None) -> None:
        """Take a parcel in."""
        self._wire.bring(parcel, body)

    def stream(self) -> Iterator[tuple[bytes, np.ndarray | None]]:
        """Give parcels away."""
        yield from self._wire.taken()

    def run(self, paths: Sequence[str], threads: int, warns_itself: bool) -> None:
        """Be a node, which can import what lies at the trainer's `paths` if it is here, too."""
        sys.path.extend(path for path in paths if path not in sys.path)
        settle(lambda warned: self._wire.send(pack_parcel(warned)), threads, warns_itself)
        serve(self._wire)


# -- in the driver ---------------------------------------------------------------------------------------------------


class StoredBodies:
    """Bodies in the object store: each is put there once, and lies there as long as the tensor lives."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._references = WeakTensorKeyDictionary()

    def argument(self, body: Tensor | None) -> Any:
        """What to call an actor with for `body`: a reference, or the bytes themselves if they are few."""
        if body is None or body.numel() <= SMALL:
            return None if body is None else body.numpy()
        with self._turn:
            if body not in self._references:
                self._references[body] = put(body.numpy())
            return self._references[body]


class RayWire(BodyWire):
    """The trainer's end."""

    def __init__(self, node: RayNode, bodies: StoredBodies) -> None:
        self._node, self._bodies = node, bodies
        self._has_ended = False
        self._push = node.actor.push.options(**INTO, num_returns=0)
        self._stream = node.actor.stream.options(**OUT).remote()

    def send(self, parcel: bytes, body: Tensor | None = None, number: int = 0) -> None:
        check_ray()
        try:
            self._push.remote(parcel, self._bodies.argument(body))
        except FAILURES as error:
            raise ChannelClosedError(f"Ray could not send to an actor: {error}") from error

    def receive(self) -> bytes:
        try:
            while not wait([self._stream], timeout=LOOK_S, fetch_local=False)[0]:
                check_ray()
            check_ray()
            parcel, self._body = get(next(self._stream))
        except FAILURES as error:  # the stream has ended, or the actor, or Ray
            self._has_ended = True
            raise ChannelClosedError(f"Ray could not receive from an actor: {error}") from error
        assert isinstance(parcel, bytes)
        return parcel

    def close(self) -> None:
        if not self._has_ended:
            self._node.kill()


class RayNode:
    """An actor, seen from the trainer."""

    def __init__(self, actor: Any, life: Any, bodies: StoredBodies, wants: Mapping[str, Any], start_s: float) -> None:
        """Take `start_s` for the time in which Ray must find a machine for `actor`, with all that it `wants`.

        `life` is what its `run` returns.
        """
        self.actor = actor
        self._life, self._bodies, self._wants, self._limit_s = life, bodies, wants, COME * start_s
        self._spot: Spot | None = None
        self._is_here = False
        self._last_words = ""

    @property
    def where(self) -> str:
        spot = self._spot
        where = "no machine yet" if spot is None else f"{spot.address}, as the Ray actor {spot.actor}"
        return f"{where}. Ray says: {self._last_words}" if self._last_words else where

    def connect(self) -> RayWire:
        try:
            arrival = self.actor.arrive.options(**INTO).remote()
            spot = self._spot = first_answer(arrival, self._wants, self._limit_s, "node", "remote_configs")
            self._is_here = spot.node == ray.get_runtime_context().get_node_id()
            return RayWire(self, self._bodies)
        except TimeoutError:
            raise
        except FAILURES as error:
            raise ChannelClosedError(f"The actor was never there: {said_of(error)}.") from error

    def pid(self) -> int:
        return 0 if self._spot is None else self._spot.pid

    def exitcode(self, timeout_s: float) -> int | None:
        try:
            get(self._life, timeout=timeout_s)
        except TimeoutError:
            pass
        except FAILURES as error:
            self._last_words = said_of(error)
        return None  # Ray does not tell

    def is_stopped(self) -> bool:
        with suppress(OSError, IndexError):  # it has ended
            return self._is_here and state_of(self.pid())[0] in "tT"
        return False

    def kill(self) -> None:
        with suppress(*FAILURES):  # Ray was shut down
            kill(self.actor)
            if self.is_stopped():  # Ray would ask it first, and wait
                os.kill(self.pid(), signal.SIGKILL)

    def end(self, timeout_s: float) -> None:
        self.kill()  # whether it has ended was waited for already


class RayLaunch:
    """Starts nodes as actors."""

    def __init__(self, start_s: float, threads: int, warns_itself: bool) -> None:
        """Give Ray so long to start one. Each has so many threads of torch, and may show warnings itself or not."""
        self.wants: list[dict[str, Any]] = []
        """Options of the actors, by index."""
        self.nodes: dict[int, RayNode] = {}
        """The last of each index."""
        self._start_s, self._run = start_s, (list(sys.path), threads, warns_itself)
        self._bodies = StoredBodies()
        self._actors = ray.remote(concurrency_groups=GROUPS, max_restarts=0, max_task_retries=0)(ActorNode)

    def __call__(self, index: int) -> RayNode:
        check_ray()
        wants = self.wants[index]
        actor = self._actors.options(**wants).remote()
        self.nodes[index] = RayNode(actor, actor.run.remote(*self._run), self._bodies, wants, self._start_s)
        return self.nodes[index]
