"""The workers of a ParallelEnv, seen from its process: how they are asked, and called to rounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from swath.envs.parallel_worker import FAILED, EnvFailure, EnvTask, GetFailure
from swath.errors import ClosedError, annotate
from swath.runtime.pool import LOOK_S, Pool, Supervision, Work
from swath.runtime.processes import ProcessCarrier
from swath.runtime.rounds import Rounds

LAST_S = 1.0
"""How long the others may take to end when one has died."""


class EnvRounds:
    """Worker processes with `per_worker` of `envs` envs each; the last may have fewer.

    Every request is answered once by each worker, and every round is finished by each that it calls: or an error is
    raised. An exception of an env leaves the workers as they are. After the death of one the others are ended, and
    there is nothing left to be asked.
    """

    def __init__(self, name: str, envs: int, per_worker: int, *, method: str, threads: int, stall_s: float) -> None:
        """Begin without processes. `name` is what is made of them all, for messages."""
        self.shares = [range(first, min(first + per_worker, envs)) for first in range(0, envs, per_worker)]
        """The envs of each worker."""
        self.is_closed = False
        self.rounds = Rounds(len(self.shares))
        self._carrier = ProcessCarrier(len(self.shares), method=method, threads=threads)
        self._carrier.watch(self.rounds.fileno())
        self._tasks: list[EnvTask] = []
        self._doing = "making"
        self._pool: Pool[Work] = Pool(
            self._carrier,
            len(self.shares),
            self,
            Supervision(stall_warning_s=stall_s),
            name,
            doing=lambda index: f"{self._doing} {self._place(index)}",
            is_busy=lambda index: index in self.rounds.late(),
        )
        self._is_idle = True
        """Whether all rounds that were begun have ended; otherwise an interrupt came between."""
        self._owner = os.getpid()

    @property
    def name(self) -> str:
        """What is made of all workers."""
        return self._pool.name

    @name.setter
    def name(self, name: str) -> None:
        self._pool.name = name

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [self._carrier.pid(index) for index in self._carrier.workers]

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
        self._guarded(self._pool.start)
        return [self._pool.started[index] for index in sorted(self._pool.started)]

    def ask(self, requests: Sequence[object], doing: str) -> list[Any]:
        """Send each worker its request; the answers, in order."""
        self.settle()
        self._doing = doing
        answers = self._guarded(lambda: self._pool.ask(dict(enumerate(requests)), doing))
        self._raise_first(answers)
        return [answers[index] for index in sorted(answers)]

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
            self._raise_first(self._guarded(lambda: self._pool.ask(dict.fromkeys(failed, GetFailure()), doing)))
        return outcome

    def _await_round(self) -> None:
        """Sleep until the round is over, or a process has ended."""
        rounds, carrier = self.rounds, self._carrier
        self._pool.expect_progress(rounds.late())
        patience = min(LOOK_S, self._pool.supervision.stall_warning_s)
        while not rounds.is_over():
            is_woken = carrier.wait(patience)
            rounds.lower()
            # It may be the end of the last round that we were woken by: then there is nothing to attend to.
            if not rounds.is_over() and (not is_woken or carrier.wait(0.0)):
                self._pool.attend(0.0)

    def settle(self) -> None:
        """Before anything new: let end what an interrupt has left unfinished, whatever comes of it."""
        if self._is_idle and self._owner == os.getpid() and not self.is_closed:
            return
        if self._owner != os.getpid():
            raise ClosedError(f"{self.name} belongs to the process that has made it; make a new one in this one.")
        if self.is_closed:
            raise ClosedError(f"{self.name} is closed; make a new one.")
        self._doing = "finishing what was interrupted in"
        self.rounds.mend()
        self._guarded(self._await_round)
        self._is_idle = True

    def _guarded(self, do: Callable[[], Any]) -> Any:
        """After the death of a worker there is nothing left."""
        try:
            return do()
        except BaseException:
            if self._pool.failure is not None:
                self.close(LAST_S)
            raise

    def _raise_first(self, answers: dict[int, Any]) -> None:
        """Raise what went wrong in the first env that has failed."""
        failed = [(index, answer) for index, answer in sorted(answers.items()) if isinstance(answer, EnvFailure)]
        if not failed:
            return
        index, first = failed[0]
        place = self._place(index)
        if first.env is not None:
            place = f"env {self.shares[index][first.env]} of {self.name}"
        error = first.failure.error(
            f"Raised in worker {index} (pid {self._carrier.pid(index)}), in {place}. Lanes are counted from 0 there."
        )
        if len(failed) > 1:
            annotate(error, f"Workers {[index for index, _ in failed[1:]]} have failed at the same time.")
        raise error

    def _place(self, index: int) -> str:
        """The envs of a worker, in words."""
        share = self.shares[index]
        which = f"env {share[0]}" if len(share) == 1 else f"envs {share[0]} to {share[-1]}"
        return f"{which} of {self.name}"

    def close(self, timeout_s: float) -> None:
        """End all workers within `timeout_s`. May be called again, and does nothing in a fork of our process."""
        if os.getpid() != self._owner:
            return
        self.is_closed, self._is_idle = True, False
        self._pool.shutdown(timeout_s)
        self._tasks = []
        self.rounds.close()
