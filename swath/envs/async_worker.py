"""What a worker of an AsyncEnvPool does: see NOTE [Asynchronous envs]."""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from swath.envs.base import EnvBase
from swath.envs.env_layout import EnvLayout
from swath.envs.parallel_worker import EnvFailure, Seed, Stepper, TakeActions, TakeOut, make_envs
from swath.envs.registry import Registered
from swath.runtime import Event
from swath.runtime.carrier import Link, Ordered, Topic
from swath.runtime.columns import Columns
from swath.runtime.id_queue import IdQueue
from swath.runtime.processes import ProcessLink
from swath.runtime.snapshots import Snapshots
from swath.runtime.threads import ThreadLink

OUTCOMES = 4
"""A number in the queue of what is ready: env * OUTCOMES + outcome."""
ROWS = 1
"""There is only one set of rows to write into."""


@dataclass(frozen=True)
class EnvRows:
    """Where all envs find their actions and write what happened."""

    action: Columns
    out: Columns
    eager: Columns


@dataclass(frozen=True)
class OrderBoard:
    """How a worker process gets its orders: a number per env, and something that wakes it."""

    orders: Columns
    bell: Event


@dataclass(frozen=True)
class EnvsMade:
    """What a worker says of its envs: their layouts, and what tells the objects apart that really run."""

    layouts: list[EnvLayout]
    simulators: list[tuple[int, int]]


@dataclass(frozen=True)
class SeedEach:
    """Seed the lanes of each env."""

    seeds: list[list[int]]


@dataclass(frozen=True)
class ForEnv:
    """Ask one of a worker's envs, counted from its first."""

    env: int
    request: object


@dataclass(frozen=True)
class AsyncEnvTask:
    """What is sent to a worker: it makes its envs, gives their layouts, and steps each when it is told to."""

    first: int
    factories: list[Callable[..., Any]]
    kwargs: list[dict[str, Any]]
    registered: Registered
    ready: IdQueue
    board: OrderBoard | None = None
    """None for a thread, which is woken by its carrier."""
    rows: EnvRows | None = None
    """For a worker that replaces another."""
    seeds: list[list[int]] | None = None

    def begin(self, link: Link) -> AsyncEnvJob:
        """Make the envs, in the worker."""
        self.registered.adopt()
        envs = make_envs(self.first, self.factories, self.kwargs)
        for index, env in enumerate(envs, self.first):
            env.first_lane = index * env.num_lanes
        job = AsyncEnvJob(envs, self.first, link, self.ready, self.board)
        if self.rows is not None:
            job.answer(self.rows)
        if self.seeds is not None:
            job.answer(SeedEach(self.seeds))
        return job


class AsyncEnvJob:
    """Steps each env when it is told to; several of them at the same time, each in a thread of its own."""

    def __init__(self, envs: list[EnvBase], first: int, link: Link, ready: IdQueue, board: OrderBoard | None) -> None:
        """Step `envs`, which are numbered from `first`."""
        self._envs, self._first, self._ready = envs, first, ready
        self._steppers: list[Stepper] = []
        self._is_over = False
        if isinstance(link, ThreadLink):
            self._wait = link.wait
        else:
            assert board is not None
            assert isinstance(link, ProcessLink)
            self._wait = _ProcessOrders(board, range(first, first + len(envs)), link).wait
        self._threads = [_EnvThread(index, self._do) for index in range(len(envs))] if len(envs) > 1 else []

    def describe(self) -> EnvsMade:
        """What the envs look like."""
        simulators = [(os.getpid(), id(simulator)) for env in self._envs for simulator in env.simulators]
        return EnvsMade([EnvLayout.of(env) for env in self._envs], simulators)

    def idle(self) -> None:
        """Do what comes until it is a message."""
        while signals := self._wait():
            for signal in signals:
                env, what = divmod(signal - 1, OUTCOMES)
                if self._threads:
                    self._threads[env].orders.put(what)
                else:
                    self._do(env, what)

    def _do(self, env: int, what: int) -> None:
        outcome = self._steppers[env].take_part(what, ROWS)
        if not self._is_over:
            self._ready.put([(self._first + env) * OUTCOMES + outcome])

    def answer(self, request: object) -> object:
        """Answer a question. The pool asks none while an env is being stepped."""
        match request:
            case EnvRows(action=action, out=out, eager=eager):
                self._steppers = self._steppers or [Stepper([env], 0) for env in self._envs]
                for env, stepper in enumerate(self._steppers):
                    number = self._first + env
                    parts = [columns.part(number, number + 1) for columns in (action, out, eager)]
                    stepper.obey(TakeActions(parts[0]))
                    stepper.obey(TakeOut(ROWS, parts[1], parts[2], (ROWS,)))
            case SeedEach(seeds=each):
                for env, seeds in enumerate(each):
                    answer = self.answer(ForEnv(env, Seed(seeds)))
                    if isinstance(answer, EnvFailure):
                        return answer
            case ForEnv(env=env, request=inner):
                answer = self._steppers[env].obey(inner)
                return replace(answer, env=env) if isinstance(answer, EnvFailure) else answer
            case _:
                found: list[object] = []
                for env in range(len(self._envs)):
                    answer = self.answer(ForEnv(env, request))
                    if isinstance(answer, EnvFailure):
                        return answer
                    found.extend(answer if isinstance(answer, list) else [answer])
                return found
        return None

    def work(self, order: Ordered, has_questions: Callable[[], bool]) -> object:
        """Not used: envs are stepped when their number is called."""
        raise TypeError(f"A worker of an AsyncEnvPool cannot understand {order!r}.")

    def subscribe(self, topic: Topic, snapshots: Snapshots) -> None:
        """Not used: envs have no weights."""

    def stop(self) -> None:
        """Close the envs, each when its step is over."""
        self._is_over = True
        for thread in self._threads:
            thread.stop()
        for env in self._envs:
            env.close()


class _EnvThread:
    """A thread that steps one env, where a process has several."""

    def __init__(self, env: int, do: Callable[[int, int], None]) -> None:
        """Begin to wait for orders."""
        self.orders: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._env, self._do = env, do
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (what := self.orders.get()) is not None:
            self._do(self._env, what)

    def stop(self) -> None:
        """Wait until it has ended."""
        self.orders.put(None)
        self._thread.join()


class _ProcessOrders:
    """The orders for the envs `share` of a worker process."""

    def __init__(self, board: OrderBoard, share: range, link: ProcessLink) -> None:
        """Wait for orders, and for messages of `link`."""
        self._orders = board.orders.arrays["order"][share.start : share.stop]
        self._bell, self._link = board.bell, link.fileno()
        self._poll = select.poll()
        for fd in (self._bell.fd, self._link):
            self._poll.register(fd, select.POLLIN)

    def wait(self) -> list[int]:
        """Wait for orders, as numbers env * OUTCOMES + what + 1; none if there is a message."""
        while True:
            woken_by = [fd for fd, _ in self._poll.poll()]
            if self._bell.fd in woken_by:
                self._bell.lower()
                found = [(env, what) for env, what in enumerate(self._orders.tolist()) if what]
                for env, _ in found:
                    self._orders[env] = 0
                if found:
                    return [env * OUTCOMES + what for env, what in found]
            elif self._link in woken_by:
                return []
