"""RemoteControl: what is asked of workers and told to them, whoever delivers their batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from swath.collectors.base import BaseCollector
from swath.collectors.board import SharedBudget
from swath.collectors.config import Hook, check_kind
from swath.collectors.messages import Ready
from swath.collectors.multi_config import MultiConfig
from swath.collectors.workers import Workers
from swath.data import ReplayBuffer
from swath.rollout import FrameBudget
from swath.rollout.trajectories import WORKER_BITS
from swath.runtime.paths import follow
from swath.seeding import checked_seed, next_seed
from swath.weights import POLICY_ID, Publisher, flat_weights, for_worker

GATHERED = ("episodes", "idle_frames", "pending_frames", "dropped_frames")
TIMES = ("time/env", "time/policy", "time/bookkeeping")
"""Numbers of the workers that are added up."""


class RemoteControl(BaseCollector):
    """Weights, seeds, attributes, state and numbers of collectors that live in workers."""

    config: MultiConfig
    _workers: Workers
    _publisher: Publisher
    _given_policy: Any
    _makers: list[Any]
    _layout: Ready
    _budget: FrameBudget
    _shared_budget: SharedBudget | None
    _batches: int
    _numbers: dict[int, int]
    _next_number: int
    _seed: tuple[int, bool] | None
    _worker_pre_hook: Callable[[], Any] | None
    _worker_hook: Hook | None
    _last_state: dict[str, Any] | None

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return len(self._makers)

    @property
    def num_lanes(self) -> int:
        """Over all workers."""
        return sum(self._workers.lanes[index] for index in self._workers.indices or self._workers.lanes)

    @abstractmethod
    def _must_be_open(self) -> None:
        """Raise if nothing can be asked any more."""

    @abstractmethod
    def _attend(self) -> None:
        """See to what has come from the workers, without waiting."""

    @abstractmethod
    def _at_rest(self) -> AbstractContextManager[None]:
        """A context in which no worker collects on its own."""

    # -- weights -----------------------------------------------------------------------------------------------

    def _update_weights(self, requested: dict[str, Any], worker_ids: Sequence[int] | None) -> None:
        self._must_be_open()
        self._attend()
        everyone = self._workers.indices
        is_for_all = worker_ids is None and all(for_worker({m: s}, -1) for m, s in requested.items())
        if is_for_all:
            ready = {model_id: self._weights_from(model_id, source) for model_id, source in requested.items()}
            self._publisher.version += 1
            for model_id, weights in ready.items():
                self._publisher.publish(model_id, weights, everyone)
            return
        chosen = everyone if worker_ids is None else list(worker_ids)
        if unknown := [index for index in chosen if index not in range(self.num_workers)]:
            raise ValueError(f"worker_ids={unknown} do not exist: there are {self.num_workers} workers.")
        each = {
            index: {m: self._weights_from(m, source) for m, source in for_worker(requested, index).items()}
            for index in chosen
        }
        self._publisher.version += 1
        for index, models in each.items():
            for model_id, weights in models.items():
                self._publisher.publish_to(index, model_id, weights)

    def _weights_from(self, model_id: str, source: Any) -> dict[str, Any]:
        """Weights by the names that the workers' model has for them."""
        if not self._publisher.knows(model_id):
            if model_id == POLICY_ID:
                raise RuntimeError("The workers' policy has no weights to update: it acts at random, or is no module.")
            layout = self._workers.ask("weight_layout", [model_id], workers=self._workers.indices[:1])
            self._publisher.add(model_id, next(iter(layout.values())), self._workers.indices)
        if source is None:
            if self._given_policy is not None and not isinstance(self._given_policy, nn.Module):
                raise RuntimeError(
                    f"The policy is {type(self._given_policy).__name__}, no module, so that it has no weights that "
                    "could be published: workers keep the copy that they were sent. Give a torch.nn.Module."
                )
            if self._given_policy is None:
                raise RuntimeError(
                    "Workers have made the policy themselves, so that there is none here to take weights from: give "
                    "them, as in update_policy_weights_(policy)."
                )
            source = self._given_policy
        return self._publisher.layout(model_id).named(flat_weights(source))

    @property
    def policy_version(self) -> int:
        """How often weights were published; the frames tell with which version they were made."""
        return self._publisher.version

    def get_policy_version(self) -> int:
        """The same as `policy_version`."""
        return self.policy_version

    def increment_version(self) -> None:
        """Publish the weights that workers have under the next version."""
        self._must_be_open()
        self._publisher.version += 1
        if self._publisher.knows(POLICY_ID):
            self._publisher.publish(POLICY_ID, {}, self._workers.indices)

    # -- control -----------------------------------------------------------------------------------------------

    def _ask(self, path: str, *args: Any, **options: Any) -> dict[int, Any]:
        """What each worker answers to a call of `path`."""
        self._must_be_open()
        try:
            return self._workers.ask(path, args, **options)
        except BaseException:
            if self._workers.failure is not None:
                self.shutdown(raise_on_error=False)
            raise

    def reset(self, index: Any = None, reset_idx: Any = None) -> None:
        """Begin new episodes with new ids: in all workers, or in those of `index` (indices, or True for each)."""
        workers = self._chosen(reset_idx if index is None else index)
        with self._at_rest():
            self._ask("reset", workers=workers)
            for worker in self._workers.indices if workers is None else workers:
                self._lose_episodes(worker, self._workers.answered_after.get(worker))

    def _chosen(self, given: Any) -> list[int] | None:
        """Workers by index, or by True for each; None for all."""
        if given is None:
            return None
        chosen = torch.as_tensor(given).reshape(-1)
        if chosen.dtype == torch.bool:
            if len(chosen) != self.num_workers:
                raise ValueError(f"reset() got {len(chosen)} choices for {self.num_workers} workers.")
            chosen = chosen.nonzero().reshape(-1)
        workers: list[int] = chosen.long().tolist()
        if unknown := [worker for worker in workers if worker not in self._workers.indices]:
            raise ValueError(f"reset({given!r}): there is no worker {unknown[0]} among {self._workers.indices}.")
        return workers

    def _lose_episodes(self, worker: int, ticket: int | None = None) -> None:
        """A worker's work (up to `ticket`) ends its open episodes: they are given up once all of it is delivered."""
        number = self._numbers[worker]
        works = (work for work in reversed(self._workers.done) if work.index == worker)
        last = next((work for work in works if ticket is None or work.ticket <= ticket), None)
        if last is None:
            self._give_up([number])
        else:
            last.ends = number

    def _give_up(self, numbers: Sequence[int | None]) -> None:
        """Drop the open episodes with ids of these numbers."""
        if any(number is not None for number in numbers):
            self._assembler.drop([name for name in self._assembler.open if name >> WORKER_BITS in numbers])

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed every lane of every worker, and begin new episodes: the next batch depends on `seed` alone."""
        seed = checked_seed(seed)
        self._must_be_open()
        self._seed = (seed, static_seed)
        with self._at_rest():
            self._ask("set_seed", seed, static_seed, clears=True)
            self._discard()
        return next_seed(seed, self.num_lanes, static_seed)

    def _discard(self) -> None:
        """Give up what was collected and not delivered."""
        for work in self._workers.done:
            self._workers.discarded_frames += 0 if work.receipt is None else work.receipt.frames
        self._workers.done.clear()
        self._assembler.clear()

    def getattr_policy(self, name: str) -> Any:
        """An attribute of worker 0's policy, by path."""
        return self._first("getattr_policy", name)

    def getattr_env(self, name: str) -> Any:
        """An attribute of worker 0's env, by path."""
        return self._first("getattr_env", name)

    def getattr_rb(self, name: str) -> Any:
        """An attribute of the replay buffer, by path."""
        return follow(self.config.replay_buffer, name)

    def _first(self, path: str, *args: Any) -> Any:
        return next(iter(self._ask(path, *args, workers=self._workers.indices[:1]).values()))

    def get_distant_attr(self, path: str) -> list[Any]:
        """The object at `path`, of each worker's collector."""
        return list(self._ask("get_distant_attr", path).values())

    def cascade_execute(self, path: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the method at `path` in each worker's collector."""
        return list(self._ask(path, *args, kwargs=kwargs).values())

    def map_fn(
        self,
        name: str,
        list_of_args: Sequence[Sequence[Any]],
        list_of_kwargs: Sequence[dict[str, Any]] | None = None,
    ) -> list[Any]:
        """Call the method at `name` in each worker's collector, with arguments of its own."""
        kwargs = [{}] * len(list_of_args) if list_of_kwargs is None else list_of_kwargs
        if not len(list_of_args) == len(kwargs) == self.num_workers:
            raise ValueError(
                f"Expected {self.num_workers} argument entries, one for each of {self.num_workers} workers, got "
                f"{len(list_of_args)} in list_of_args and {len(kwargs)} in list_of_kwargs."
            )
        self._must_be_open()
        calls = {index: (tuple(list_of_args[index]), dict(kwargs[index])) for index in self._workers.indices}
        return list(self._workers.ask_each(name, calls).values())

    @property
    def pre_collect_hook(self) -> Callable[[], Any] | None:
        """Called in the workers before every rollout; may be replaced."""
        return self._worker_pre_hook

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        self.set_pre_collect_hook(hook)

    @property
    def post_collect_hook(self) -> Hook | None:
        """Called in the workers with every batch of theirs; may be replaced."""
        return self._worker_hook

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Hook | None) -> None:
        self.set_post_collect_hook(hook)

    def set_pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        """Replace the hook that workers call before every rollout."""
        check_kind("pre_collect_hook", hook, "Callable | None")
        self._ask("set_pre_collect_hook", hook)
        self._worker_pre_hook = hook

    def set_post_collect_hook(self, hook: Hook | None) -> None:
        """Replace the hook that workers call with every batch."""
        check_kind("post_collect_hook", hook, "Hook | None")
        self._ask("set_post_collect_hook", hook)
        self._worker_hook = hook

    def enable_profile(self, **options: Any) -> None:
        """Trace the first rollouts of the chosen workers; see `ProfileConfig` for the options."""
        if self._iterating:
            raise RuntimeError("Cannot enable profiling after iteration has begun: call it before the first batch.")
        self._ask("enable_profile", kwargs=options)

    def disable_profile(self) -> None:
        """Stop tracing."""
        self._ask("disable_profile")

    def fake_tensordict(self) -> Any:
        """Not to be had: the layout is known, but a batch may be of one worker or of several."""
        raise NotImplementedError(f"{type(self).__name__} has no fake_tensordict(); a Collector has.")

    # -- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counters, and the state of each worker; see `Collector.state_dict`. May be asked for at any moment."""
        if self.closed and self._last_state is not None:
            return self._last_state
        with self._at_rest():
            states = self._ask("state_dict")
        return {
            **{f"worker{index}": state for index, state in states.items()},
            "workers": self.num_workers,
            "frames": self._frames,
            "iter": self._batches,
            "traj_pool": self._next_number,
            "policy_version": self._publisher.version,
            "trajectories": self._assembler.state_dict(),
            "undelivered_frames": self._undelivered_frames,
        }

    @property
    def _undelivered_frames(self) -> int:
        return sum(work.receipt.frames for work in self._workers.done if work.receipt is not None)

    @property
    def _frames(self) -> int:
        """How many frames were delivered, or written to the buffer."""
        return self._budget.spent + (0 if self._shared_budget is None else self._shared_budget.spent)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Go on with the saved counters and weights, in new episodes with new ids."""
        self._must_be_open()
        if self._workers.free is not None:
            raise RuntimeError("This collector runs in the background: load the state before start().")
        indices = self._workers.indices
        missing = [key for key in ("workers", "frames", "iter") if key not in state_dict]
        saved = {i: state_dict[f"worker{i}"] for i in range(self.num_workers) if f"worker{i}" in state_dict}
        if missing or not saved or state_dict["workers"] != self.num_workers:
            raise KeyError(
                f"This is no state of a collector with {self.num_workers} workers: it has "
                f"{state_dict.get('workers', 'none')}{', and no ' + ', '.join(missing) if missing else ''}."
            )
        any_of_them = next(iter(saved.values()))  # for a worker that had been dropped when the state was saved
        states = {index: saved.get(index, any_of_them) for index in indices}
        with self._at_rest():
            calls: dict[int, Any] = {index: ((state,), {"strict": strict}) for index, state in states.items()}
            self._workers.ask_each("load_state_dict", calls, clears=True)
            self._discard()
            self._renumber(state_dict.get("traj_pool", 0))
            self._load_weights(states, state_dict)
        self._budget.spent = state_dict["frames"]
        self._batches = state_dict["iter"]
        self._workers.discarded_frames += state_dict.get("undelivered_frames", 0)
        if "trajectories" in state_dict:
            self._assembler.load_state_dict(state_dict["trajectories"])
            self._assembler.drop()  # their episodes cannot be gone on with

    def _renumber(self, used: int) -> None:
        """No trajectory may have an id that one of the saved collector has."""
        if isinstance(self.config.replay_buffer, ReplayBuffer):
            return  # which has given each of us a number of its own
        self._next_number = max(self._next_number, used)
        for index in self._workers.indices:
            self._numbers[index] = self._next_number
            self._next_number += 1
            self._ask("_loop.lanes.ids.renumber", self._numbers[index], workers=[index])

    def _load_weights(self, states: dict[int, dict[str, Any]], saved: dict[str, Any]) -> None:
        """Publish what the workers have loaded, so that those to come get it too."""
        version = saved.get("policy_version", 0)
        weights = {i: state["policy_state_dict"] for i, state in states.items() if "policy_state_dict" in state}
        if not weights or self._layout.policy is None:
            self._publisher.version = version
            return
        first = weights[min(weights)]
        self._publisher.reset(POLICY_ID, first, version, self._workers.indices)
        for index, own in weights.items():
            if any(not torch.equal(own[name], first[name]) for name in self._layout.policy.tensors if name in first):
                self._publisher.publish_to(index, POLICY_ID, own)

    def stats(self, workers: str = "aggregate") -> dict[str, Any]:
        """Frames, episodes, recent returns, and how the workers are, as a flat dict of numbers.

        Args:
            workers: "aggregate" for all together, "per_worker" for each (as `worker_0/frames`), or "both".
        """
        if workers not in ("aggregate", "per_worker", "both"):
            raise ValueError(f'stats(workers=...) must be "aggregate", "per_worker" or "both", got {workers!r}.')
        rows = {index: self._workers.board.row(index) for index in range(self.num_workers)}
        told: dict[str, Any] = {}
        if workers != "per_worker":
            told.update(self._gathered(list(rows.values())))
        if workers != "aggregate":
            told.update({f"worker_{i}/{name}": value for i, row in rows.items() for name, value in row.items()})
        return told

    def _gathered(self, rows: list[dict[str, float]]) -> dict[str, Any]:
        assembler, workers = self._assembler, self._workers
        total = {name: int(sum(row[name] for row in rows) + workers.past.get(name, 0)) for name in GATHERED}
        told: dict[str, Any] = {
            **total,
            **{name: sum(row[name] for row in rows) + workers.past[name] for name in TIMES},
            "frames": self._frames,
            "batches": self._batches,
            "total_frames": self.config.total_frames,
            "completed": not self._budget.is_endless and self._frames >= self.config.total_frames,
            "requested_frames_per_batch": self.requested_frames_per_batch,
            "policy_version": self._publisher.version,
            "pending_frames": total["pending_frames"] + assembler.pending_frames,
            "dropped_frames": total["dropped_frames"] + assembler.dropped + workers.discarded_frames,
            "lost_frames": workers.lost_frames,
            "workers": self.num_workers,
            "workers_alive": 0 if self.closed else workers.alive,
            "worker_restarts": workers.restarts,
        }
        if not total["idle_frames"]:
            del told["idle_frames"]
        if busy := [row for row in rows if row["episodes"]]:
            told["mean_return"] = sum(row["mean_return"] for row in busy) / len(busy)
            told["mean_length"] = sum(row["mean_length"] for row in busy) / len(busy)
        return told
