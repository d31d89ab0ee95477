"""AsyncEnvPool: envs that each step at their own pace.

NOTE [Asynchronous envs]: each env has its row of the actions and of what a step writes, as in a ParallelEnv, but no
rounds. An env is *ordered* to step or to begin anew, which wakes its thread or its process; when it has done so, its
number and the outcome are put into one queue, which whoever waits for results empties in one call: envs are served in
the order in which they became ready, so that none waits while another is served twice. From its order until it has
*landed* an env belongs to its worker; before and after, its rows are the caller's.

An env that finishes an episode begins the next at once, as in NOTE [Eager resets], so that the one who collects gets
the end and the new beginning together. Questions to workers (seeds, attributes) wait until everything has landed.

When a worker fails and is replaced, its envs are ordered to begin anew; what they were doing is lost, and counted.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swath.envs.async_calls import AsyncCalls
from swath.envs.async_worker import EnvRows, SeedEach
from swath.envs.base import SURFACE
from swath.envs.eager_reset import EagerResets, eager_leaves
from swath.envs.env_layout import EnvLayout, as_seconds, must_be_count, must_be_on_cpu, must_differ, one_each
from swath.envs.env_supervisor import LAST_S
from swath.envs.env_workers import Backend, EnvWorkers
from swath.envs.parallel_worker import BEGIN, MARKS, STEP, STEP_AND_BEGIN, STEP_AND_CUT, CallEach, Get
from swath.envs.rows import Leaf, Rows, rows_of
from swath.envs.serial import EnvFactory
from swath.errors import check_foreign_arguments, wrong_shape
from swath.keys import RESET, TERMINATED, TRUNCATED, Key
from swath.runtime import undisturbed
from swath.runtime.columns import Columns, writable
from swath.runtime.supervision import Supervision
from swath.seeding import lane_seed, lane_seeds

TUNING = ("stack", "exchange", "worker_affinity")
"""Arguments of TorchRL that tune its implementation, and mean nothing here."""
OWN = (
    "backend",
    "envs_per_worker",
    "create_env_kwargs",
    "device",
    "num_sub_threads",
    "mp_start_method",
    "on_worker_failure",
    "max_restarts",
    "stall_warning_s",
    "stall_timeout_s",
    "start_timeout_s",
    "shutdown_timeout",
)


class AsyncEnvPool(AsyncCalls):
    """Envs with the batch size `[len(env_makers), *child]`, each of which can be stepped without the others.

    Three ways to use it:

    - `send(actions, env_ids)` and `recv()`: envs that have finished begin anew by themselves;
    - `async_step_send(td)` and `async_step_recv()`, and the like for `reset` and `step_and_maybe_reset`;
    - `reset()`, `step(td)` and all else that an env has, which wait for all.

    A collector that is given one steps each env as soon as its action is known, see `AsyncBatchedCollector`.
    Close it when it is no longer needed; one that was forgotten is closed when the process ends.
    """

    def __init__(
        self,
        env_makers: EnvFactory | Sequence[EnvFactory],
        *,
        backend: Backend = "threading",
        envs_per_worker: int = 1,
        create_env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        device: torch.device | str | None = None,
        num_sub_threads: int = 1,
        mp_start_method: str | None = None,
        on_worker_failure: str = "raise",
        max_restarts: int = 3,
        stall_warning_s: float = 15.0,
        stall_timeout_s: float | None = None,
        start_timeout_s: float = 300.0,
        shutdown_timeout: float = 4.0,
        **tuning: Any,
    ) -> None:
        """Start the workers, and wait until they have made their envs.

        Args:
            env_makers: a list with a factory for each env.
            backend: "threading" steps each env in a thread of this process: for envs that wait, or compute outside of
                Python. "multiprocessing" has processes of their own for them.
            envs_per_worker: how many envs share a process; each has a thread of its own there.
            create_env_kwargs: keyword arguments of the factories, or a list with some for each.
            device: where the tensors of the surface lie.
            num_sub_threads: for torch in each process.
            mp_start_method: "forkserver" (the default), "spawn" or "fork".
            on_worker_failure: "raise" what an env raises; "restart" its worker, whose envs begin anew; or "drop" it.
            max_restarts: how often each worker is restarted; then the error is raised.
            stall_warning_s: after how many seconds an env that does not come back is named in a warning.
            stall_timeout_s: after how many its worker is given up, which `on_worker_failure` then deals with.
            start_timeout_s: how long a worker may take to make its envs.
            shutdown_timeout: the most seconds that closing may take.
            tuning: names that TorchRL's pool is tuned with, which have no effect.
        """
        check_foreign_arguments("AsyncEnvPool", tuning, ignored=TUNING, refused={}, known=OWN)
        if callable(env_makers):
            env_makers = [env_makers]
        if backend not in ("threading", "multiprocessing"):
            raise ValueError(f"backend must be 'threading' or 'multiprocessing', got {backend!r}.")
        if on_worker_failure not in ("raise", "restart", "drop"):
            raise ValueError(f"on_worker_failure must be 'raise', 'restart' or 'drop', got {on_worker_failure!r}.")
        if backend == "threading" and on_worker_failure == "restart" and stall_timeout_s is not None:
            raise ValueError(
                "stall_timeout_s with on_worker_failure='restart' needs backend='multiprocessing': a thread that hangs "
                "cannot be ended, and would write over what its successor does."
            )
        must_be_count("envs_per_worker", envs_per_worker)
        must_be_count("num_sub_threads", num_sub_threads)
        self._turn = threading.RLock()
        """One thread at a time; what is asked in another, of a pool that is collected from, waits."""
        self._shutdown_timeout = as_seconds("shutdown_timeout", shutdown_timeout)
        count = len(env_makers)
        self._workers = EnvWorkers(
            f"AsyncEnvPool({count} envs)",
            one_each("env_makers", env_makers, count),
            one_each("create_env_kwargs", create_env_kwargs or {}, count),
            backend=backend,
            per_worker=envs_per_worker,
            method=mp_start_method or "forkserver",
            threads=num_sub_threads,
            supervision=Supervision(
                on_failure=on_worker_failure,
                max_restarts=max_restarts,
                stall_warning_s=as_seconds("stall_warning_s", stall_warning_s),
                stall_timeout_s=stall_timeout_s,
                start_timeout_s=start_timeout_s,
            ),
        )
        self._is_shared = backend == "multiprocessing"
        try:
            made = self._workers.start()
            layouts = [layout for each in made for layout in each.layouts]
            simulators = [simulator for each in made for simulator in each.simulators]
            must_differ(simulators, "AsyncEnvPool([lambda: GymEnv('CartPole-v1')] * 4)")
            must_be_on_cpu("AsyncEnvPool", layouts)
            self._take_layout(layouts, device)
        except BaseException:
            self._workers.close(LAST_S)
            raise

    def _take_layout(self, layouts: list[EnvLayout], device: torch.device | str | None) -> None:
        super().__init__(layouts, device)
        self._workers.name = repr(self)
        self._workers.seeds_of_replacement = self._seeds_of_replacement
        self._calls = [""] * self.num_envs
        """As part of which call each env was ordered last."""
        self._out_columns = self._columns(self.out_leaves)
        self._eager_columns = self._columns(eager_leaves(self.observations.leaves))
        self._rows = Rows.over(self._out_columns)
        self._eager = EagerResets(Rows.over(self._eager_columns), self._rows)
        self._share_actions(self.actions.leaves)

    def _columns(self, leaves: Mapping[Key, Leaf]) -> Columns:
        return Columns.shared(leaves, self.batch_size) if self._is_shared else Columns(leaves, self.batch_size)

    def _share_actions(self, leaves: Mapping[Key, Leaf]) -> None:
        """Make rows for actions of that kind, and tell the workers."""
        action = self._columns({**leaves, **MARKS})
        rows = EnvRows(action, self._out_columns, self._eager_columns)
        self._workers.ask_all(rows, "taking new rows")
        self._workers.rows, self._action_columns = rows, action
        self._action, self._action_leaves = Rows.over(action), dict(leaves)
        self._bound_action: Rows | None = None
        self._marks = self._action.arrays[RESET]

    def _bind_action(self, action: Rows) -> None:
        if action is self._bound_action:
            return
        leaves = {key: action.leaf(key) for key in self.action_keys}
        if leaves != self._action_leaves:
            self._share_actions(leaves)
        ours = self._action.arrays
        self._copies = [(ours[key], action.arrays[key]) for key in self.action_keys]
        """Where actions are copied to, and from."""
        self._bound_action = action

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers; of this process, if they are threads."""
        return self._workers.pids

    @property
    def lost_steps(self) -> int:
        """Steps of workers that failed, which nobody has got."""
        return self._workers.lost_steps

    @property
    def num_workers(self) -> int:
        """How many threads or processes there are for the envs, or were."""
        return len(self._workers.shares)

    @property
    def workers_alive(self) -> int:
        """How many of them have not ended."""
        return len(self._workers.pool.carrier.alive())

    @property
    def restarts(self) -> int:
        """How often workers were restarted."""
        return self._workers.pool.restarts

    # -- as they become ready: for whoever collects ----------------------------------------------------------------

    @property
    def idle_envs(self) -> list[int]:
        """Envs that have nothing to do: their rows are the caller's."""
        busy = self._workers.in_flight.copy()
        busy[list(self._workers.landed)] = True
        busy[list(self._workers.dropped)] = True
        return np.flatnonzero(~busy).tolist()

    def begin_steps(self, envs: Sequence[int], action: Rows, cut: np.ndarray | None = None) -> None:
        """See `OwnPaceEnv`."""
        with self._turn:
            self._bind_action(action)
            lanes = self.lanes_of(envs)
            rows = rows_of(lanes)
            for ours, given in self._copies:
                ours[rows] = given[rows]
            if cut is not None and cut[lanes].any():
                self._marks[lanes] = cut[lanes]
                marked = [env for env in envs if cut[self._lanes[env]].any()]
                self._workers.order(marked, STEP_AND_CUT)
                envs = [env for env in envs if env not in marked]
            self._workers.order(envs, STEP_AND_BEGIN)

    def take_ready(self, least: int, most: int, timeout_s: float) -> tuple[list[int], list[int]]:
        """Envs that are ready: see `OwnPaceEnv`."""
        with self._turn:
            workers, landed = self._workers, self._workers.landed
            self.must_be_open()
            workers.wait(1, math.inf)
            if len(landed) < least:
                workers.wait(least, timeout_s)
            ready = [landed.popleft() for _ in range(min(most, len(landed)))]
            begun = self._begun(ready)
            return [env for env in ready if env not in begun] if begun else ready, begun

    def _begun(self, envs: Sequence[int]) -> list[int]:
        return [env for env in envs if self._workers.ordered[env] == BEGIN]

    # -- some at a time: see AsyncCalls ----------------------------------------------------------------------------

    def begin_call(self, call: str, envs: Sequence[int], what: int, actions: Mapping[Key, Tensor] | None) -> None:
        """Let `envs`, which must be idle, do `what`."""
        with self._turn:
            self.must_be_open()
            self.stepped_by = SURFACE
            if busy := [env for env in envs if self._workers.in_flight[env] or env in self._workers.landed]:
                raise RuntimeError(
                    f"{call} was called for envs {busy} of {self!r}, which have not been received since the last call."
                )
            if gone := sorted(set(envs) & set(self._workers.dropped)):
                raise RuntimeError(f"{call} was called for envs {gone} of {self!r}, which were dropped.")
            if actions is not None:
                self._put_actions(envs, actions)
            for env in envs:
                self._calls[env] = call
            if what == BEGIN:
                self._workers.begin_anew(envs)
            else:
                self._workers.order(envs, what)

    def _put_actions(self, envs: Sequence[int], actions: Mapping[Key, Tensor]) -> None:
        leaves = {key: Leaf.of(value, len(self.batch_size)) for key, value in actions.items()}
        if leaves != self._action_leaves:
            self._share_actions(leaves)
        lanes = self.lanes_of(envs)
        for key, value in actions.items():
            if value.shape[: len(self.batch_size)] != (len(envs), *self.batch_size[1:]):
                raise wrong_shape(
                    key, (len(envs), *self.batch_size[1:], *leaves[key].shape), value.shape, "The actions given"
                )
            given = value.detach().reshape(len(lanes), *leaves[key].shape).cpu()
            writable(self._action.flat(key))[lanes] = writable(given)
        self._bound_action = None

    def end_call(
        self, call: str, least: int, most: int | None, timeout_s: float | None, env: int | None = None
    ) -> list[int]:
        """The envs that have finished `call`."""
        if least < 1 or (most is not None and most < least) or (timeout_s is not None and timeout_s < 0):
            raise ValueError(f"At least {least} and at most {most} results in {timeout_s} seconds cannot be asked for.")
        with self._turn:
            self.must_be_open()
            workers = self._workers

            def wanted() -> list[int]:
                return [one for one in workers.landed if self._calls[one] == call and env in (None, one)]

            def coming() -> int:
                flying = np.flatnonzero(workers.in_flight).tolist()
                return len(wanted()) + sum(self._calls[one] == call and env in (None, one) for one in flying)

            least = 1 if env is not None else least
            if coming() < least:
                raise RuntimeError(f"{least} results of {call} were asked for, but only {coming()} envs are called.")
            if not workers.wait_until(
                lambda: len(wanted()) >= min(least, coming()), math.inf if timeout_s is None else timeout_s
            ):
                raise TimeoutError(
                    f"Only {len(wanted())} of {least} envs of {self!r} have finished {call} in {timeout_s} s; their "
                    "results are kept."
                )
            taken = wanted()[: 1 if env is not None else most]
            for one in taken:
                workers.landed.remove(one)
            return taken

    # -- all together ------------------------------------------------------------------------------------------

    def new_out_rows(self) -> Rows:
        """The rows that the workers write into: there are no others."""
        self.must_be_open()
        return self._rows

    def step_into(self, action: Rows, out: Rows) -> bool:
        """Step all envs, and wait for them."""
        with self._turn:
            if self._workers.in_flight.any() or self._workers.landed:
                raise RuntimeError(f"Some envs of {self!r} were sent a step that has not been received.")
            if self._workers.dropped:
                raise RuntimeError(f"Envs {self._workers.dropped} of {self!r} were dropped: step the others by send().")
            self._bind_action(action)
            for ours, given in self._copies:
                np.copyto(ours, given)
            self._copy(out, self._rows)
            self._workers.order(range(self.num_envs), STEP_AND_BEGIN if out.restarts else STEP)
            self._forget_results()
            self._copy(self._rows, out)
            return bool((self._rows.arrays[TERMINATED] | self._rows.arrays[TRUNCATED]).any())

    def reset_into(self, lanes: Sequence[int], out: Rows) -> None:
        """Begin new episodes in `lanes`; what their envs are doing is waited for, and forgotten."""
        with self._turn:
            envs = sorted({lane // self.lanes_per_env for lane in lanes})
            self._forget_results(envs)
            self._copy(out, self._rows)
            left = self._eager.hand_out(lanes, self._rows)
            if left:
                envs = sorted({lane // self.lanes_per_env for lane in left} - {*self._workers.dropped})
                self._marks[self.lanes_of(envs)] = False
                self._marks[list(left)] = True
                with undisturbed:  # or those would be waited for that were never told
                    self._workers.order(envs, BEGIN)
                self._forget_results(envs)
            self._copy(self._rows, out)

    def _forget_results(self, envs: Sequence[int] | None = None) -> None:
        """Wait for `envs`, or all, and leave what they have done in the rows."""
        workers = self._workers
        workers.settle(envs)
        gone = set(range(self.num_envs) if envs is None else envs)
        for env in [env for env in workers.landed if env in gone]:
            workers.landed.remove(env)

    def _copy(self, source: Rows, target: Rows) -> None:
        """Between our rows and those of a caller who has made some himself."""
        if source is not target:
            for key in self.out_leaves:
                target.tensors[key].copy_(source.tensors[key])

    def seed_lanes(self, seeds: list[int]) -> None:
        """Seed each lane; in effect from its next reset."""
        with self._turn:
            by_env = [seeds[first : first + self.lanes_per_env] for first in range(0, len(seeds), self.lanes_per_env)]
            shares = self._workers.shares
            requests = {index: SeedEach([by_env[env] for env in shares[index]]) for index in self._workers.pool.indices}
            self._workers.ask(dict(requests), "seeding")
            self._eager.drop_lanes(self._lanes.reshape(-1))

    def _seeds_of_replacement(self, share: range) -> list[list[int]] | None:
        """Seeds that follow from the one that was set but repeat none of its episodes."""
        if self._seed is None:
            return None
        new = lane_seed(self._seed, self.first_lane + self.num_lanes + 1 + self._workers.pool.restarts)
        size = self.lanes_per_env
        return [lane_seeds(new, size, self.first_lane + env * size, False) for env in share]

    # -- what the envs have ------------------------------------------------------------------------------------

    def get_attr(self, path: str) -> list[Any]:
        """What is at `path` (names joined by dots, `[i]` and `["key"]`) of each env: copies, as they were sent."""
        return self._ask_each(Get(path), f"looking for {path!r}")

    def call(self, path: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call what is at `path` of each env, a method for instance; the results, as they were sent."""
        return self._ask_each(CallEach(path, args, kwargs), f"calling {path!r}")

    def _ask_each(self, request: object, what: str) -> list[Any]:
        self.must_be_open()
        with self._turn:
            return [found for share in self._workers.ask_all(request, what) for found in share]

    def must_be_open(self) -> None:
        """Raise if the pool is closed, or has lost its workers."""
        super().must_be_open()
        self._workers.must_be_open()

    def _close(self) -> None:
        try:
            self._workers.close(self._shutdown_timeout)
        finally:  # whoever holds rows keeps their memory, but needs no descriptor of it
            for columns in (self._out_columns, self._eager_columns, self._action_columns):
                if columns.block is not None:
                    columns.block.release()
