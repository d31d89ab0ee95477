"""ParallelEnv: several envs as one, stepped at the same time in processes of their own.

NOTE [Parallel envs]: a worker process is a SerialEnv on a part of the rows. All rows lie in memory that every process
maps: the workers read their lanes of the actions and write their lanes of the observations, rewards and flags, and
nothing is copied or sent. Each step is one round, see NOTE [Rounds]: the actions are put into place, the workers are
called, and when the last of them has finished, the rows are what `step_into` of any other env would have left there. A
reset is a round for the workers whose lanes are marked, or was made before: see NOTE [Eager resets].

Everything else is rare and goes through the channels, as a request to each worker and an answer of each: seeds,
attributes, and where rows lie. There may be several rows to write into, those of the surface and those of a collector;
each was told to the workers once, under a number, which is among a round's orders. Rows that somebody has made
himself, unknown to the workers, are served through rows of our own, by copying. The actions of a policy are copied into
rows that are told anew when their shape or dtype changes.

An exception in an env is an answer like any other: its worker finishes the round, the exception is raised here, and
all goes on. A worker that dies finishes nothing, but whoever waits for a round waits for the ends of all processes too.
What an interrupt leaves unfinished is awaited before anything new is begun.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from swath.envs.eager_reset import EagerResets, eager_leaves
from swath.envs.env_layout import EnvLayout, JoinedEnv, as_seconds, must_be_count, must_be_on_cpu, one_each
from swath.envs.env_rounds import EnvRounds
from swath.envs.env_supervisor import LAST_S
from swath.envs.parallel_worker import (
    BEGIN,
    FINISHED,
    MARKS,
    STEP,
    STEP_AND_BEGIN,
    CallEach,
    EnvTask,
    Get,
    Seed,
    TakeActions,
    TakeOut,
)
from swath.envs.registry import Registered
from swath.envs.rows import Leaf, Rows
from swath.envs.serial import EnvFactory, SerialEnv
from swath.errors import ClosedError, WorkerDiedError, check_foreign_arguments
from swath.keys import RESET, Key
from swath.runtime.columns import Columns

TUNING = (
    "share_individual_td",
    "shared_memory",
    "memmap",
    "policy_proof",
    "non_blocking",
    "use_buffers",
    "metadata_from_workers",
    "consolidate",
    "daemon",
    "auto_wrap_envs",
)
"""Arguments of TorchRL that tune its implementation, and mean nothing here."""
REFUSED = {
    "pin_memory": "Its rows lie in memory that is shared between processes.",
    "allow_step_when_done": "A lane may always be stepped.",
}


class ParallelEnv(JoinedEnv):
    """`num_workers` envs with the batch size `[num_workers, *child]`, stepped at the same time in other processes.

    It does what `SerialEnv` does, with the same data for the same seed. The factories are sent by value, so that
    lambdas and classes of a script or a notebook will do, and the script needs no `if __name__ == "__main__"`. Envs
    that were registered with gymnasium in this process are known in the workers.

    Close it when it is no longer needed; one that was forgotten is closed when the process ends.
    """

    def __new__(cls, num_workers: int, create_env_fn: Any, *, serial_for_single: bool = False, **options: Any) -> Any:
        """A ParallelEnv; or, with `serial_for_single`, a SerialEnv of the one env."""
        if serial_for_single and num_workers == 1:
            given = {name: options[name] for name in ("create_env_kwargs", "device") if name in options}
            return SerialEnv(num_workers, create_env_fn, **given)
        return super().__new__(cls)

    def __init__(
        self,
        num_workers: int,
        create_env_fn: EnvFactory | Sequence[EnvFactory],
        *,
        create_env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        envs_per_worker: int = 1,
        device: torch.device | str | None = None,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        mp_start_method: str | None = None,
        serial_for_single: bool = False,
        shutdown_timeout: float = 4.0,
        stall_warning_s: float = 15.0,
        **tuning: Any,
    ) -> None:
        """Start the workers, and wait until they have made their envs.

        Args:
            num_workers: how many envs.
            create_env_fn: one factory for all, or a list with one for each.
            create_env_kwargs: keyword arguments of the factory, or a list with some for each.
            envs_per_worker: how many envs share a process, in which they are stepped one after the other: for small
                envs, and where there are fewer cores than envs.
            device: where the tensors of the surface lie.
            num_threads: for torch in this process; left as it is if None.
            num_sub_threads: for torch in each worker.
            mp_start_method: "forkserver" (the default), "spawn" or "fork".
            serial_for_single: whether one env alone shall be a SerialEnv in this process.
            shutdown_timeout: the most seconds that closing may take.
            stall_warning_s: after how many seconds without a sign a worker is named in a warning.
            tuning: names that other implementations are tuned with, which have no effect.
        """
        own = inspect.signature(ParallelEnv.__init__).parameters
        check_foreign_arguments("ParallelEnv", tuning, ignored=TUNING, refused=REFUSED, known=own)
        factories = one_each("create_env_fn", create_env_fn, num_workers)
        kwargs = one_each("create_env_kwargs", create_env_kwargs or {}, num_workers)
        for name, count in (("envs_per_worker", envs_per_worker), ("num_sub_threads", num_sub_threads)):
            must_be_count(name, count)
        self._turn = threading.RLock()
        """Workers do one thing at a time; what is asked in another thread, of an env that is collected from, waits."""
        self._shutdown_timeout = as_seconds("shutdown_timeout", shutdown_timeout)
        if num_threads is not None:
            must_be_count("num_threads", num_threads)
            torch.set_num_threads(num_threads)
        self._workers = EnvRounds(
            f"ParallelEnv({num_workers}, ...)",
            num_workers,
            envs_per_worker,
            method=mp_start_method or "forkserver",
            threads=num_sub_threads,
            stall_s=as_seconds("stall_warning_s", stall_warning_s),
        )
        try:
            layouts = self._start(factories, kwargs)
            must_be_on_cpu("ParallelEnv", layouts)
            self._take_layout(layouts, device)
            self._share_actions(layouts[0].actions.leaves)
        except BaseException:
            self._workers.close(LAST_S)
            raise

    def _start(self, factories: list[Any], kwargs: list[dict[str, Any]]) -> list[EnvLayout]:
        registered = Registered.here()
        tasks = [
            EnvTask(
                share[0],
                [factories[env] for env in share],
                [kwargs[env] for env in share],
                registered,
                self._workers.rounds.member(index),
            )
            for index, share in enumerate(self._workers.shares)
        ]
        return [layout for layouts in self._workers.start(tasks) for layout in layouts]

    def _take_layout(self, layouts: list[EnvLayout], device: torch.device | str | None) -> None:
        super().__init__(layouts, device)
        self._workers.name = repr(self)
        lanes = self.num_lanes // len(layouts)
        self._lanes_of = [(share[0] * lanes, (share[-1] + 1) * lanes) for share in self._workers.shares]
        self._known: weakref.WeakKeyDictionary[Rows, Known] = weakref.WeakKeyDictionary()
        self._given = 0
        self._mirror: Rows | None = None
        self._bound_action: Rows | None = None
        self._bound_out: Rows | None = None
        self._eager: EagerResets | None = None
        self._copies: list[tuple[np.ndarray, np.ndarray]] = []
        """Where actions are copied to, and from."""

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers."""
        return self._workers.pids

    # -- rows --------------------------------------------------------------------------------------------------

    def new_out_rows(self) -> Rows:
        """Rows that the workers write into themselves."""
        self.must_be_open()
        shared = Columns.shared(self.out_leaves, self.batch_size)
        eager = Columns.shared(eager_leaves(self.observations.leaves), self.batch_size)
        rows, kept = Rows.over(shared), tuple(known.number for known in self._known.values())
        self._given += 1
        self._ask("taking new rows of", TakeOut(self._given, shared, eager, kept))
        self._known[rows] = Known(self._given, Rows.over(eager))
        return rows

    def _bind_out(self, out: Rows) -> bool:
        """Write into `out` from now on; whether the workers know it."""
        known = self._known.get(out)
        if known is None:
            return False
        self._bound_out, self._out_number = out, known.number
        self._eager = EagerResets(known.eager, out)
        return True

    def _share_actions(self, leaves: dict[Key, Leaf]) -> None:
        """Make rows for actions of that kind, and tell the workers."""
        shared = Columns.shared({**leaves, **MARKS}, self.batch_size)
        self._ask("taking new rows of", TakeActions(shared))
        self._shared_action, self._action_leaves = Rows.over(shared), dict(leaves)
        self._marks = self._shared_action.arrays[RESET]

    def _bind_action(self, action: Rows) -> None:
        leaves = {key: action.leaf(key) for key in self.action_keys}
        if leaves != self._action_leaves:
            self._share_actions(leaves)
        ours = self._shared_action.arrays
        self._copies = [(ours[key], action.arrays[key]) for key in self.action_keys]
        self._bound_action = action

    # -- stepping ----------------------------------------------------------------------------------------------

    def step_into(self, action: Rows, out: Rows) -> bool:
        """Step all envs at once."""
        with self._turn:
            self._workers.settle()
            if out is not self._bound_out and not self._bind_out(out):
                return self._through_mirror(out, lambda mirror: self.step_into(action, mirror))
            if action is not self._bound_action:
                self._bind_action(action)
            for ours, given in self._copies:
                np.copyto(ours, given)
            return self._round("stepping", STEP_AND_BEGIN if out.restarts else STEP) == FINISHED

    def reset_into(self, lanes: Sequence[int], out: Rows) -> None:
        """Begin new episodes in `lanes`, in those workers that have any of them."""
        with self._turn:
            self._workers.settle()
            if out is not self._bound_out and not self._bind_out(out):
                self._through_mirror(out, lambda mirror: self.reset_into(lanes, mirror))
                return
            if self._eager is not None:
                lanes = self._eager.hand_out(lanes, out)
            if not lanes:
                return
            self._marks[:] = False
            self._marks[list(lanes)] = True
            workers = None
            if len(lanes) < self.num_lanes:
                workers = [index for index, (start, stop) in enumerate(self._lanes_of) if self._marks[start:stop].any()]
            self._round("resetting", BEGIN, workers)

    def _round(self, doing: str, what: int, workers: Sequence[int] | None = None) -> int:
        try:
            return self._workers.round(doing, (what, self._out_number), workers)
        except Exception as error:
            if self.is_closed and not isinstance(error, WorkerDiedError):
                raise ClosedError(f"{self!r} was closed while it was {doing}.") from error
            raise
        finally:
            self.is_closed = self._workers.is_closed

    def _ask(self, doing: str, *requests: Any) -> list[Any]:
        """The answers of all workers: each to its own request, or all to one."""
        with self._turn:
            try:
                each = requests if len(requests) > 1 else requests * len(self._workers.shares)
                return self._workers.ask(each, doing)
            finally:
                self.is_closed = self._workers.is_closed

    def _through_mirror(self, out: Rows, do: Any) -> bool:
        """Use rows that the workers know, for rows that they do not."""
        if self._mirror is None:
            self._mirror = self.new_out_rows()
        for key, tensor in self._mirror.tensors.items():
            tensor.copy_(out.tensors[key])
        try:
            return bool(do(self._mirror))
        finally:
            for key, tensor in self._mirror.tensors.items():
                out.tensors[key].copy_(tensor)

    def seed_lanes(self, seeds: list[int]) -> None:
        """Seed the lanes of each worker there."""
        self._ask("seeding", *(Seed(seeds[start:stop]) for start, stop in self._lanes_of))

    # -- what the envs have ------------------------------------------------------------------------------------

    def get_attr(self, path: str) -> list[Any]:
        """What is at `path` (names joined by dots, `[i]` and `["key"]`) of each env: copies, as they were sent."""
        self.must_be_open()
        return list(chain(*self._ask(f"looking for {path!r} in", Get(path))))

    def call(self, path: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call what is at `path` of each env, a method for instance; the results, as they were sent."""
        self.must_be_open()
        return list(chain(*self._ask(f"calling {path!r} of", CallEach(path, args, kwargs))))

    def _close(self) -> None:
        try:
            self._workers.close(self._shutdown_timeout)
        finally:  # rows keep their memory, and a descriptor; others may hold theirs for as long as they like
            self._out_rows = self._mirror = self._bound_out = self._bound_action = self._eager = None
            self._shared_action, self._copies = Rows({}), []
            self._marks = np.empty(0, bool)


@dataclass(frozen=True)
class Known:
    """What the workers know of rows: their number, and where they put first observations."""

    number: int
    eager: Rows
