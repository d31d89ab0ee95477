"""What the workers of a ParallelEnv and of an AsyncEnvPool have in common, seen from their process."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swath.envs.parallel_worker import EnvFailure
from swath.errors import ClosedError, annotate
from swath.runtime.pool import Pool
from swath.runtime.work import Work

LAST_S = 1.0
"""How long the others may take to end when one has failed for good."""
FEW = 8
"""How many envs are named one by one."""


class EnvSupervisor(ABC):
    """Workers with `per_worker` of `envs` envs each; the last may have fewer. A subclass gives the `pool`.

    What an env raises is an answer, and leaves the workers as they are. After a failure that is not mended the others
    are ended, and there is nothing left to be asked.
    """

    pool: Pool[Work]

    def __init__(self, envs: int, per_worker: int) -> None:
        self.shares = [range(first, min(first + per_worker, envs)) for first in range(0, envs, per_worker)]
        """The envs of each worker."""
        self.is_closed = False
        self._owner = os.getpid()

    @property
    def name(self) -> str:
        """What is made of all workers, for messages."""
        return self.pool.name

    @name.setter
    def name(self, name: str) -> None:
        self.pool.name = name

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers, in their order; of threads, the one that they share."""
        found = dict.fromkeys(self.pool.carrier.pid(index) for index in self.pool.indices)
        return [pid for pid in found if pid]  # one may just have been stopped

    def must_be_open(self) -> None:
        """Raise if there is nothing more to be had."""
        if self._owner != os.getpid():
            raise ClosedError(f"{self.name} belongs to the process that has made it; make a new one in this one.")
        if self.is_closed:
            raise ClosedError(f"{self.name} is closed; make a new one.")

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """End all workers within `timeout_s`. May be called again, and does nothing in a fork of our process."""

    def _guarded(self, do: Callable[[], Any]) -> Any:
        """After a failure that is not mended there is nothing left."""
        try:
            return do()
        except BaseException:
            if self.pool.failure is not None:
                self.close(LAST_S)
            raise

    def _answers(self, requests: Mapping[int, object], what: str) -> list[Any]:
        """What workers answer, in order; or what the first of their envs that has failed has raised."""
        answers = self._guarded(lambda: self.pool.ask(requests, what))
        failed = [(index, answer) for index, answer in sorted(answers.items()) if isinstance(answer, EnvFailure)]
        if failed:
            error = self._error(*failed[0])
            if len(failed) > 1:
                annotate(error, f"Workers {[index for index, _ in failed[1:]]} have failed at the same time.")
            raise error
        return [answers[index] for index in sorted(answers)]

    def _error(self, index: int, failed: EnvFailure) -> BaseException:
        share = self.shares[index]
        place, pid = self._place(share if failed.env is None else [share[failed.env]]), self.pool.carrier.pid(index)
        return failed.failure.error(
            f"Raised in worker {index} (pid {pid}), in {place}. Lanes are counted from 0 there."
        )

    def _place(self, envs: Sequence[int]) -> str:
        """Envs in words."""
        if len(envs) == 1:
            which = f"env {envs[0]}"
        elif isinstance(envs, range):
            which = f"envs {envs[0]} to {envs[-1]}"
        else:
            which = f"envs {', '.join(map(str, envs[:FEW]))}" + (" ..." if len(envs) > FEW else "")
        return f"{which} of {self.name}"
