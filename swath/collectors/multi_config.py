"""The arguments of collectors with workers, in one frozen dataclass, and what of them each worker is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

from swath.collectors.config import CollectorConfig, PolicyVersion, at_least
from swath.errors import suggestion
from swath.keys import POLICY_VERSION
from swath.rollout.devices import Devices
from swath.runtime.process import METHODS

ON_FAILURE = ("raise", "restart", "drop")
PER_WORKER = ("device", "storing_device", "policy_device", "env_device")
WITHOUT_EFFECT = ("collector_class", "weight_updater", "weight_sync_schemes", "weight_recv_schemes")


@dataclass(frozen=True, kw_only=True)
class MultiConfig(CollectorConfig):
    """What collectors with worker processes can be told, beside what every collector can.

    Devices, `create_env_kwargs`, `policy_factory` and `frames_per_batch` may be lists with one element per worker.

    Attributes:
        frames_per_batch: frames in a batch, over all workers where batches are joined (sync), of one worker where they
            are not (async); a list says how many each worker contributes.
        num_workers: how many workers, where `create_env_fn` is one factory for all.
        sync: whether a batch has a part of every worker, or is the first that any worker has ready.
        cat_results: how the parts of a sync batch are joined: "stack", or the dimension to concatenate (0 or -1).
        preemptive_threshold: the part of the workers after which the others stop where they are (sync only).
        update_at_each_batch: publish the policy's weights before every batch (sync) or after (async).
        init_fn: called first in every worker process.
        num_threads: torch's threads in this process while the collector lives; by default they are left alone.
        num_sub_threads: torch's threads in every worker.
        mp_start_method: how workers are started: "forkserver", "spawn" or "fork".
        slots_per_worker: how many batches of a worker may be under way or waiting (async only).
        max_staleness: let workers wait so that a batch is at most so many versions old when it is delivered, if weights
            are published once per batch (async only).
        on_worker_failure: "raise" the error, "restart" the worker, or "drop" it and go on with the others.
        max_restarts: how often each worker is restarted; then the error is raised.
        stall_warning_s: after how many seconds without a step a worker is named in a warning.
        stall_timeout_s: after how many seconds without a step a worker is killed, which `on_worker_failure` then deals
            with; by default it is waited for.
        start_timeout_s: how long a worker may take to make its env and policy.
        debug: run the workers' code in this process, one after the other, so that a debugger works.
        collector_class: no effect: workers run `Collector`.
        weight_updater: no effect: weights travel through shared memory.
        weight_sync_schemes: no effect, likewise.
        weight_recv_schemes: no effect, likewise.
    """

    frames_per_batch: Any
    policy_factory: Any = None
    create_env_kwargs: Any = None
    track_policy_version: Any = None
    num_workers: int | None = None
    sync: bool | None = None
    cat_results: Any = None
    preemptive_threshold: float | None = None
    update_at_each_batch: bool = False
    init_fn: Callable[[], Any] | None = None
    num_threads: int | None = None
    num_sub_threads: int = 1
    mp_start_method: str | None = None
    slots_per_worker: int = 2
    max_staleness: int | None = None
    on_worker_failure: str = "raise"
    max_restarts: int = 3
    stall_warning_s: float = 15.0
    stall_timeout_s: float | None = None
    start_timeout_s: float = 300.0
    debug: bool = False
    collector_class: Any = None
    weight_updater: Any = None
    weight_sync_schemes: Any = None
    weight_recv_schemes: Any = None

    def __post_init__(self) -> None:
        """Refuse what cannot be right, for any worker."""
        self._check_kinds()
        self._check_own()
        for worker in range(self.workers):  # each is checked as a single collector would be
            self.for_worker(worker)
        self._check_pairs()

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self.num_workers or 1

    @staticmethod
    def _check_elsewhere(owner: str, given: dict[str, Any]) -> None:
        count, backend = given.pop("num_collectors", None), given.pop("backend", None)
        if count not in (None, given["num_workers"]):
            raise ValueError(f"num_collectors={count} does not agree with {given['num_workers']} workers.")
        if backend not in (None, "process"):
            raise ValueError(f"{owner} collects in processes (backend='process'), got backend={backend!r}.")

    def _check_own(self) -> None:
        if self.total_frames == 0:
            raise ValueError("total_frames=0 would collect nothing; use -1 for no end.")
        for name in ("num_workers", "num_threads", "num_sub_threads", "slots_per_worker"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        for name in ("max_staleness", "max_restarts"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, got {value}.")
        for name, known in (("on_worker_failure", ON_FAILURE), ("mp_start_method", METHODS)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}.{suggestion(str(value), known)}")
        if self.preemptive_threshold is not None and not 0.0 <= self.preemptive_threshold <= 1.0:
            raise ValueError(f"preemptive_threshold must be between 0 and 1, got {self.preemptive_threshold}.")
        if self.weight_updater is not None and self.weight_sync_schemes is not None:
            raise TypeError("Give either weight_updater or weight_sync_schemes; neither has an effect here.")
        self._check_joining()
        self._check_lists()
        for name in WITHOUT_EFFECT:
            if getattr(self, name) is not None:
                warnings.warn(f"{name}={getattr(self, name)!r} has no effect here.", stacklevel=6)

    def _check_joining(self) -> None:
        given = self.cat_results
        if given is None:
            return
        if isinstance(given, str) and given != "stack":
            raise ValueError(f'cat_results must be "stack", 0 or -1, got {given!r}.{suggestion(given, ["stack"])}')
        if not isinstance(given, str | int) or isinstance(given, bool):
            raise TypeError(f'cat_results must be "stack" or a dimension, got {given!r}.')
        if not self.sync and given != "stack":
            raise ValueError(f"cat_results={given!r} joins the parts of a sync batch; async batches are of one worker.")

    def _check_lists(self) -> None:
        for name, error in (
            ("frames_per_batch", ValueError),
            ("create_env_kwargs", ValueError),
            ("policy_factory", ValueError),
            *((device, RuntimeError) for device in PER_WORKER),
        ):
            value = getattr(self, name)
            if isinstance(value, list | tuple) and len(value) != self.workers:
                raise error(f"{name} has {len(value)} elements for {self.workers} workers.")

    def _own(self, name: str, worker: int) -> Any:
        """What a worker is told of an argument that may be a list."""
        value = getattr(self, name)
        return value[worker] if isinstance(value, list | tuple) else value

    def frames_of(self, worker: int) -> int:
        """How many frames the worker contributes to a batch."""
        frames = self._own("frames_per_batch", worker)
        if isinstance(frames, bool) or not isinstance(frames, Integral):
            raise TypeError(f"frames_per_batch must be a whole number, or a list of such, got {frames!r}.")
        at_least("frames_per_batch", int(frames), 1)
        if self.sync and not isinstance(self.frames_per_batch, list | tuple):
            return -(-int(frames) // self.workers)
        return int(frames)

    @property
    def tracks_version(self) -> bool:
        """Whether frames carry the version that made them: by default where a batch may be older than the weights.

        A replay buffer that holds frames without it takes no others.
        """
        if self.track_policy_version is not None:
            return bool(self.track_policy_version)
        held = getattr(getattr(self.replay_buffer, "storage", None), "layout", None)
        return not self.sync and (held is None or POLICY_VERSION in held.leaves)

    def for_worker(self, worker: int) -> CollectorConfig:
        """What a single worker is told: it collects without end, as it is told, and what is not its own is left out."""
        common = {field.name: getattr(self, field.name) for field in fields(CollectorConfig)}
        common |= {name: self._own(name, worker) for name in (*PER_WORKER, "create_env_kwargs", "policy_factory")}
        common |= {
            "frames_per_batch": self.frames_of(worker),
            "track_policy_version": PolicyVersion() if self.tracks_version else False,
            "storing_device": None,
            "worker_idx": worker,
            "total_frames": -1,
            "return_same_td": False,
            "use_buffers": None,
            "progress": False,
        }
        checked = CollectorConfig(**common)
        if self.replay_buffer is not None:
            return checked
        return replace(  # what is done to whole batches is done where they are joined
            checked, postproc=None, split_trajs=None, trajs_per_batch=None, traj_format=None, init_random_frames=None
        )

    def storing(self, worker: int) -> Any:
        """Where a worker's batches are to lie in the end; None leaves them in shared memory."""
        names = ("device", "storing_device", "policy_device", "env_device")
        return Devices.resolve(*(self._own(name, worker) for name in names)).storing

    @property
    def devices(self) -> Devices:
        """Of worker 0."""
        return Devices.resolve(*(self._own(name, 0) for name in PER_WORKER))


def factories(create_env_fn: Any, num_workers: int | None, owner: str) -> list[Any]:
    """One factory for each worker."""
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str):
        if not create_env_fn:
            raise ValueError(f"{owner} needs at least one env factory, got an empty list.")
        return list(create_env_fn)
    if num_workers is None:
        raise ValueError(
            f"{owner} runs one env factory per worker: give it a list, as in [make_env] * 4, or num_workers=4."
        )
    if isinstance(num_workers, bool) or not isinstance(num_workers, Integral):
        raise TypeError(f"num_workers must be a whole number, got {num_workers!r}.")
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}.")
    return [create_env_fn] * int(num_workers)
