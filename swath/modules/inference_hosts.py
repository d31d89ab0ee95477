"""Where an inference server runs: in a thread of this process, or in a process of its own."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from swath.errors import ClosedError, WorkerDiedError
from swath.keys import Key, as_key
from swath.modules.inference_connections import Connection
from swath.modules.inference_doors import DIED, LocalDoor, RemoteDoor
from swath.modules.inference_loop import InferenceLoop
from swath.modules.inference_settings import InferenceSettings
from swath.modules.inference_wire import PolicySignature, TravellingEnd
from swath.modules.probe import guessed_shapes
from swath.runtime.carrier import Link, Ordered, Task, Topic
from swath.runtime.pool import Pool
from swath.runtime.processes import ProcessCarrier, ProcessLink
from swath.runtime.snapshots import Snapshots
from swath.runtime.supervision import Supervision
from swath.runtime.work import Work
from swath.weights import WeightLayout

LAST_WORDS_S = 1.0
SHUT_DOWN = "The InferenceServer was shut down."


@dataclass(frozen=True)
class Change:
    """Something to do to the policy between two batches, and whether it counts as another version."""

    function: Callable[[Any], Any]
    counts: bool


@dataclass(frozen=True)
class GetStats:
    """How the server is doing."""

    reset: bool


def signature_of_policy(policy: Any) -> PolicySignature:
    """What clients should know of `policy`."""
    return PolicySignature(_keys(policy, "in_keys"), _keys(policy, "out_keys"), tuple(guessed_shapes(policy)))


def _keys(policy: Any, name: str) -> tuple[Key, ...] | None:
    keys = getattr(policy, name, None)
    if keys is None:
        return None
    return (keys,) if isinstance(keys, str) else tuple(as_key(key) for key in keys)


def _layout(policy: Any) -> WeightLayout | None:
    return WeightLayout.of(policy) if isinstance(policy, nn.Module) else None


def _placed(policy: Any, settings: InferenceSettings) -> Any:
    if not callable(policy):
        raise TypeError(f"The policy must be a module or a callable, got {type(policy).__name__}: {policy!r}.")
    return policy.to(settings.device) if isinstance(policy, nn.Module) and settings.device is not None else policy


def _stats(loop: InferenceLoop, reset: bool) -> dict[str, float]:
    figures = {**loop.stats.summary(), "policy_version": loop.version, "remote_clients": loop.remote_clients}
    if reset:
        loop.stats.reset()
    return figures


class ThreadHost:
    """A thread that owns the policy."""

    def __init__(self, policy: Any, settings: InferenceSettings, version: int) -> None:
        """Not started yet."""
        self._loop = InferenceLoop(_placed(policy, settings), settings, version)
        self._door = LocalDoor(self._loop)
        self.signature, self.layout = signature_of_policy(policy), _layout(policy)
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="swath-inference", daemon=True)
        self.pid = os.getpid()

    @property
    def is_alive(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive() and self._loop.closed is None

    @property
    def version(self) -> int:
        """The version of the policy."""
        return self._loop.version

    def start(self) -> None:
        """Start the thread."""
        self._loop.closed = None
        self._thread.start()
        atexit.register(self.stop, 1.0)  # a thread that runs torch must not be there when the interpreter goes

    def stop(self, timeout_s: float) -> None:
        """Wait for the batch that is being served, but not for a policy that hangs."""
        if self._loop.closed is None:
            self._loop.stop(SHUT_DOWN)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._loop.close(SHUT_DOWN)
        atexit.unregister(self.stop)

    def door(self) -> LocalDoor:
        """The same for all."""
        return self._door

    def change(self, change: Change) -> Any:
        """Let the thread do it."""
        return self._loop.call(lambda: self._loop.change(change.function, counts=change.counts))

    def stats(self, reset: bool) -> dict[str, float]:
        """How it is doing."""
        return _stats(self._loop, reset)


def _serve(loop: InferenceLoop) -> None:
    """What the thread does."""
    reason = SHUT_DOWN
    try:
        loop.serve()
    except BaseException as error:
        reason = f"The thread of the InferenceServer has died of {type(error).__name__}: {error}"
    finally:
        loop.close(reason)


# -- a process of its own ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InferenceTask:
    """What a server's process is started for."""

    policy: Any
    policy_factory: Callable[[], Any] | None
    settings: InferenceSettings
    version: int
    end: TravellingEnd
    """The server's end of the first connection."""

    def begin(self, link: Link) -> InferenceJob:
        """Make the policy, in the process."""
        assert isinstance(link, ProcessLink)
        policy = self.policy if self.policy_factory is None else self.policy_factory()
        loop = InferenceLoop(_placed(policy, self.settings), self.settings, self.version, news=link.fileno())
        loop.closed = None
        loop.add(Connection(self.end.end))
        return InferenceJob(loop, link)


