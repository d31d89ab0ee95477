"""Control: what is asked of a collector's workers, one in this process or several elsewhere, in the same way."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from swath.collectors.buffer_sink import BufferSink
from swath.collectors.choosing import lanes_by_worker
from swath.collectors.config import CommonConfig
from swath.collectors.delivery import Delivery, Part
from swath.collectors.first_come import FirstCome
from swath.collectors.free_running import FreeRunning
from swath.collectors.kinds import check_kind
from swath.collectors.pausing import must_not_hold
from swath.collectors.profile import ProfileConfig
from swath.collectors.roster import Roster
from swath.collectors.weights_control import WeightsControl
from swath.collectors.worker import Call, EngineJob
from swath.data.episodes import Episodes
from swath.rollout.engine_settings import Hook
from swath.runtime import Section
from swath.runtime.paths import follow
from swath.runtime.pool import Pool
from swath.seeding import checked_seed, next_seed
from swath.weights import requested_weights


class Control(ABC):
    """Seeds, state, numbers, weights, hooks and attributes."""

    _pool: Pool[Part]
    _delivery: Delivery
    _roster: Roster
    _weights: WeightsControl

    def __init__(self, config: CommonConfig) -> None:
        """Keep the checked `config`; a subclass makes roster, pool, delivery and what publishes weights."""
        self.config = config
        self.closed = True  # until there is something to shut down
        self._episodes = Episodes()
        self._cutting = Section()  # in which these change: any thread may give them up, or save them
        self._free: FreeRunning | None = None
        self._sink: BufferSink | None = None
        """What writes to the replay buffer here, where workers cannot."""
        self._hooks: dict[str, Any] = {n: getattr(config, n) for n in ("pre_collect_hook", "post_collect_hook")}
        self._profile: ProfileConfig | None = None
        self._iterating = False
        self._worker_idx = config.worker_idx
        self._last_state: dict[str, Any] | None = None
        """When all frames were collected."""

    @abstractmethod
    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Stop and free everything."""

    @abstractmethod
    def _must_be_open(self) -> None:
        """Raise if nothing can be asked any more."""

    def _at_rest(self) -> AbstractContextManager[None]:
        """A context in which nothing is collected in the background."""
        if self._free is not None and self._free.is_busy and not self.closed:
            must_not_hold(self.config.replay_buffer)
        return nullcontext() if self._free is None or self.closed else self._free.resting()

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return self.config.workers

    @property
    def num_lanes(self) -> int:
        """Over all workers."""
        return math.prod(self._delivery.terms.layout.env_size) * (len(self._pool.indices) or self.num_workers)

    @property
    def requested_frames_per_batch(self) -> int:
        """Frames in a batch: `frames_per_batch` rounded up to whole steps of all lanes; of the largest worker."""
        return max(self.frames_per_batch_worker(index) for index in range(self.num_workers))

    def frames_per_batch_worker(self, worker_idx: int = 0) -> int:
        """How many frames a worker contributes to a batch."""
        return self._delivery.terms.steps[worker_idx] * self._delivery.terms.lanes

    # -- asking workers ----------------------------------------------------------------------------------------

    def _ask(self, call: Call, **options: Any) -> dict[int, Any]:
        """What each worker answers to `call`."""
        return self._ask_each(dict.fromkeys(self._pool.indices, call), **options)

    def _ask_each(
        self, requests: dict[int, Call], *, what: str = "", discards_work: bool = False, after_writes: bool = False
    ) -> dict[int, Any]:
        self._must_be_open()
        is_local = self._pool.carrier.is_local
        if self._delivery.terms.writes and not is_local and self._pool.under_way:
            must_not_hold(self.config.replay_buffer)
        with self._at_rest() if is_local else nullcontext():
            try:
                what = what or " and ".join({call.method.__name__ for call in requests.values()})
                if after_writes and not is_local:
                    self._delivery.await_writes()
                return self._pool.ask(requests, what, discards_work=discards_work)
            except BaseException:
                if self._pool.failure is not None:
                    self.shutdown(raise_on_error=False)
                raise

    def reset(
        self, index: Any = None, *, worker: int | Sequence[int] | None = None, reset_idx: Sequence[bool] | None = None
    ) -> None:
        """Begin new episodes with new ids.

        Args:
            index: which lanes, over all workers in order: indices, or True for each. All without one.
            worker: which workers, in all of their lanes.
            reset_idx: the same as TorchRL says it: True for each worker that is meant.
        """
        self._must_be_open()
        if reset_idx is not None:
            if len(reset_idx) != self.num_workers:
                raise ValueError(f"reset() got {len(reset_idx)} choices for {self.num_workers} workers.")
            worker = [one for one, is_meant in enumerate(reset_idx) if is_meant]
        if worker is not None:
            chosen = [worker] if isinstance(worker, int) else list(worker)
            if unknown := [one for one in chosen if one not in self._pool.indices]:
                raise ValueError(f"reset(worker={worker!r}): there is no worker {unknown[0]} in {self._pool.indices}.")
            requests = dict.fromkeys(chosen, Call(EngineJob.reset))
        elif index is None:
            requests = dict.fromkeys(self._pool.indices, Call(EngineJob.reset))
        else:
            meant = lanes_by_worker(index, self._delivery.terms.layout.env_size, self.num_workers, self._pool.indices)
            requests = {one: Call(EngineJob.reset, (lanes,)) for one, lanes in meant.items()}
        with self._at_rest():
            self._ask_each(requests)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed every lane and the policy's noise, and begin new episodes: the next batch depends on `seed` alone.

        Returns a seed that is still unused.
        """
        seed = checked_seed(seed)
        self._must_be_open()
        self._roster.seed = (seed, static_seed)
        with self._at_rest():
            self._ask(Call(EngineJob.set_seed, (seed, static_seed)), discards_work=True)
            self._delivery.discard()
            with self._cutting:
                self._episodes.clear()
        return next_seed(seed, self.num_lanes, static_seed)

    # -- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Weights, counters, ids, random streams and unfinished episodes: plain tensors, numbers and dicts.

        Simulators cannot be saved: a restored collector begins new episodes. May be asked for at any moment.
        """
        if self.closed and self._last_state is not None:
            return self._last_state
        with self._at_rest():
            states = self._worker_states()
            with self._cutting:
                return {
                    **states,
                    "frames": self._delivery.frames,
                    "iter": self._delivery.batches,
                    "policy_version": self.policy_version,
                    "trajectories": self._episodes.state_dict(),
                    "undelivered_frames": self._delivery.undelivered_frames,
                }

    _state_keys: tuple[str, ...] = ("workers", "frames", "iter")

    def _worker_states(self) -> dict[str, Any]:
        """The workers' part of a state."""
        states = self._ask(Call(EngineJob.state_dict), after_writes=True)
        named = {f"worker{index}": state for index, state in states.items()}
        past = {"past_episodes": int(self._roster.past["episodes"])}  # of workers that are gone
        return {**named, **past, "workers": self.num_workers, "traj_pool": self._roster.next_number}

    def _saved_states(self, state: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """The reverse: a state for each worker."""
        saved = {i: state[f"worker{i}"] for i in range(self.num_workers) if f"worker{i}" in state}
        there = state.get("workers", "none")
        if not saved or there != self.num_workers:
            raise KeyError(f"This is no state of a collector with {self.num_workers} workers: it has {there}.")
        # For a worker that had been dropped when the state was saved. What it had counted is in `past_episodes`.
        any_of_them = {name: value for name, value in next(iter(saved.values())).items() if name != "ended"}
        return {index: saved.get(index, any_of_them) for index in self._pool.indices}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Go on with the saved counters and weights, in new episodes with new ids; or refuse, and change nothing."""
        self._must_be_open()
        if self._free is not None and self.num_workers > 1:
            raise RuntimeError("This collector runs in the background: load the state before start().")
        with self._at_rest():
            self.check_state_dict(state_dict, strict)
            states = self._saved_states(state_dict)
            numbers = self._roster.renumbered(state_dict.get("traj_pool", 0))
            requests = {i: Call(EngineJob.load_state_dict, (own, strict, numbers.get(i))) for i, own in states.items()}
            self._ask_each(requests, discards_work=True)
            self._delivery.discard(state_dict.get("undelivered_frames", 0))
            self._weights.loaded(states, state_dict.get("policy_version", 0))
            self._delivery.budget.spent = state_dict["frames"]
            self._delivery.batches = state_dict["iter"]
            self._roster.past = {**self._roster.past, "episodes": state_dict.get("past_episodes", 0)}
            with self._cutting:
                self._episodes.clear()
                if "trajectories" in state_dict:
                    self._episodes.load_state_dict(state_dict["trajectories"])
                    self._episodes.drop()  # their episodes cannot be gone on with

    def check_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Raise what would keep a state from being loaded, by any worker; nothing is changed."""
        missing = [key for key in self._state_keys if key not in state_dict]
        if missing:
            raise KeyError(
                f"This is no state of a collector such as {type(self).__name__}: it has no {', '.join(missing)}."
            )
        states = self._saved_states(state_dict)
        if "trajectories" in state_dict:
            Episodes().load_state_dict(state_dict["trajectories"])
        self._ask_each({i: Call(EngineJob.check_state_dict, (state, strict)) for i, state in states.items()})

    def stats(self, workers: str = "aggregate") -> dict[str, Any]:
        """Frames, episodes, recent returns, where the time went, and how the workers are, as a flat dict of numbers.

        Args:
            workers: "aggregate" for all together, "per_worker" for each (as `worker_0/frames`), or "both".
        """
        if workers not in ("aggregate", "per_worker", "both"):
            raise ValueError(f'stats(workers=...) must be "aggregate", "per_worker" or "both", got {workers!r}.')
        rows = {index: self._pool.carrier.report(index) for index in range(self.num_workers)}
        found: dict[str, Any] = {}
        if workers != "per_worker":
            found.update(self._summary([row for index, row in rows.items() if index not in self._roster.gone]))
        if workers != "aggregate":
            found.update({f"worker_{i}/{name}": value for i, row in rows.items() for name, value in row.items()})
        return found

    def _summary(self, rows: list[dict[str, float]]) -> dict[str, Any]:
        delivery, roster = self._delivery, self._roster
        sums: dict[str, Any] = {name: sum(row[name] for row in rows) + past for name, past in roster.past.items()}
        sums = {name: value if name.startswith("time/") else int(value) for name, value in sums.items()}
        frames, total = delivery.frames, self.config.total_frames
        pending = sums["pending_frames"] + self._episodes.pending_frames
        own = self._episodes.pending_frames + (sums["pending_frames"] if delivery.terms.writes else 0)
        left = own if self.closed else 0  # of episodes that nobody will get; what nodes make ahead is not ours
        found = {
            **sums,
            "time/waiting": sum(row["time/waiting"] for row in rows),
            "frames": frames,
            "batches": delivery.batches,
            "total_frames": total,
            "completed": not delivery.budget.is_endless and frames >= total,
            "requested_frames_per_batch": self.requested_frames_per_batch,
            "policy_version": self.policy_version,
            "pending_frames": pending - left,
            "dropped_frames": sums["dropped_frames"] + self._episodes.dropped + delivery.discarded_frames + left,
            "lost_frames": sums["lost_frames"] + roster.lost_frames,
            "slots_allocated": delivery.slots_allocated,
            "workers": self.num_workers,
            "workers_alive": 0 if self.closed else len(self._pool.carrier.alive()),
            "worker_restarts": sums["worker_restarts"] + self._pool.restarts,
        }
        if not found["idle_frames"]:
            del found["idle_frames"]
        if busy := [row for row in rows if row["episodes"]]:
            found["mean_return"] = sum(row["mean_return"] for row in busy) / len(busy)
            found["mean_length"] = sum(row["mean_length"] for row in busy) / len(busy)
        if isinstance(delivery, FirstCome) and self._free is None:
            found |= {"policy_lag": delivery.lag, "max_policy_lag": delivery.worst_lag}
            found["waiting_batches"] = len(self._pool.finished)
        return found

    # -- weights -----------------------------------------------------------------------------------------------

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        /,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        model_id: str | None = None,
        weights_dict: dict[str, Any] | None = None,
        policy_weights: Any = None,
    ) -> None:
        """Act with new weights from the next batch on, and count one version up.

        Without arguments they come from the policy that the collector was given. Otherwise they are a module, a
        TensorDict, a (state) dict, or a dict of these by worker index; `model_id` or `weights_dict` name other models.
        """
        if not self._pool.carrier.is_local:
            self._must_be_open()
            self._attend()
        if policy_weights is not None:
            warnings.warn("policy_weights is an old name; use weights.", DeprecationWarning, stacklevel=2)
            if weights is not None:
                raise ValueError("policy_weights is the old name of weights: give one of them.")
            weights = policy_weights
        given = {"a positional argument": policy_or_weights, "weights": weights, "policy": policy}
        chosen = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        self._weights.update(requested_weights(given, model_id, weights_dict), chosen)

    def _attend(self) -> None:
        """See to what has come from the workers, without waiting."""
        try:
            self._pool.attend(0.0)
        except BaseException:
            if self._pool.failure is not None:
                self._is_reported = True
                self.shutdown(raise_on_error=False)
            raise

    @property
    def policy_version(self) -> int:
        """How often weights were updated; frames can tell with which version they were made."""
        return self._weights.version

    def get_policy_version(self) -> int:
        """The same as `policy_version`."""
        return self.policy_version

    def increment_version(self) -> None:
        """Count one version up, for weights that are the same or were changed in place."""
        self._must_be_open()
        self._weights.increment()

    # -- hooks and profile -------------------------------------------------------------------------------------

    @property
    def pre_collect_hook(self) -> Callable[[], Any] | None:
        """Called before every rollout, where it is made; may be replaced."""
        return self._hooks["pre_collect_hook"]  # type: ignore[no-any-return]

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        self.set_pre_collect_hook(hook)

    @property
    def post_collect_hook(self) -> Hook | None:
        """Called with every batch as it was collected, where it was made; may be replaced."""
        return self._hooks["post_collect_hook"]  # type: ignore[no-any-return]

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Hook | None) -> None:
        self.set_post_collect_hook(hook)

    def set_pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        """Replace the hook that is called before every rollout."""
        self._set_hook("pre_collect_hook", hook)

    def set_post_collect_hook(self, hook: Hook | None) -> None:
        """Replace the hook that is called with every batch."""
        self._set_hook("post_collect_hook", hook)

    def _set_hook(self, name: str, hook: Any) -> None:
        check_kind(name, hook, "Callable | None")
        self._ask(Call(EngineJob.set_hook, (name, hook)))
        self._hooks[name] = hook
        self._roster.hooks[name] = hook

    def enable_profile(self, **options: Any) -> None:
        """Trace the first rollouts of the chosen workers with torch's profiler; see `ProfileConfig` for the options."""
        if self._iterating:
            raise RuntimeError("Cannot enable profiling after iteration has begun: call it before the first batch.")
        config = ProfileConfig(**options)
        self._ask(Call(EngineJob.profile, (config,)))
        self._profile = config

    def disable_profile(self) -> None:
        """Stop tracing, and write the trace."""
        self._ask(Call(EngineJob.profile, (None,)))
        self._profile = None

    @property
    def profile_config(self) -> ProfileConfig | None:
        """How the collector is being profiled, if it is."""
        return self._profile

    # -- by name -----------------------------------------------------------------------------------------------

    def get_distant_attr(self, path: str) -> Any:
        """The object at `path`, such as `env.batch_size`, of each worker."""
        return list(self._ask(Call(EngineJob.get_distant_attr, (path,)), what=repr(path)).values())

    def cascade_execute(self, path: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method at `path` in each worker; a plain attribute is returned as it is."""
        return list(self._ask(Call(EngineJob.cascade_execute, (path, *args), kwargs), what=repr(path)).values())

    def map_fn(
        self, name: str, list_of_args: Sequence[Sequence[Any]], list_of_kwargs: Sequence[dict[str, Any]] | None = None
    ) -> list[Any]:
        """Call the method at `name` in each worker, with arguments of its own."""
        kwargs = [{}] * len(list_of_args) if list_of_kwargs is None else list_of_kwargs
        if not len(list_of_args) == len(kwargs) == self.num_workers:
            raise ValueError(
                f"Expected {self.num_workers} argument entries, one for each of {self.num_workers} workers, got "
                f"{len(list_of_args)} in list_of_args and {len(kwargs)} in list_of_kwargs."
            )
        requests = {
            index: Call(EngineJob.cascade_execute, (name, *list_of_args[index]), dict(kwargs[index]))
            for index in self._pool.indices
        }
        return list(self._ask_each(requests, what=repr(name)).values())

    def getattr_policy(self, name: str) -> Any:
        """An attribute of the policy, by path; of worker 0's."""
        return self._first(Call(EngineJob.getattr_policy, (name,)), name)

    def getattr_env(self, name: str) -> Any:
        """An attribute of the env, by path; of worker 0's."""
        return self._first(Call(EngineJob.getattr_env, (name,)), name)

    def getattr_rb(self, name: str) -> Any:
        """An attribute of the replay buffer, by path."""
        return follow(self.config.replay_buffer, name)

    def _first(self, call: Call, name: str) -> Any:
        requests = dict.fromkeys(self._pool.indices[:1], call)
        return next(iter(self._ask_each(requests, what=repr(name)).values()))

    @property
    def worker_idx(self) -> int:
        """The index of this collector among others. Ids are numbered with the one that the constructor was given."""
        if self._worker_idx is None:
            raise RuntimeError("This collector has no worker_idx; give it one in the constructor or set it.")
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, index: int) -> None:
        self._worker_idx = index

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers."""
        return [pid for index in self._pool.indices if (pid := self._pool.carrier.pid(index))]
