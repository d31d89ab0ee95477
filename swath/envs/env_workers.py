"""The workers of an AsyncEnvPool, seen from its process: see NOTE [Asynchronous envs]."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from swath.envs.async_worker import OUTCOMES, AsyncEnvTask, EnvRows, EnvsMade, ForEnv, OrderBoard
from swath.envs.eager_reset import READY
from swath.envs.env_supervisor import EnvSupervisor
from swath.envs.parallel_worker import BEGIN, FAILED, EnvFailure, GetFailure
from swath.envs.registry import Registered
from swath.envs.rows import Leaf
from swath.envs.serial import EnvFactory
from swath.keys import RESET, TERMINATED, TRUNCATED
from swath.runtime import Event, undisturbed
from swath.runtime.columns import Columns
from swath.runtime.id_queue import IdQueue
from swath.runtime.pool import LOOK_S, Pool
from swath.runtime.processes import ProcessCarrier
from swath.runtime.supervision import Supervision
from swath.runtime.threads import ThreadCarrier
from swath.runtime.work import Work

Backend = Literal["threading", "multiprocessing"]
WATCH_S = 0.05
"""How often workers are looked after while results keep coming."""


class EnvWorkers(EnvSupervisor):
    """Threads or processes that step envs, and which of these are in flight."""

    def __init__(
        self,
        name: str,
        factories: Sequence[EnvFactory],
        kwargs: Sequence[dict[str, Any]],
        *,
        backend: Backend,
        per_worker: int,
        method: str,
        threads: int,
        supervision: Supervision,
    ) -> None:
        """Begin without workers."""
        count = len(factories)
        super().__init__(count, 1 if backend == "threading" else per_worker)
        self.worker_of = [worker for worker, share in enumerate(self.shares) for _ in share]
        self.rows: EnvRows | None = None
        self.seeds_of_replacement: Callable[[range], list[list[int]] | None] = lambda share: None
        self.in_flight = np.zeros(count, bool)
        """Which envs were ordered to do something that they have not done yet."""
        self.ordered = [0] * count
        """What each was ordered to do last."""
        self.landed: deque[int] = deque()
        """Envs that are ready, in that order, and that nobody has taken."""
        self.lost_steps = 0
        self._tickets = np.zeros(count, np.int64)
        self._numbers = itertools.count(1)
        self._factories, self._kwargs = factories, kwargs
        self._registered = Registered.here()
        self._ready = IdQueue()
        self._failed: deque[int] = deque()
        self._watched_at = 0.0
        self._boards: list[OrderBoard] = []
        if backend == "threading":
            threads_of = self._thread_carrier = ThreadCarrier(len(self.shares))
            carrier: ThreadCarrier | ProcessCarrier = threads_of
        else:
            carrier = ProcessCarrier(
                len(self.shares), method=method, threads=threads, start_s=supervision.start_timeout_s
            )
            orders = Columns.shared({"order": Leaf((), torch.int32)}, (count,))
            self._orders = orders.arrays["order"]
            self._boards = [OrderBoard(orders, Event()) for _ in self.shares]
        carrier.watch(self._ready.fileno())
        self._carrier = carrier
        self.pool: Pool[Work] = Pool(
            carrier,
            len(self.shares),
            self,
            supervision,
            name,
            doing=self._activity,
            is_busy=lambda worker: bool(self.in_flight[self.shares[worker]].any()),
            pulse=self._pulse,
        )

    # -- whose workers they are --------------------------------------------------------------------------------

    def task(self, index: int, replaces: bool) -> AsyncEnvTask:
        """What a worker is started for."""
        share = self.shares[index]
        return AsyncEnvTask(
            share[0],
            [self._factories[env] for env in share],
            [self._kwargs[env] for env in share],
            self._registered,
            self._ready,
            self._boards[index] if self._boards else None,
            self.rows if replaces else None,
            self.seeds_of_replacement(share) if replaces else None,
        )

    def lost(self, index: int) -> None:
        """What the envs of this worker were doing is lost."""
        self._land()
        gone = set(self.shares[index])
        self.lost_steps += sum(bool(self.in_flight[env]) or env in self.landed for env in gone)
        for waiting in (self.landed, self._failed):
            for env in [env for env in waiting if env in gone]:
                waiting.remove(env)
        self.in_flight[list(gone)] = False

    def restarted(self, index: int) -> None:
        """Let the envs of the new worker begin, when it has made them."""
        self.begin_anew(self.shares[index])

    @property
    def dropped(self) -> list[int]:
        """The envs of workers that were dropped."""
        there = set(self.pool.indices)
        return [env for index, share in enumerate(self.shares) if index not in there for env in share]

    def _pulse(self, index: int) -> int:
        """The order that has been under way longest: it stays the same as long as that env does not come back."""
        share = self.shares[index]
        tickets = self._tickets[share.start : share.stop][self.in_flight[share.start : share.stop]]
        return int(tickets.min()) if len(tickets) else 0

    def _activity(self, index: int) -> str:
        if index not in self.pool.started:
            return f"making {self._place(self.shares[index])}"
        stepped = [env for env in self.shares[index] if self.in_flight[env]]
        return f"stepping {self._place(stepped)}" if stepped else f"waiting with {self._place(self.shares[index])}"

    # -- orders and results ------------------------------------------------------------------------------------

    def start(self) -> list[EnvsMade]:
        """Start all workers; what each says of itself."""
        self._guarded(self.pool.start)
        made = [self.pool.started[index] for index in range(len(self.shares))]
        return [each for each in made if isinstance(each, EnvsMade)]

    def order(self, envs: Sequence[int], what: int) -> None:
        """Let `envs` do what is said; none of them may be in flight."""
        ticket = next(self._numbers)
        for env in envs:
            self.in_flight[env], self._tickets[env], self.ordered[env] = True, ticket, what
        if self._boards:
            for env in envs:
                self._orders[env] = what + 1
            for worker in dict.fromkeys([self.worker_of[env] for env in envs]):
                self._boards[worker].bell.lift()
        else:
            for env in envs:
                self._thread_carrier.signal(env, what + 1)

    def begin_anew(self, envs: Sequence[int]) -> None:
        """Let all lanes of `envs` begin."""
        assert self.rows is not None
        which = list(envs)
        self.rows.action.tensors[RESET][which] = True
        self.rows.eager.tensors[READY][which] = False
        for key in (TERMINATED, TRUNCATED):
            self.rows.out.tensors[key][which] = False
        self.order(which, BEGIN)

    def _land(self) -> None:
        for number in self._ready.take():
            env, outcome = divmod(number, OUTCOMES)
            if self.in_flight[env]:
                self.in_flight[env] = False
                (self._failed if outcome == FAILED else self.landed).append(env)

    def wait(self, count: int, timeout_s: float) -> bool:
        """Wait until so many have landed, or none is left to wait for; False if that takes too long."""
        return self.wait_until(lambda: len(self.landed) >= count or not self.in_flight.any(), timeout_s)

    def wait_until(
        self, is_enough: Callable[[], bool], timeout_s: float, land: Callable[[], None] | None = None
    ) -> bool:
        """Let `land` what is ready until there is enough of it; False if that takes too long."""
        deadline, land = time.monotonic() + timeout_s, land or self._land
        patience = min(LOOK_S, self.pool.supervision.stall_warning_s)
        while True:
            land()
            now = time.monotonic()
            if self._failed or now - self._watched_at > WATCH_S:
                self._watched_at = now
                self._guarded(self._see_to_failures)
            if is_enough():
                return True
            if now >= deadline:
                return False
            if self._carrier.wait(self.pool.recovery.patience_s(min(patience, deadline - now))):
                continue
            self._guarded(lambda: self.pool.attend(0.0))

    def _see_to_failures(self) -> None:
        self.pool.attend(0.0)
        while self._failed:
            env = self._failed.popleft()
            worker = self.worker_of[env]
            answer = self.pool.ask({worker: ForEnv(env - self.shares[worker][0], GetFailure())}, "failure").get(worker)
            if isinstance(answer, EnvFailure):
                error = self._error(worker, answer)
                if self.pool.supervision.on_failure == "raise":
                    raise error  # the env may be reset, and the others go on
                self.in_flight[env] = True  # nothing is to be had of it until its worker is replaced or dropped
                self.pool.fail(worker, error)

    def settle(self, envs: Sequence[int] | None = None) -> None:
        """Wait until `envs`, or all, have landed."""
        self.must_be_open()
        in_flight = self.in_flight

        def land() -> None:
            with undisturbed:  # between batches one goes on after an interrupt
                self._land()

        self.wait_until(lambda: not (in_flight.any() if envs is None else in_flight[envs].any()), math.inf, land)

    def ask(self, requests: dict[int, object], what: str) -> list[Any]:
        """What workers answer, in order; when everything has landed."""
        self.settle()
        return self._answers(requests, what)

    def ask_all(self, request: object, what: str) -> list[Any]:
        """The same request for all."""
        return self.ask(dict.fromkeys(self.pool.indices, request), what)

    def close(self, timeout_s: float) -> None:
        """End all workers. May be called again, and does nothing in a fork of our process."""
        if os.getpid() == self._owner and not self.is_closed:
            self.is_closed = True
            self.pool.shutdown(timeout_s)
            for board in self._boards:
                board.bell.release()
                assert board.orders.block is not None
                board.orders.block.release()
            if not self._carrier.alive():  # otherwise somebody may yet put a number in
                self._ready.close()
