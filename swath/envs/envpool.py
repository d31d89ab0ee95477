"""EnvPoolEnv: the asynchronous envs of the library EnvPool, in the place of an AsyncEnvPool.

NOTE [EnvPool]: an EnvPool that was made with a `batch_size` below `num_envs` steps its envs in threads of C++. `send`
orders some of them to step, and `recv` waits until `batch_size` of those that were ordered have come back, whichever
these are: with fewer under way it would wait for ever. So it is called once for every `batch_size` orders, never more.

A thread of ours does that, and nothing else waits in C++: whoever collects waits in Python, where a signal is heard and
an end can be set to it. The same thread puts away what comes, so that no signal can come between: a step goes to the
rows; an env that has finished, or is cut, is ordered to begin anew at once, and what it begins with is kept as in
NOTE [Eager resets]. It is ready when both are there. The order to begin says so itself (`_reset`, for which EnvPool
has no public name that does not also wait): EnvPool's other way, an action that is ignored, cannot cut an episode.

To begin anew in all envs, the last few of which are less than a `batch_size`, some that have begun begin once more.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorEnv

from swath.envs.eager_reset import READY, EagerResets, eager_leaves
from swath.envs.env_layout import as_seconds
from swath.envs.own_pace import OwnPaceEnv
from swath.envs.rows import Rows
from swath.errors import StallWarning, UnsupportedEnvError, annotate
from swath.keys import REWARD, TERMINATED, TRUNCATED
from swath.runtime.interrupts import Section

LOOK_S = 0.01, 1.0
"""How long to wait at a time, at least and at most: then envs that do not come back are looked for."""
COLLECT = "AsyncBatchedCollector(lambda: envpool.make_gymnasium(task, num_envs=16, batch_size=4), policy, ...)"


def is_asynchronous(env: Any) -> bool:
    """Whether it is an EnvPool that answers for some of its envs at a time."""
    return is_envpool(env) and bool(env.is_async)


def is_envpool(env: Any) -> bool:
    """Whether it is an EnvPool, made for gymnasium."""
    names = ("config", "is_async", "async_reset", "send", "recv")
    return isinstance(env, gym.Env | VectorEnv) and all(hasattr(env, name) for name in names)


class EnvPoolEnv(OwnPaceEnv):
    """An EnvPool that was made with a `batch_size` below its `num_envs`; see NOTE [EnvPool].

    A collector that is given one steps each env as soon as its action is known, see `AsyncBatchedCollector`. All envs
    can be reset, but neither single ones, nor can all be stepped together. Close it when it is no longer needed; one
    that was forgotten is closed when the process ends.
    """

    _owns_simulators = False
    lanes_per_env = 1

    def __init__(
        self,
        env: Any,
        *,
        categorical_action_encoding: bool = False,
        device: torch.device | str | None = None,
        stall_warning_s: float = 15.0,
        stall_timeout_s: float | None = None,
        shutdown_timeout: float = 4.0,
    ) -> None:
        """Take over `env`, which nobody else may step from now on.

        Args:
            env: what `envpool.make_gymnasium(task, num_envs=..., batch_size=...)` has made.
            categorical_action_encoding: integers instead of one-hot vectors for discrete values.
            device: where the tensors of the surface lie.
            stall_warning_s: after how many seconds of waiting an env that does not come back is named in a warning.
            stall_timeout_s: after how many an error is raised; without it, waiting goes on.
            shutdown_timeout: the most seconds that closing waits for steps that are under way.
        """
        if not is_asynchronous(env) and not (is_envpool(env) and env.config["num_envs"] == 1):
            raise UnsupportedEnvError(
                f"{env!r} is no EnvPool with a batch_size below its num_envs, as in {COLLECT}. One that steps all its "
                "envs together is for Collector, which takes it as it is."
            )
        if env.config.get("max_num_players", 1) > 1:
            raise UnsupportedEnvError(f"{env!r} has several players in an env, whose answers are not one for each env.")
        self.num_envs, self.at_a_time = int(env.config["num_envs"]), int(env.config["batch_size"])
        super().__init__(
            env.single_observation_space,
            env.single_action_space,
            batch_size=(self.num_envs,),
            device=device,
            categorical_action_encoding=categorical_action_encoding,
        )
        self._env, self._shutdown_timeout = env, as_seconds("shutdown_timeout", shutdown_timeout)
        self._warning_s = as_seconds("stall_warning_s", stall_warning_s)
        self._limit_s = math.inf if stall_timeout_s is None else as_seconds("stall_timeout_s", stall_timeout_s)
        self._look_s = max(LOOK_S[0], min(LOOK_S[1], self._warning_s, self._limit_s))
        self._rows = Rows(self.out_leaves, self.batch_size)
        first = Rows(eager_leaves(self.observations.leaves), self.batch_size)
        self._eager, self._has_begun = EagerResets(first, self._rows), first.arrays[READY]
        self._write, self._write_first = self.observations.some_writer(self._rows), self.observations.some_writer(first)
        self._happened = [self._rows.arrays[key][:, 0] for key in (REWARD, TERMINATED, TRUNCATED)]
        self._bound_action: Rows | None = None
        self._state = Section()
        """For all that follows, which both threads change."""
        self._in_flight, self._is_cut, self._begins = np.zeros((3, self.num_envs), bool)
        """Which envs are under way; which begin anew when they come back; which are beginning, and not stepping."""
        self._landed: deque[int] = deque()
        self._unclaimed = 0
        """Orders for which there is no `recv` yet: less than a `batch_size`."""
        self._expected = 0
        """How many answers are still to come."""
        self._claims: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """One for each `recv`; False for the end."""
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._waited, self._look_at, self._since = 0.0, 0.0, np.zeros(self.num_envs)
        """For how long we have waited in all, when to look next, and since when, in this time, each env is under way:
        what passes while nobody waits does not count."""
        self._named: set[int] = set()
        self._thread = threading.Thread(target=self._receive, daemon=True, name="swath EnvPool")
        self._thread.start()
        atexit.register(self.close)

    @property
    def rows_device(self) -> torch.device | None:
        """The CPU: EnvPool works on arrays."""
        return None

    @property
    def simulators(self) -> list[Any]:
        """The EnvPool."""
        return [self._env]

    def lanes_of(self, envs: Sequence[int]) -> np.ndarray:
        """Each env is a lane."""
        return np.asarray(envs, np.int64)

    # -- as they become ready ----------------------------------------------------------------------------------

    @property
    def idle_envs(self) -> list[int]:
        """Envs that have nothing to do: their rows are the caller's."""
        with self._state:
            busy = self._in_flight.copy()
            busy[list(self._landed)] = True
        return np.flatnonzero(~busy).tolist()

    def begin_steps(self, envs: Sequence[int], action: Rows, cut: np.ndarray | None = None) -> None:
        """Let `envs`, which are idle, step with their rows of `action`; those that `cut` marks begin anew then."""
        if action is not self._bound_action:
            self._read, self._bound_action = self.actions.batch_reader(action), action
        lanes = np.asarray(envs, np.int32)
        acts = self._read(lanes)
        with self._state:
            self._must_go_on()
            self._env.send(acts, lanes)
            self._is_cut[lanes] = False if cut is None else cut[lanes]
            self._has_begun[lanes] = False  # also if nobody has asked for what one began with
            self._have_ordered(lanes, begins=False)

    def take_ready(self, least: int, most: int, timeout_s: float) -> tuple[list[int], list[int]]:
        """Envs that have stepped, in the order in which they came back; see `OwnPaceEnv`."""
        landed = self._landed
        self._wait(lambda: bool(landed), math.inf)
        if len(landed) < least:
            self._wait(lambda: len(landed) >= least, timeout_s)
        if not landed:
            raise RuntimeError(
                f"Nothing comes back from {self!r}: it answers for {self.at_a_time} envs at a time, and only "
                f"{self._unclaimed} are under way."
            )
        return [landed.popleft() for _ in range(min(most, len(landed)))], []

    def _have_ordered(self, lanes: np.ndarray, begins: bool) -> None:
        self._in_flight[lanes], self._begins[lanes], self._since[lanes] = True, begins, self._waited
        claims, self._unclaimed = divmod(self._unclaimed + len(lanes), self.at_a_time)
        self._expected += claims
        for _ in range(claims):
            self._claims.put(True)

    def _begin(self, lanes: np.ndarray) -> None:
        if len(lanes):
            self._has_begun[lanes] = False
            self._env._reset(lanes.astype(np.int32))
            self._have_ordered(lanes, begins=True)

    # -- in the thread -----------------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            while self._claims.get() and not self.is_closed:
                answer = self._env.recv()
                with self._state:
                    if not self.is_closed:
                        self._land(*answer)
                self._bell.put(None)
        except BaseException as error:
            annotate(error, f"Raised where {self!r} was to answer.")
            self._failure = error
            self._bell.put(None)

    def _land(self, observation: Any, reward: Any, terminated: Any, truncated: Any, info: dict[str, Any]) -> None:
        """Put away what has come, and let begin anew what has ended."""
        lanes = info["env_id"]
        if not self._in_flight[lanes].all():
            raise RuntimeError(f"It answers for envs {lanes.tolist()}, not all of which were ordered by us to step.")
        self._in_flight[lanes] = False
        has_begun = self._begins[lanes]
        if has_begun.any():
            self._write_first(observation, np.flatnonzero(has_begun), lanes[has_begun])
            self._has_begun[lanes[has_begun]] = True
        stepped = np.flatnonzero(~has_begun)
        if len(stepped):
            self._write(observation, stepped, lanes[stepped])
            for array, values in zip(self._happened, (reward, terminated, truncated), strict=True):
                array[lanes[stepped]] = values[stepped]
        ended = (terminated | truncated | self._is_cut[lanes]) & ~has_begun
        self._begin(lanes[ended])
        self._landed.extend(lanes[~ended].tolist())
        self._expected -= 1

    # -- waiting -----------------------------------------------------------------------------------------------

    def _wait(self, is_enough: Callable[[], bool], timeout_s: float) -> None:
        """Wait until there is enough, nothing is to come, or the time is over."""
        left_s = timeout_s
        while True:
            self._must_go_on()
            patience_s = min(self._look_s, left_s)
            if is_enough() or not self._expected or patience_s <= 0:
                return
            began = time.monotonic()
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=patience_s)
            took_s = time.monotonic() - began
            left_s -= took_s
            self._waited += min(took_s, patience_s)  # if it took longer, the process was stopped
            if self._waited >= self._look_at:
                self._look_for_stalls()

    def _look_for_stalls(self) -> None:
        self._look_at = self._waited + self._look_s
        with self._state:
            still_s = np.where(self._in_flight, self._waited - self._since, 0.0)
        late = np.flatnonzero(still_s > min(self._warning_s, self._limit_s)).tolist()
        said = f"Envs {late} of {self!r} have not come back for {still_s.max():.1f} s of waiting"
        if self.at_a_time > 1:
            said += f" (it answers for {self.at_a_time} at a time: some may only wait for the others)"
        if still_s.max() > self._limit_s:
            self._failure = TimeoutError(
                f"{said}, and stall_timeout_s={self._limit_s:g}. EnvPool's threads cannot be ended; make a new one."
            )
            self._must_go_on()
        if not self._named.issuperset(late):
            warnings.warn(f"{said}; stall_warning_s={self._warning_s:g} says when to warn.", StallWarning, stacklevel=3)
        self._named = set(late)

    def _must_go_on(self) -> None:
        self.must_be_open()
        if self._failure is not None:
            raise self._failure

    # -- all together ------------------------------------------------------------------------------------------

    def new_out_rows(self) -> Rows:
        """The rows that are written into: there are no others."""
        return self._rows

    def reset_into(self, lanes: Sequence[int], out: Rows) -> None:
        """Begin new episodes in all lanes, or hand out those that lanes that have finished have begun."""
        chosen = np.asarray(lanes)
        if not self._has_begun[chosen].all():
            if len(chosen) < self.num_envs and self.at_a_time > 1:
                raise UnsupportedEnvError(
                    f"Envs {chosen.tolist()} of {self!r} cannot be reset without the others: it answers for "
                    f"{self.at_a_time} at a time, and others would have to step for that. Reset all."
                )
            self._begin_anew(chosen)
        with self._state:
            if unwanted := set(lanes) & set(self._landed):
                others = [lane for lane in self._landed if lane not in unwanted]
                self._landed.clear()
                self._landed.extend(others)
        self._eager.hand_out(lanes, out)

    def _begin_anew(self, lanes: np.ndarray) -> None:
        """Let `lanes` begin, and wait until they have."""
        begun = self._has_begun
        with self._state:
            self._must_go_on()
            self._is_cut[lanes] = True
            self._begin(lanes[~self._in_flight[lanes] & ~begun[lanes]])
        while not begun[lanes].all():
            with self._state:
                if not self._expected:  # the last few: see NOTE [EnvPool]
                    self._begin(np.flatnonzero(begun)[: self.at_a_time - self._unclaimed])
            self._wait(lambda: bool(begun[lanes].all()), math.inf)

    def step_into(self, action: Rows, out: Rows) -> bool:
        """Refuse it."""
        raise UnsupportedEnvError(
            f"{self!r} steps its envs at their own pace, and not all together. Collect with {COLLECT}; to step all "
            "together, make the EnvPool without a batch_size."
        )

    def seed_lanes(self, seeds: list[int]) -> None:
        """Say that it cannot be done."""
        warnings.warn(
            f"{self!r} takes no seeds: EnvPool seeds its envs when it is made, so pass seed={seeds[0]} to "
            "envpool.make_gymnasium. Random actions and the policy's noise are seeded.",
            stacklevel=3,
        )

    def _close(self) -> None:
        atexit.unregister(self.close)
        self._claims.put(False)
        has_waited = isinstance(self._failure, TimeoutError)
        self._thread.join(0.0 if has_waited else self._shutdown_timeout)
        if not self._thread.is_alive():
            self._env.close()
        elif not has_waited:
            warnings.warn(
                f"Envs {np.flatnonzero(self._in_flight).tolist()} of {self!r} have not come back within "
                f"shutdown_timeout={self._shutdown_timeout:g} s. A thread is left waiting for them.",
                StallWarning,
                stacklevel=3,
            )

    def __repr__(self) -> str:
        """Its class, and how many envs there are."""
        return f"EnvPoolEnv({type(self._env).__name__}, num_envs={self.num_envs}, batch_size={self.at_a_time})"
