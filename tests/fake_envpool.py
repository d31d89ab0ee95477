"""FakeEnvPool: counting envs behind the calls of EnvPool 1.2, as the real one was seen to behave."""

from __future__ import annotations

import queue
import random
import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from swath.testing.counting import Lengths, counting_observation, counting_space, length_of


class FakeEnvPool(VectorEnv[Any, Any, Any]):
    """Threads step envs at random paces. `recv` waits, however long, for `batch_size` of those that were ordered.

    An env that has ended begins anew with its next action, which is ignored; `_reset` lets envs begin in any case.
    Whoever orders an env that is under way is told so by `recv`: the real one would step it in two threads at once.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - gymnasium declares it so

    def __init__(
        self,
        num_envs: int,
        batch_size: int,
        *,
        lengths: Lengths = 5,
        kind: str = "vector",
        players: int = 1,
        most_s: float = 0.0005,
    ) -> None:
        self.num_envs, self.lengths, self.kind = num_envs, lengths, kind
        self.config = {"num_envs": num_envs, "batch_size": batch_size, "max_num_players": players, "seed": 42}
        self.observation_space = self.single_observation_space = counting_space(kind)
        self.action_space = self.single_action_space = gym.spaces.Discrete(2)
        self.spec: Any = None
        self.all_env_ids = np.arange(num_envs, dtype=np.int32)
        self.stuck: dict[int, threading.Event] = {}
        """Envs that do not come back from their next step before that happens."""
        self.received = 0
        self.was_closed = False
        self._episode, self._count = np.full(num_envs, -1), np.zeros(num_envs, np.int64)
        self._ended, self._under_way = np.ones((2, num_envs), bool)
        self._under_way[:] = False
        self._most_s = most_s
        self._orders: queue.SimpleQueue[tuple[int, bool] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(3)]
        for thread in self._threads:
            thread.start()

    @property
    def is_async(self) -> bool:
        return bool(self.config["num_envs"] != self.config["batch_size"])

    def __repr__(self) -> str:
        return f"FakeEnvPool(num_envs={self.num_envs})"

    def async_reset(self) -> None:
        self._reset(self.all_env_ids)

    def _reset(self, env_id: np.ndarray) -> None:
        self._order(env_id, True)

    def send(self, action: Any, env_id: np.ndarray | None = None) -> None:
        ids = self.all_env_ids if env_id is None else env_id
        assert len(action) == len(ids)
        self._order(ids, False)

    def _order(self, ids: np.ndarray, anew: bool) -> None:
        assert ids.dtype == np.int32
        for env in ids.tolist():
            if self._under_way[env]:
                self._done.put(AssertionError(f"env {env} was ordered twice"))
            self._under_way[env] = True
            self._orders.put((env, anew))

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            env, anew = order
            time.sleep(random.uniform(0.0, self._most_s))
            if env in self.stuck:
                self.stuck[env].wait()
            begins = anew or self._ended[env]
            self._episode[env] += begins
            self._count[env] = 0 if begins else self._count[env] + 1
            self._ended[env] = self._count[env] >= length_of(self.lengths, env, int(self._episode[env]))
            self._done.put((env, int(self._episode[env]), int(self._count[env]), bool(self._ended[env])))

    def recv(self) -> Any:
        found = []
        while len(found) < self.config["batch_size"]:
            one = self._done.get()
            if isinstance(one, Exception):
                raise one
            found.append(one)
        self.received += 1
        ids = np.array([one[0] for one in found], np.int32)
        self._under_way[ids] = False
        numbers, ended = np.array([one[:3] for one in found]), np.array([one[3] for one in found])
        info = {"env_id": ids, "players": {"env_id": ids}, "elapsed_step": numbers[:, 2].astype(np.int32)}
        reward = numbers[:, 2].astype(np.float32)
        return counting_observation(numbers, self.kind), reward, ended, np.zeros_like(ended), info

    def close(self, **kwargs: Any) -> None:
        self.was_closed = True
        for event in self.stuck.values():
            event.set()
        for _ in self._threads:
            self._orders.put(None)
