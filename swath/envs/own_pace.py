"""OwnPaceEnv: what the loop for envs at their own pace asks of its env."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from swath.envs.base import EnvBase
from swath.envs.rows import Rows


class OwnPaceEnv(EnvBase):
    """Envs of `lanes_per_env` lanes each, every one of which can be stepped without the others.

    An env that finishes an episode begins the next by itself before it is ready again; `reset_into` then hands out the
    first observation, as in NOTE [Eager resets].
    """

    num_envs: int
    lanes_per_env: int
    at_a_time: int = 1
    """So many envs must be under way before any of them comes back."""

    @abstractmethod
    def lanes_of(self, envs: Sequence[int]) -> np.ndarray:
        """The lanes of `envs`, in their order."""

    @property
    @abstractmethod
    def idle_envs(self) -> list[int]:
        """Envs that have nothing to do: their rows are the caller's."""

    @abstractmethod
    def begin_steps(self, envs: Sequence[int], action: Rows, cut: np.ndarray | None = None) -> None:
        """Let `envs`, which are idle, step with their rows of `action`; they begin anew if they finish.

        `cut` marks lanes that begin anew in any case, after this step.
        """

    @abstractmethod
    def take_ready(self, least: int, most: int, timeout_s: float) -> tuple[list[int], list[int]]:
        """Envs that are ready, in the order in which they became so: those that have stepped, those that have begun.

        Waits for the first however long it takes, and then for `least` of them, but for no more than `timeout_s`.
        The latter were replaced, and have nothing to do with what was collected from them before.
        """

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers; of this process, if they are threads."""
        return [os.getpid()]

    @property
    def lost_steps(self) -> int:
        """Steps of workers that failed, which nobody has got."""
        return 0

    @property
    def num_workers(self) -> int:
        """How many threads or processes there are for the envs, or were."""
        return 1

    @property
    def workers_alive(self) -> int:
        """How many of them have not ended."""
        return int(not self.is_closed)

    @property
    def restarts(self) -> int:
        """How often workers were restarted."""
        return 0
