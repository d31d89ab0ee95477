"""The loop of an inference server: waits for requests, puts them into batches, answers them.

NOTE [Serving]: one thread serves at a time: the server's own, or one that asks (NOTE [Leading]). Requests of threads of
its process come through a deque, without a copy and without a lock: whoever asks appends, and rings only if the server
sleeps; what has come is seen either by the look that the server takes before it goes to sleep, or by the one who rings.
Requests of other processes come through connections (NOTE [Connections]). As long as there are none, the server sleeps
on a lock, which costs a thread that rings it nothing but the lock, otherwise in `poll`.

A batch is made of the requests that have come first. It is served when there are `min_batch_size` of them, or when
`timeout` has passed since the first of them came; whatever else has come by then goes along, up to `max_batch_size`.
Requests with different entries or exploration types cannot share a forward, and get one each.

Those who were just answered will ask again, most of them soon. So the server waits a moment for as many requests as
there were before: for as long as another comes within the time that the last batch took, and no longer than `timeout`
for the first of them. Without that, clients that work at
the same pace would be served in small groups, one after the other.

Whatever changes the policy is done by the server's thread between two batches, so that no answer is made of two
versions.

NOTE [Leading]: to wake another thread and to be woken takes longer than the forward of a small network. So a thread
that waits for its answer serves the batch itself, with all requests that have come, if nobody serves just now. It must
be a forward that calls no module: nothing of the user's runs in a thread that he has not meant it for, and nothing that
is set for that thread alone (exploration, devices, autocast) can touch the answers of others. All else is done by the
server's thread: whoever serves holds the turn, and the server's thread lets it go only while it sleeps without a
request. Whoever leads looks for requests once more when it has given the turn back, and rings if there are any; so
those who find the turn taken need not ring. And nobody leads while the server's thread has something else to do.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any

import torch
from tensordict.nn import InteractionType

from swath.errors import ClosedError
from swath.modules.inference_connections import Connection, RemoteRequest, Request
from swath.modules.inference_forward import Forward, Leaves
from swath.modules.inference_settings import InferenceSettings
from swath.modules.inference_stats import InferenceStats
from swath.modules.inference_wire import Ask, Claimed, Goodbye, Hello, Introduce
from swath.runtime.faults import Failure
from swath.runtime.rounds import Event

LOOK_S = 1.0
"""How often a thread that waits looks whether it should have been woken: an interrupt may have come between."""
WAKE_S = 50e-6
"""About how long it takes to wake a thread."""


class InferenceLoop:
    """A policy that answers requests; see NOTE [Serving].

    `submit`, `add`, `call` and `ring` may be called by any thread; all else is done by the one that runs `serve`.
    """

    def __init__(self, policy: Any, settings: InferenceSettings, version: int, *, news: int | None = None) -> None:
        """Serve `policy`; `serve` returns when the descriptor `news` is readable."""
        self.policy, self.settings, self.version = policy, settings, version
        self.stats = InferenceStats(settings.stats_window, settings.max_batch_size)
        self.closed: ClosedError | None = ClosedError("The InferenceServer is not started: call start() before.")
        """Why nothing is answered."""
        self._forwards: dict[tuple[Leaves, InteractionType | None], Forward] = {}
        # Torch's own generator is the trainer's, if it is in the same process.
        self._generator = torch.Generator().manual_seed(int(torch.randint(2**62, (), device="cpu")))
        self._pending: deque[Request] = deque()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._added: deque[Connection] = deque()
        self._connections: dict[int, Connection] = {}
        self._turn = allocate_lock()
        """Held by the thread that serves."""
        self._is_led = False
        """Whether it is a thread that asks; see NOTE [Leading]."""
        self._is_asleep = False
        self._bell = allocate_lock()
        self._bell.acquire()
        self._event: Event | None = None
        self._poll = select.poll()
        self._news = news
        self._is_stopping = False
        self._wanted = self._expected = 1
        self._forward_s = 0.0
        self._in_forward: list[Request] = []
        if news is not None:
            self._poll.register(news, select.POLLIN)
            self._listen()

    # -- from any thread ---------------------------------------------------------------------------------------

    def submit(self, request: Request, *, rings: bool = True) -> None:
        """Let `request` be answered; without `rings` only when `lead` is called, which whoever waits for it does."""
        self._pending.append(request)
        if self.closed is not None:
            self._refuse_pending(self.closed)
        elif rings:
            self._ring_if_due()

    def lead(self, request: Request) -> float:
        """Serve the batch of `request` if all are there, that is quick, and nobody serves; else let it be served.

        Returns for how many seconds to wait for the answer before this is called again. For as long as others are
        expected, whoever came first watches over the batch.
        """
        forward, settings = request.layout.forward, self.settings
        is_free = self.closed is None and not self._calls and settings.min_batch_size == 1
        if not is_free or forward is None or forward.kind is not request.kind or not forward.is_quick:
            self._ring_if_due()
            return LOOK_S
        missing = self._expected - len(self._pending)
        if missing > 0 and (left := request.arrived + settings.timeout - perf_counter()) > 0:
            if not self._is_first(request):
                return LOOK_S
            if missing != request.missing:  # else nobody has come since
                request.missing = missing
                return min(missing * max(self._forward_s, WAKE_S), left)
        if self._turn.acquire(False):
            self._is_led = True
            try:
                self._serve_batch()
            finally:
                self._is_led = False
                self._turn.release()
        if not self._is_led:
            self._ring_if_due()
        return LOOK_S

    def _is_first(self, request: Request) -> bool:
        try:
            return self._pending[0] is request
        except IndexError:  # all are being served
            return False

    def _ring_if_due(self) -> None:
        if self._is_asleep and len(self._pending) >= self._wanted:
            self.ring()

    def add(self, connection: Connection) -> None:
        """Serve a new connection."""
        if self.closed is not None:
            connection.close()
            raise ClosedError(str(self.closed))
        self._added.append(connection)
        self.ring()

    def call(self, function: Callable[[], Any]) -> Any:
        """Let the serving thread call `function` between two batches, and return what it returns."""
        future: Future[Any] = Future()
        self._calls.append((future, function))
        self.ring()
        if self.closed is not None:
            self._end_calls(self.closed)
        return future.result()

    def stop(self, reason: str) -> None:
        """Let `serve` return after the batch that is being served; all others who wait are told at once."""
        self.closed = ClosedError(reason)
        self._refuse_pending(self.closed)
        self._is_stopping = True
        self.ring()

    def ring(self) -> None:
        """Wake the serving thread."""
        self._is_asleep = False
        if self._event is not None:
            with contextlib.suppress(OSError, ValueError):  # it is closed
                self._event.lift()
        with contextlib.suppress(RuntimeError):  # it is awake, or another has rung
            self._bell.release()

    # -- the serving thread ------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer requests, until it is stopped or there is news."""
        settings, pending = self.settings, self._pending
        with self._turn, torch.no_grad():
            while True:
                if self._attend(0.0, 0) or self._await_expected():
                    return
                while not pending:
                    if self._attend(None, 1):
                        return
                deadline = pending[0].arrived + settings.timeout
                while len(pending) < settings.min_batch_size and (left := deadline - perf_counter()) > 0:
                    if self._attend(left, settings.min_batch_size):
                        return
                self._serve_batch()

    def _await_expected(self) -> bool:
        """Wait a moment for as many requests as there were before, for as long as more of them come."""
        pending, timeout_s = self._pending, self.settings.timeout
        window = min(self._forward_s, timeout_s)
        while (count := len(pending)) < self._expected:
            if self._attend(window, self._expected):
                return True
            if len(pending) == count or perf_counter() > pending[0].arrived + timeout_s:
                break
        return False

    def _attend(self, timeout_s: float | None, wanted: int) -> bool:
        """Wait until `wanted` requests are there, and take in what has come; whether to return."""
        self._wanted = wanted
        if self._connections or self._news is not None:
            if self._poll_connections(timeout_s, wanted):
                return True
        elif timeout_s != 0.0:
            self._is_asleep = True
            if len(self._pending) < wanted and not self._calls and not self._added and not self._is_stopping:
                self._sleep(timeout_s)
            self._is_asleep = False
        while self._added:
            self._register(self._added.popleft())
        while self._calls:
            future, function = self._calls.popleft()
            try:
                future.set_result(function())
            except BaseException as error:  # it is of the one who has asked
                future.set_exception(error)
        return self._is_stopping

    def _sleep(self, timeout_s: float | None) -> None:
        """Until somebody rings; without a limit, there is nothing to serve, and others may lead meanwhile."""
        if timeout_s is not None:
            self._bell.acquire(True, timeout_s)
            return
        self._turn.release()
        try:
            self._bell.acquire()
            self._is_asleep = False
        finally:
            self._turn.acquire()

    def _poll_connections(self, timeout_s: float | None, wanted: int) -> bool:
        """The same where there are connections; whether there is news."""
        deadline = math.inf if timeout_s is None else perf_counter() + timeout_s
        while True:
            left = deadline - perf_counter()
            if timeout_s != 0.0:
                self._is_asleep = True
            is_enough = len(self._pending) >= wanted or self._calls or self._added or self._is_stopping
            # The system waits for whole milliseconds; for less we look, and offer the core to those we wait for.
            wait_ms = 0 if is_enough or left < 1e-3 else None if timeout_s is None else int(left * 1000)
            ready = self._poll.poll(wait_ms)
            self._is_asleep = False
            has_news = False
            for fd, _ in ready:
                connection = self._connections.get(fd)
                if connection is not None:
                    self._hear(connection, is_gone=fd == connection.watched)
                elif fd == self._news:
                    has_news = True
                elif self._event is not None:
                    self._event.lower()
            if has_news or is_enough or left <= 0 or len(self._pending) >= wanted:
                return has_news
            if not wait_ms and wait_ms is not None:
                os.sched_yield()

    # -- connections -------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """From now on, sleep in `poll`."""
        if self._event is None:
            self._event = Event()
            self._poll.register(self._event.fd, select.POLLIN)

    def _register(self, connection: Connection) -> None:
        self._listen()
        fd = connection.channel.fileno()
        self._connections[fd] = connection
        self._poll.register(fd, select.POLLIN)

    def _hear(self, connection: Connection, is_gone: bool) -> None:
        """Take in what a client has sent."""
        try:
            messages = connection.channel.receive_all()
        except Exception:  # the end of it, or what cannot be read here
            messages, is_gone = [], True
        for message in messages:
            match message:
                case (number, desk, kind):
                    found = connection.desk(desk)
                    self._pending.append(RemoteRequest(connection, number, found.layout, kind, found))
                case Ask():
                    self._pending.append(
                        RemoteRequest(connection, message.number, message.layout, message.kind, message.arrays)
                    )
                case Hello(pid=pid):
                    connection.claim(pid)
                    if connection.watched is not None:
                        self._connections[connection.watched] = connection
                        self._poll.register(connection.watched, select.POLLIN)
                case Introduce(number=number, end=introduced):
                    other = Connection(introduced.end)
                    other.when_claimed(partial(connection.send, Claimed(number)))
                    self._register(other)
        if is_gone or connection.is_closed:
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        for fd in [fd for fd, other in self._connections.items() if other is connection]:
            self._poll.unregister(fd)
            del self._connections[fd]
        connection.close()

    @property
    def remote_clients(self) -> int:
        """How many connections there are."""
        return len(set(map(id, list(self._connections.values())))) + len(self._added)

    # -- batches -----------------------------------------------------------------------------------------------

    def _serve_batch(self) -> None:
        """Answer the requests that have come first; if a client leads, only if that is quick for all of them."""
        begun, pending, batch = perf_counter(), self._pending, self._in_forward
        try:
            try:  # noqa: SIM105 - `suppress` takes longer than to take them
                # In one call, which no interrupt can come into: a request is in the one place or the other.
                batch.extend(islice(iter(pending.popleft, None), min(len(pending), self.settings.max_batch_size)))
            except IndexError:  # they were refused meanwhile
                pass
            groups: dict[Forward, list[Request]] = {}
            for request in batch:
                forward = request.layout.forward
                if forward is None or forward.kind is not request.kind:
                    forward = request.layout.forward = self._forward(request.layout.leaves, request.kind)
                if request.is_abandoned:
                    continue
                if forward in groups:
                    groups[forward].append(request)
                else:
                    groups[forward] = [request]
            if self._is_led and not all([forward.is_quick_for(requests) for forward, requests in groups.items()]):
                return
            for forward, requests in groups.items():
                self._answer(forward, requests)
            # Who did not come may come again: they are given up by halves.
            present = max(len(batch) + len(pending), self._expected // 2)
            self._expected = min(present, self.settings.max_batch_size)
            batch.clear()
            self._forward_s = perf_counter() - begun
        finally:
            if self._is_led and batch:  # they are not for us, or we were interrupted
                pending.extendleft([request for request in reversed(batch) if not request.is_done()])
                batch.clear()

    def _forward(self, leaves: Leaves, kind: InteractionType | None) -> Forward:
        """The forward of requests of these entries. To find it takes longer than all else for a small request."""
        forward = self._forwards.get((leaves, kind))
        if forward is None:
            settings = self.settings
            forward = Forward(self.policy, leaves, kind, settings.device, settings.version_key, self._generator)
            self._forwards[leaves, kind] = forward
        return forward

    def _answer(self, forward: Forward, requests: list[Request]) -> None:
        """One forward, and an answer to each."""
        begun, failed = perf_counter(), True
        try:
            outputs = forward.run(requests, self.version)
            failed = False
        except BaseException as error:
            if self._is_led and not isinstance(error, Exception):
                raise  # it is meant for the thread that leads
            failure = Failure.of(error)
            for request in requests:
                request.refuse(failure)
            if not isinstance(error, Exception):
                raise
        finally:
            self.stats.record([request.arrived for request in requests], begun, perf_counter(), failed=failed)
        if not failed:
            at, last = 0, None
            for request in requests:
                last = request.answer(outputs, at, last)
                at += request.layout.rows
            if last is not None:
                last.wake()

    # -- the policy --------------------------------------------------------------------------------------------

    def change(self, function: Callable[[Any], Any], *, counts: bool = True) -> Any:
        """Let `function` change the policy; the serving thread only. Counts as another version, unless it fails."""
        try:
            result = function(self.policy)
        finally:
            for forward in self._forwards.values():
                forward.renew()
        if counts:
            self.version += 1
            self.stats.weight_updates += 1
        return result

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Answer nothing more: everybody who waits is told the reason."""
        self.closed = self.closed or ClosedError(reason)
        self._end_calls(self.closed)
        self._refuse_pending(self.closed)
        for request in self._in_forward:  # it may never end
            request.refuse(self.closed)
        for connection in {id(each): each for each in (*self._connections.values(), *self._added)}.values():
            connection.send(Goodbye(str(self.closed)))
            connection.close()
        self._connections.clear()
        self._added.clear()
        if self._event is not None:
            self._event.release()

    def _refuse_pending(self, reason: ClosedError) -> None:
        with contextlib.suppress(IndexError):  # another thread may be at it too
            while True:
                self._pending.popleft().refuse(reason)

    def _end_calls(self, reason: ClosedError) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._calls.popleft()[0].set_exception(reason)
