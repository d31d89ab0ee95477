"""The arguments of collectors with workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

from swath.collectors.config import DEVICES, CommonConfig
from swath.collectors.kinds import check_kind, check_least, check_one_of
from swath.data import RayReplayBuffer
from swath.envs import EnvBase
from swath.keys import POLICY_VERSION
from swath.runtime.process import METHODS
from swath.runtime.supervision import Supervision


@dataclass(frozen=True)
class MultiConfig(CommonConfig):
    """What collectors with workers can be given, beside what every collector can.

    Devices, `create_env_kwargs`, `policy_factory` and `frames_per_batch` may be lists with one element per worker.

    Attributes:
        num_workers: how many workers, where `create_env_fn` is one factory for all.
        num_collectors: the same, as TorchRL calls it.
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
        collector_class: no effect: workers run the engine itself.
        weight_updater: no effect: weights travel through shared memory.
        weight_sync_schemes: no effect, likewise.
        weight_recv_schemes: no effect, likewise.
    """

    _: KW_ONLY
    num_workers: int | None = None
    num_collectors: int | None = None
    sync: bool | None = None
    cat_results: int | str | None = None
    preemptive_threshold: float | None = None
    update_at_each_batch: bool = False
    init_fn: Callable[[], Any] | None = None
    num_threads: int | None = None
    num_sub_threads: int = 1
    mp_start_method: Literal["forkserver", "spawn", "fork"] | None = None
    slots_per_worker: int = 2
    max_staleness: int | None = None
    on_worker_failure: Literal["raise", "restart", "drop"] = "raise"
    max_restarts: int = 3
    stall_warning_s: float = 15.0
    stall_timeout_s: float | None = None
    start_timeout_s: float = 300.0
    debug: bool = False
    collector_class: Any = None
    weight_updater: Any = None
    weight_sync_schemes: Any = None
    weight_recv_schemes: Any = None

    per_worker: ClassVar[tuple[str, ...]] = ("frames_per_batch", "policy_factory", "create_env_kwargs", *DEVICES)
    foreign: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "backend": ((None, "process"), "It collects in processes, backend='process'."),
        "backend_options": ((None, {}), "They have no meaning for processes."),
    }
    without_effect: ClassVar[tuple[str, ...]] = (
        "collector_class",
        "weight_updater",
        "weight_sync_schemes",
        "weight_recv_schemes",
    )

    def __post_init__(self) -> None:
        """Find out how many workers there are, before anything else is checked."""
        for name in ("num_workers", "num_collectors"):
            check_kind(name, getattr(self, name), "int | None")
            check_least(name, getattr(self, name), 1)
        makers = self.create_env_fn
        if isinstance(makers, Sequence) and not isinstance(makers, str):
            if not makers:
                raise ValueError("create_env_fn is an empty list: give it a function for each worker, [make_env] * 4.")
            makers = list(makers)
        elif self.num_workers is None:
            raise ValueError(
                "There is one env factory per worker: give create_env_fn a list, as in [make_env] * 4, or give "
                "num_workers=4."
            )
        else:
            makers = [makers] * int(self.num_workers)
        for index, maker in enumerate(makers):
            if isinstance(maker, EnvBase) or not callable(maker):
                raise TypeError(
                    "Workers make their envs themselves: create_env_fn must hold functions that return an env, but "
                    f"that of worker {index} is {type(maker).__name__}: {maker!r}. Write lambda: GymEnv('CartPole-v1')."
                )
        object.__setattr__(self, "create_env_fn", makers)
        if self.num_collectors not in (None, len(makers)):
            raise ValueError(f"num_collectors={self.num_collectors} does not agree with {len(makers)} workers.")
        object.__setattr__(self, "num_workers", len(makers))
        super().__post_init__()

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self.num_workers or 1

    def _check_values(self) -> None:
        super()._check_values()
        for name in ("num_threads", "num_sub_threads", "slots_per_worker"):
            check_least(name, getattr(self, name), 1)
        for name in ("max_staleness", "max_restarts"):
            check_least(name, getattr(self, name), 0)
        check_one_of("on_worker_failure", self.on_worker_failure, ("raise", "restart", "drop"))
        check_one_of("mp_start_method", self.mp_start_method, METHODS)
        if self.preemptive_threshold is not None and not 0.0 <= self.preemptive_threshold <= 1.0:
            raise ValueError(f"preemptive_threshold must be between 0 and 1, got {self.preemptive_threshold}.")
        if isinstance(self.cat_results, str):
            check_one_of("cat_results", self.cat_results, ("stack",))
        if self.cat_results not in (None, "stack") and not self.sync:
            raise ValueError(
                f"cat_results={self.cat_results!r} joins the parts of a sync batch; async batches are of one worker."
            )

    def _check_together(self) -> None:
        super()._check_together()
        if self.policy is not None and self.policy_factory is not None and self.weight_sync_schemes is None:
            raise TypeError("Give either policy or policy_factory, not both.")
        if self.weight_updater is not None and self.weight_sync_schemes is not None:
            raise TypeError("Give either weight_updater or weight_sync_schemes; neither has an effect here.")
        if isinstance(self.replay_buffer, RayReplayBuffer) and not self.extend_buffer:
            raise TypeError("extend_buffer=False writes after every step, but a RayReplayBuffer gets whole batches.")
        for name in self.without_effect:
            if getattr(self, name) is not None:
                warnings.warn(f"{name}={getattr(self, name)!r} has no effect here.", stacklevel=7)

    @property
    def workers_write(self) -> bool:
        """Unless the buffer is an actor of Ray, to which this process alone has a way."""
        return super().workers_write and not isinstance(self.replay_buffer, RayReplayBuffer)

    @property
    def publish_interval(self) -> int | None:
        """After how many batches the policy's weights are published by themselves."""
        return 1 if self.update_at_each_batch else None

    def frames_of(self, worker: int) -> int:
        """How many frames the worker contributes to a batch."""
        frames = int(self.of("frames_per_batch", worker))
        if self.sync and not isinstance(self.frames_per_batch, list | tuple):
            return -(-frames // self.workers)
        return frames

    @property
    def tracks_version(self) -> bool:
        """By default where a batch may be older than the weights.

        A replay buffer that holds frames without it takes no others.
        """
        if self.track_policy_version is not None:
            return bool(self.track_policy_version)
        held = getattr(getattr(self.replay_buffer, "storage", None), "layout", None)
        return not self.sync and (held is None or POLICY_VERSION in held.leaves)

    @property
    def supervision(self) -> Supervision:
        """What happens when a worker fails."""
        return Supervision(
            self.on_worker_failure, self.max_restarts, self.stall_warning_s, self.stall_timeout_s, self.start_timeout_s
        )
