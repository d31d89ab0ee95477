"""The workers of a ParallelEnv, seen from its process: how they are asked, called to rounds, and mourned."""

from __future__ import annotations

import os
import select
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from swath.envs.parallel_worker import FAILED, EnvWorker, Failed
from swath.errors import ClosedError, annotate
from swath.runtime import Crew, Died, Member, Rounds, StallWarning, Undisturbed, WorkerDiedError

STALL_S = 15.0
"""After how long without an answer a worker is named in a warning."""
LAST_S = 1.0
"""How long the others may take to end when one has died."""
AGAIN_S = 60.0
"""How long to sleep at most, once that was said."""


class EnvCrew:
    """Worker processes with `per_worker` of `envs` envs each; the last may have fewer.

    Every request is answered once by each worker, and every round is finished by each that it calls: or an error is
    raised. An exception of an env leaves the workers as they are. After the death of one the others are ended, and
    there is nothing left to be asked.
    """

    def __init__(self, name: str, envs: int, per_worker: int, *, method: str, threads: int, stall_s: float) -> None:
        """Begin without processes. `name` is what is made of them all, for messages."""
        self.name = name
        self.shares = [range(first, min(first + per_worker, envs)) for first in range(0, envs, per_worker)]
        """The envs of each worker."""
        self.is_closed = False
        self._crew = Crew("Worker", method=method, threads=threads)
        self._rounds = Rounds(len(self.shares))
        self._stall_s = stall_s
        self._poll = select.poll()
        self._poll.register(self._rounds.fileno(), select.POLLIN)
        self._owing: set[int] = set()
        """Those who have not answered yet."""
        self._answers: dict[int, Any] = {}
        self._is_idle = True
        """Whether all that was begun has ended; otherwise an interrupt came between."""
        self._heard_of = 0
        """The last round of which it is known who has failed in it."""
        self._is_torn = False
        """Whether something was half said, or half heard: a signal's handler other than that of Ctrl-C has raised."""
        self._undisturbed = Undisturbed()
        self._owner = os.getpid()

    def member(self, index: int) -> Member:
        """What the worker `index` needs to take part in rounds."""
        return self._rounds.member(index)

    def hire(self, targets: Sequence[EnvWorker]) -> list[Any]:
        """Start all workers; the first answer of each, or what the first that fails has raised."""
        for index, target in enumerate(targets):
            process = self._crew.hire(index, target)
            self._owing.add(index)
            for fd in (process.channel.fileno(), process.sentinel):
                self._poll.register(fd, select.POLLIN)

        def is_over() -> bool:
            return not self._owing or any(isinstance(answer, Failed) for answer in self._answers.values())

        self._wait(is_over, lambda: sorted(self._owing), "making")
        return self._taken()

    def ask(self, requests: Sequence[Any], doing: str) -> list[Any]:
        """Send each worker its request; the answers, in order."""
        self.settle()
        with self._undisturbed:
            self._is_idle, self._is_torn = False, True
            for index, request in enumerate(requests):
                self._crew.send(index, request, by_value=True)
                self._owing.add(index)
            self._is_torn = False
        return self._collect(doing)

    def round(self, doing: str, orders: tuple[int, int], workers: Sequence[int] | None = None) -> int:
        """Let `workers`, or all, do what the `orders` say; the largest outcome. `settle` comes before."""
        rounds = self._rounds
        self._is_idle = False
        rounds.orders[0], rounds.orders[1] = orders
        rounds.begin(workers)
        if not rounds.spin():
            rounds.lower()
            self._wait(rounds.is_over, rounds.late, doing)
        outcome = max(rounds.outcomes())
        if outcome == FAILED:
            self._await_the_failed()
            self._collect(doing)
        self._heard_of, self._is_idle = rounds.number, True
        return outcome

    def _collect(self, doing: str) -> list[Any]:
        """The answers of all who owe one; or the exception that one of them has answered."""
        self._wait(lambda: not self._owing, lambda: sorted(self._owing), doing)
        return self._taken()

    def _taken(self) -> list[Any]:
        answers, self._answers = self._answers, {}
        self._is_idle = True
        self._raise_first(answers)
        return [answers[index] for index in sorted(answers)]

    def _await_the_failed(self) -> None:
        """Those who have failed in a round tell why; some may have done so already."""
        outcomes = zip(self._rounds.called, self._rounds.outcomes(), strict=True)
        self._owing |= {index for index, outcome in outcomes if outcome == FAILED} - set(self._answers)
        self._heard_of = self._rounds.number

    def settle(self) -> None:
        """Before anything new: let end what an interrupt has left unfinished, whatever comes of it."""
        if self._is_idle and self._owner == os.getpid():
            return
        if self._owner != os.getpid():
            raise ClosedError(f"{self.name} belongs to the process that has made it; make a new one in this one.")
        if self.is_closed:
            raise ClosedError(f"{self.name} is closed; make a new one.")
        if self._is_torn:
            self.close(LAST_S)
            raise ClosedError(f"{self.name} was interrupted in the middle of a message, and is closed; make a new one.")
        doing = "finishing what was interrupted in"
        self._rounds.mend()
        if self._heard_of != self._rounds.number:
            self._wait(self._rounds.is_over, self._rounds.late, doing)
            self._await_the_failed()
        self._wait(lambda: not self._owing, lambda: sorted(self._owing), doing)
        self._answers = {}
        self._is_idle = True

    # -- waiting -----------------------------------------------------------------------------------------------

    def _wait(self, is_over: Callable[[], bool], late: Callable[[], list[int]], doing: str) -> None:
        """Until `is_over`: asleep, but for the end of a round, for what workers say, and for their ends."""
        begun, is_warned = time.monotonic(), False
        while not is_over():
            left = AGAIN_S if is_warned else begun + self._stall_s - time.monotonic()
            woken_by = [fd for fd, _ in self._poll.poll(max(0.0, left) * 1000)]
            self._rounds.lower()
            if woken_by not in ([], [self._rounds.fileno()]):
                self._hear(doing)
            elif not is_warned and time.monotonic() - begun >= self._stall_s and not is_over():
                is_warned = True
                self._warn(late(), doing)

    def _hear(self, doing: str) -> None:
        with self._undisturbed:
            self._is_torn = True
            news = self._crew.wait(0.0)
            messages = {index: message for index, message in news if not isinstance(message, Died)}
            self._answers |= messages
            self._owing -= messages.keys()
            self._is_torn = False
        for index, message in news:
            if isinstance(message, Died):
                self._mourn(index, message, doing)

    def _mourn(self, index: int, died: Died, doing: str) -> NoReturn:
        error: WorkerDiedError = self._crew.death(index, died, f"{doing} {self._place(index)}")
        self.close(LAST_S)
        raise error

    def _warn(self, late: list[int], doing: str) -> None:
        for index in late:
            process = self._crew.processes[index]
            state = " It is stopped, as by SIGSTOP or a debugger." if process.is_stopped else ""
            warnings.warn(
                f"Worker {index} (pid {process.pid}) has been {doing} {self._place(index)} for {self._stall_s:g} s."
                f"{state} Waiting goes on; interrupt it if that is too long.",
                StallWarning,
                stacklevel=2,
            )

    def _raise_first(self, answers: dict[int, Any]) -> None:
        """Raise what went wrong in the first env that tells of it."""
        failed = [(index, answer) for index, answer in sorted(answers.items()) if isinstance(answer, Failed)]
        if not failed:
            return
        index, first = failed[0]
        share = self.shares[index]
        place = self._place(index)
        if first.env is not None:
            place = f"env {share[first.env]} of {self.name}"
        error = first.failure.error(
            f"Raised in worker {index} (pid {self._crew.processes[index].pid}), in {place}. "
            "Lanes are counted from 0 there."
        )
        if len(failed) > 1:
            annotate(error, f"Workers {[index for index, _ in failed[1:]]} have failed at the same time.")
        raise error

    def _place(self, index: int) -> str:
        """The envs of a worker, in words."""
        share = self.shares[index]
        which = f"env {share[0]}" if len(share) == 1 else f"envs {share[0]} to {share[-1]}"
        return f"{which} of {self.name}"

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """End all workers within `timeout_s`. May be called again, and does nothing in a fork of our process."""
        if os.getpid() != self._owner:
            return
        self.is_closed, self._is_idle = True, False
        self._crew.shutdown(timeout_s)
        self._rounds.close()