class InferenceJob:
    """A server in its process: it serves whenever its parent wants nothing of it."""

    def __init__(self, loop: InferenceLoop, link: Link) -> None:
        """Serve with `loop`."""
        self._loop, self._link = loop, link

    def describe(self) -> tuple[PolicySignature, WeightLayout | None]:
        """What the parent must know of the policy."""
        return signature_of_policy(self._loop.policy), _layout(self._loop.policy)

    def work(self, order: Ordered, has_questions: Callable[[], bool]) -> object:
        """There are no orders."""
        raise TypeError(f"An InferenceServer cannot understand {order.request!r}.")

    def answer(self, request: object) -> object:
        """Between two batches."""
        match request:
            case Change(function=function, counts=counts):
                return self._loop.change(function, counts=counts), self._loop.version
            case GetStats(reset=reset):
                return _stats(self._loop, reset)
        raise TypeError(f"An InferenceServer cannot understand {request!r}.")

    def idle(self) -> None:
        """Serve."""
        self._loop.serve()

    def subscribe(self, topic: Topic, snapshots: Snapshots) -> None:
        """Weights come with a question."""

    def stop(self) -> None:
        """Tell all clients."""
        self._loop.close(SHUT_DOWN)


class ProcessHost:
    """A process that owns the policy. Clients talk to it directly."""

    def __init__(
        self,
        policy: Any,
        policy_factory: Callable[[], Any] | None,
        settings: InferenceSettings,
        version: int,
        start_timeout_s: float,
        method: str,
        threads: int,
    ) -> None:
        """Not started yet."""
        self._made = (policy, policy_factory, settings)
        self.version = version
        self._pool: Pool[Work] = Pool(
            ProcessCarrier(1, method=method, threads=threads, start_s=start_timeout_s),
            1,
            self,
            Supervision(start_timeout_s=start_timeout_s),
            "InferenceServer",
            doing=lambda _: "it was serving",
        )
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._door: RemoteDoor | None = None

    def task(self, index: int, replaces: bool) -> Task:
        """What to start the process for."""
        assert self._ends is not None
        return InferenceTask(*self._made, self.version, TravellingEnd(self._ends[0]))

    def lost(self, index: int) -> None:
        """It is not replaced."""

    def restarted(self, index: int) -> None:
        """It is not replaced."""

    @property
    def is_alive(self) -> bool:
        """Whether the process is there."""
        return bool(self._pool.carrier.alive())

    @property
    def pid(self) -> int:
        """The server's process; 0 if there is none."""
        return self._pool.carrier.pid(0) if self._pool.indices else 0

    @property
    def signature(self) -> PolicySignature:
        """What the process has told."""
        return self._described[0]

    @property
    def layout(self) -> WeightLayout | None:
        """What the process has told."""
        return self._described[1]

    @property
    def _described(self) -> tuple[PolicySignature, WeightLayout | None]:
        if self._door is None:
            raise ClosedError("The InferenceServer is not started: call start() before.")
        return self._description

    def start(self) -> None:
        """Start the process, and wait until it has made the policy."""
        self._ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        theirs, ours = self._ends
        try:
            self._pool.start()
        except BaseException:
            self._pool.shutdown(1.0)
            ours.close()
            raise
        finally:
            theirs.close()
        described = self._pool.started[0]
        assert isinstance(described, tuple)
        self._description: tuple[PolicySignature, WeightLayout | None] = described
        self._door = RemoteDoor(ours, self._explain)

    def _explain(self) -> str:
        """Why the server is gone."""
        if self._pool.is_closed:
            return SHUT_DOWN
        deadline = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < deadline:  # how it has ended is known a little later
            try:
                self._pool.attend(LAST_WORDS_S)
            except ClosedError:
                return SHUT_DOWN
            except WorkerDiedError as error:
                return f"The InferenceServer has died. {error}"
            except Exception as error:
                return f"The InferenceServer has died of {type(error).__name__}: {error}"
        return DIED

    def stop(self, timeout_s: float) -> None:
        """Stop the process; see NOTE [Shutdown]."""
        self._pool.shutdown(timeout_s)
        if self._door is not None:
            self._door.close()

    def door(self) -> RemoteDoor:
        """The same for all."""
        if self._door is None:
            raise ClosedError("The InferenceServer is not started: call start() before.")
        return self._door

    def change(self, change: Change) -> Any:
        """Let the process do it."""
        result, self.version = self._ask(change, "a change of the policy")
        return result

    def stats(self, reset: bool) -> dict[str, float]:
        """How it is doing."""
        found: dict[str, float] = self._ask(GetStats(reset), "stats()")
        return found

    def _ask(self, request: object, what: str) -> Any:
        if self._pool.is_closed or self._door is None:
            raise ClosedError("The InferenceServer is not started, or was shut down.")
        return self._pool.ask({0: request}, what)[0]


Host = ThreadHost | ProcessHost
