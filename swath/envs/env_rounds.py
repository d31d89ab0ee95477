"""The workers of a ParallelEnv, seen from its process: how they are asked, and called to rounds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from swath.envs.env_supervisor import EnvSupervisor
from swath.envs.parallel_worker import FAILED, EnvTask, GetFailure
from swath.runtime.pool import LOOK_S, Pool
from swath.runtime.processes import ProcessCarrier
from swath.runtime.rounds import Rounds
from swath.runtime.supervision import Supervision
from swath.runtime.work import Work


class EnvRounds(EnvSupervisor):
    """Worker processes that are called to rounds.

    Every request is answered once by each worker, and every round is finished by each that it calls: or an error is
    raised.
    """

    def __init__(self, name: str, envs: int, per_worker: int, *, method: str, threads: int, stall_s: float) -> None:
        """Begin without processes. `name` is what is made of them all, for messages."""
        super().__init__(envs, per_worker)
        self.rounds = Rounds(len(self.shares))
        self._carrier = ProcessCarrier(len(self.shares), method=method, threads=threads)
        self._carrier.watch(self.rounds.fileno())
        self._tasks: list[EnvTask] = []
        self._doing = "making"
        self.pool: Pool[Work] = Pool(
            self._carrier,
            len(self.shares),
            self,
            Supervision(stall_warning_s=stall_s),
            name,
            doing=lambda index: f"{self._doing} {self._place(self.shares[index])}",
            is_busy=lambda index: index in self.rounds.late(),
        )
        self._is_idle = True
        """Whether all rounds that were begun have ended; otherwise an interrupt came between."""

    def task(self, index: int, replaces: bool) -> EnvTask:
        """What a worker is started for."""
        return self._tasks[index]

    def lost(self, index: int) -> None:
        """Not called: the failure of a worker is raised."""

    def restarted(self, index: int) -> None:
        """Not called, likewise."""

    def start(self, tasks: Sequence[EnvTask]) -> list[Any]:
        """Start all workers; what each says of itself, or what the first that fails has raised."""
        self._tasks = list(tasks)
        self._guarded(self.pool.start)
        return [self.pool.started[index] for index in sorted(self.pool.started)]

    def ask(self, requests: Sequence[object], doing: str) -> list[Any]:
        """Send each worker its request; the answers, in order."""
        self.settle()
        self._doing = doing
        return self._answers(dict(enumerate(requests)), doing)

    def round(self, doing: str, orders: tuple[int, int], workers: Sequence[int] | None = None) -> int:
        """Let `workers`, or all, do what the `orders` say; the largest outcome. `settle` comes before."""
        rounds = self.rounds
        self._is_idle, self._doing = False, doing
        rounds.orders[0], rounds.orders[1] = orders
        rounds.begin(workers)
        if not rounds.spin():
            rounds.lower()
            self._guarded(self._await_round)
        outcome = max(rounds.outcomes())
        self._is_idle = True
        if outcome == FAILED:
            failed = [i for i, one in zip(rounds.called, rounds.outcomes(), strict=True) if one == FAILED]
            self._answers(dict.fromkeys(failed, GetFailure()), doing)  # of which the first is raised
        return outcome

    def _await_round(self) -> None:
        """Sleep until the round is over, or a process has ended."""
        rounds, carrier, is_attended = self.rounds, self._carrier, False
        patience = min(LOOK_S, self.pool.supervision.stall_warning_s)
        while not rounds.is_over():
            is_woken = carrier.wait(patience)
            rounds.lower()
            # It may be the end of the last round that we were woken by: then there is nothing to attend to.
            if not rounds.is_over() and (not is_woken or carrier.wait(0.0)):
                if not is_attended:  # stalls are counted from here on
                    self.pool.expect_progress(rounds.late())
                    is_attended = True
                self.pool.attend(0.0)

    def settle(self) -> None:
        """Before anything new: let end what an interrupt has left unfinished, whatever comes of it."""
        if self._is_idle and self._owner == os.getpid() and not self.is_closed:
            return
        self.must_be_open()
        self._doing = "finishing what was interrupted in"
        self.rounds.mend()
        self._guarded(self._await_round)
        self._is_idle = True

    def close(self, timeout_s: float) -> None:
        """End all workers within `timeout_s`. May be called again, and does nothing in a fork of our process."""
        if os.getpid() != self._owner:
            return
        self.is_closed, self._is_idle = True, False
        self.pool.shutdown(timeout_s)
        self._tasks = []
        self.rounds.close()
