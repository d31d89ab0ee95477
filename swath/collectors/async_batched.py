"""AsyncBatchedCollector: envs at their own pace, and a policy that acts for whatever is ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal

from swath.collectors.arguments import takes
from swath.collectors.collector import Collector
from swath.collectors.config import CollectorConfig, PolicyVersion
from swath.collectors.kinds import check_least, check_one_of
from swath.envs import AsyncEnvPool, EnvPoolEnv, OwnPaceEnv
from swath.envs.adapt import is_env
from swath.envs.envpool import is_asynchronous
from swath.rollout.engine_settings import EngineSettings
from swath.runtime.process import METHODS

MANY = (
    "AsyncBatchedCollector steps many envs: create_env_fn must be a list with a function for each that returns an env, "
    "as in [lambda: GymEnv('CartPole-v1')] * 8."
)


@dataclass(frozen=True)
class AsyncBatchedConfig(CollectorConfig):
    """What an AsyncBatchedCollector can be given, beside what a Collector can.

    Attributes:
        create_env_fn: a list with a factory for each env, or an `AsyncEnvPool`; or an EnvPool with a `batch_size` below
            its `num_envs`, or a function that makes it.
        frames_per_batch: frames in a batch, whichever envs have made them.
        max_batch_size: for how many envs the policy acts at a time, at most; by default for all that are ready.
        min_batch_size: for how many envs to wait before it acts,
        server_timeout: but no longer than so many seconds after the first is ready.
        yield_completed_trajectories: deliver one complete episode at a time, as `trajs_per_batch=1` does with
            `traj_format="cat"`.
        stack_envs: deliver `[envs, *env.batch_size, T]`: each env makes the same number of steps, at its own pace.
        backend: the same as `env_backend`.
        env_backend: "threading" steps each env in a thread of this process, "multiprocessing" in other processes.
        envs_per_worker: how many envs share a process, each in a thread of its own.
        track_policy_version: write `policy_version`: frames of one batch may be made by different weights.
        num_sub_threads: torch's threads in every process.
        mp_start_method: how processes are started: "forkserver", "spawn" or "fork".
        on_worker_failure: "raise" what an env raises, "restart" its worker, or "drop" it and go on with the others.
        max_restarts: how often each worker is restarted; then the error is raised.
        stall_warning_s: after how many seconds an env that does not come back is named in a warning.
        stall_timeout_s: after how many its worker is given up, which `on_worker_failure` then deals with.
        start_timeout_s: how long a worker may take to make its envs.
    """

    _: KW_ONLY
    max_batch_size: int | None = None
    min_batch_size: int = 1
    server_timeout: float = 0.01
    yield_completed_trajectories: bool = False
    stack_envs: bool = False
    env_backend: Literal["threading", "multiprocessing"] | None = None
    backend: Literal["threading", "multiprocessing"] | None = None
    envs_per_worker: int = 1
    track_policy_version: bool | PolicyVersion = True
    num_sub_threads: int = 1
    mp_start_method: Literal["forkserver", "spawn", "fork"] | None = None
    on_worker_failure: Literal["raise", "restart", "drop"] = "raise"
    max_restarts: int = 3
    stall_warning_s: float = 15.0
    stall_timeout_s: float | None = None
    start_timeout_s: float = 300.0

    foreign: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "server_config": ((None,), "Give max_batch_size, min_batch_size and server_timeout themselves."),
        "device_config": ((None,), "Give policy_device, env_device and storing_device themselves."),
        "policy_backend": ((None, "threading"), "The policy acts where batches are made; see InferenceServer."),
        "transport": ((None, "auto", "driver"), "Envs and policy share memory: there is nothing to be transported."),
        "env_exchange": ((None, "auto", "shm"), "Envs write to memory that is shared."),
        "transition_chunk_size": ((None, "auto"), "Frames are not sent."),
        "worker_affinity": ((None,), "Pin processes with taskset, or in the env's factory."),
        "driver_affinity": ((None,), "Pin processes with taskset."),
        "weight_sync": ((None,), "update_policy_weights_ takes weights in all forms."),
        "weight_sync_model_id": ((None, "policy"), "update_policy_weights_ takes a model_id."),
        "policy_version": ((None, 0), "Versions are counted from 0."),
        "policy_version_key": ((None, "policy_version"), "Rename the entry with postproc."),
        "verbose": ((None, False, True), ""),
    }

    def _check_values(self) -> None:
        super()._check_values()
        for name in ("max_batch_size", "min_batch_size", "envs_per_worker", "num_sub_threads"):
            check_least(name, getattr(self, name), 1)
        check_least("max_restarts", self.max_restarts, 0)
        for name in ("env_backend", "backend"):
            check_one_of(name, getattr(self, name), ("threading", "multiprocessing"))
        check_one_of("on_worker_failure", self.on_worker_failure, ("raise", "restart", "drop"))
        check_one_of("mp_start_method", self.mp_start_method, METHODS)
        if self.max_batch_size is not None and self.min_batch_size > self.max_batch_size:
            raise ValueError(f"min_batch_size={self.min_batch_size} is above max_batch_size={self.max_batch_size}.")
        if self.stack_envs and self.on_worker_failure == "drop":
            raise ValueError("stack_envs=True needs steps of every env: on_worker_failure='drop' cannot be.")
        if self.server_timeout < 0:
            raise ValueError(f"server_timeout must be a number of seconds, 0 or more, got {self.server_timeout}.")
        if None not in (self.backend, self.env_backend) and self.backend != self.env_backend:
            raise ValueError(f"backend={self.backend!r} and env_backend={self.env_backend!r} mean the same: give one.")

    def engine_settings(self, worker: int, *, shares_policy: bool = False) -> EngineSettings:
        """What an engine needs to know of all this."""
        return replace(
            super().engine_settings(worker, shares_policy=shares_policy),
            min_ready=self.min_batch_size,
            max_ready=self.max_batch_size,
            ready_timeout_s=float(self.server_timeout),
            stack_envs=self.stack_envs,
        )

    def make_pool(self) -> OwnPaceEnv:
        """The envs."""
        given = self.create_env_fn
        if isinstance(given, Sequence):
            return self._async_pool(given)
        env = given(**(self.create_env_kwargs or {})) if callable(given) else given
        if isinstance(env, OwnPaceEnv):
            return env
        if not is_asynchronous(env):
            if callable(given) and hasattr(env, "close"):
                env.close()
            raise TypeError(f"{MANY} {given!r} is one function, and has made {type(env).__name__}.")
        if self.on_worker_failure != "raise" or "multiprocessing" in (self.backend, self.env_backend):
            raise ValueError(
                "EnvPool steps its envs in threads of its own, which cannot be replaced: leave out on_worker_failure, "
                "backend and env_backend."
            )
        return EnvPoolEnv(env, stall_warning_s=self.stall_warning_s, stall_timeout_s=self.stall_timeout_s)

    def _async_pool(self, makers: Sequence[Any]) -> AsyncEnvPool:
        return AsyncEnvPool(
            makers,
            backend=self.env_backend or self.backend or "threading",
            envs_per_worker=self.envs_per_worker,
            create_env_kwargs=self.create_env_kwargs,
            num_sub_threads=self.num_sub_threads,
            mp_start_method=self.mp_start_method,
            on_worker_failure=self.on_worker_failure,
            max_restarts=self.max_restarts,
            stall_warning_s=self.stall_warning_s,
            stall_timeout_s=self.stall_timeout_s,
            start_timeout_s=self.start_timeout_s,
        )


class AsyncBatchedCollector(Collector):
    """Runs a policy in envs that each step at their own pace, and delivers batches `[frames]`.

    The policy acts for whatever is ready, while the other envs step: for envs whose steps take long or vary. A batch
    has the frames of each env behind each other and in the order of time, and `env_index` says which env made a frame.
    Envs go on with the step that they are in while the batch is used, with the weights that they began it with.

    See `AsyncBatchedConfig` for the arguments.
    """

    config_class = AsyncBatchedConfig
    config: AsyncBatchedConfig

    @takes(AsyncBatchedConfig)
    def __init__(self, config: AsyncBatchedConfig) -> None:
        """Make envs and policy, and reset the envs."""
        self._set_up(config)

    @classmethod
    def adapt_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """One complete episode at a time is a form of `trajs_per_batch`."""
        if "policy" not in arguments and arguments.get("policy_factory") is None:
            raise TypeError(f"{cls.__name__} needs policy or policy_factory; policy=None acts at random.")
        makers = arguments["create_env_fn"]
        is_list = isinstance(makers, Sequence) and not isinstance(makers, str)
        if not (makers and all(map(callable, makers)) if is_list else _may_be_many(makers)):
            raise TypeError(f"{MANY} Got {makers!r}.")
        if not arguments.get("yield_completed_trajectories"):
            return arguments
        for name in ("trajs_per_batch", "traj_format"):
            if arguments.get(name) is not None:
                raise ValueError(
                    f"yield_completed_trajectories=True and {name}={arguments[name]!r} exclude each other."
                )
        if arguments.get("replay_buffer") is not None:
            return {**arguments, "trajs_per_batch": 1}
        return {**arguments, "trajs_per_batch": 1, "traj_format": "cat"}

    def _env_source(self) -> Callable[[], OwnPaceEnv] | OwnPaceEnv:
        makers = self.config.create_env_fn
        return makers if isinstance(makers, OwnPaceEnv) else self.config.make_pool

    @property
    def _env_kwargs(self) -> dict[str, Any] | None:
        return None  # they are for the factories in the pool

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the envs' workers; of this process, where they are threads."""
        return self._envs.worker_pids

    @property
    def _envs(self) -> OwnPaceEnv:
        assert isinstance(self.env, OwnPaceEnv)
        return self.env

    def server_stats(self, reset: bool = False) -> dict[str, float]:
        """For how many envs the policy has acted at a time, and how long that took; with `reset`, from now on."""
        return self.engine.pace(reset)

    def _summary(self, rows: list[dict[str, float]]) -> dict[str, Any]:
        envs, found = self._envs, super()._summary(rows)
        found["lost_frames"] += envs.lost_steps * envs.lanes_per_env
        found["worker_restarts"] += envs.restarts
        found["workers"], found["workers_alive"] = envs.num_workers, 0 if self.closed else envs.workers_alive
        return {**found, **{f"server/{name}": value for name, value in self.server_stats().items()}}


def _may_be_many(given: Any) -> bool:
    """Whether it has envs at their own pace, or may make some."""
    return isinstance(given, OwnPaceEnv) or is_asynchronous(given) or (callable(given) and not is_env(given))
