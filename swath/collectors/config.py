"""The arguments of collectors: frozen dataclasses, checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from numbers import Integral
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from tensordict import TensorDictBase

from swath.collectors.kinds import check_kind, check_least, check_one_of
from swath.collectors.worker import EngineTask
from swath.keys import WORKER_BITS
from swath.modules.exploration import ExplorationType
from swath.rollout.devices import Devices, as_device
from swath.rollout.engine_settings import EngineSettings, Hook
from swath.rollout.loop import Interruptor
from swath.rollout.split import split_trajectories
from swath.runtime.carrier import Task

Buffer: TypeAlias = Any
"""A `ReplayBuffer`, or what works like one: it has `extend` and `sample`."""
Device: TypeAlias = str | int | torch.device
PostProc: TypeAlias = Callable[[TensorDictBase], TensorDictBase]

DEVICES = ("device", "storing_device", "policy_device", "env_device")
OFF = {"total_frames": "-1 for no end", "max_frames_per_traj": "0 for no limit"}
"""Numbers that may be left out, and how."""
MAX_WORKER = 2 ** (63 - WORKER_BITS) - 1


@dataclass(frozen=True)
class PolicyVersion:
    """Asks for the policy's version in every frame, also with batched envs: `track_policy_version=PolicyVersion()`."""


@dataclass(frozen=True)
class CommonConfig:
    """What every collector can be given.

    Attributes:
        create_env_fn: an env, or a function that returns one; a list with one for each worker.
        policy: what acts; None acts at random.
        total_frames: how many frames to deliver in all, rounded up to whole steps of all lanes; -1 for no end.
        max_frames_per_traj: length at which an episode is truncated; adds `step_count`.
        init_random_frames: take random actions in the first batches, until so many frames are collected; with a replay
            buffer, until so many are written to it.
        reset_at_each_iter: begin new episodes with each batch.
        postproc: called with every batch; what it returns is delivered.
        split_trajs: deliver `[trajectories, longest]`, padded, with `("collector", "mask")`.
        track_traj_ids: write `("collector", "traj_ids")`.
        exploration_type: how the policy explores; None leaves it to the policy and its context.
        reset_when_done: only True; finished lanes always begin anew.
        set_truncated: mark the last step of every batch as truncated.
        interruptor: asked after every step whether the batch should end here.
        return_same_td: deliver the same TensorDict object every time, overwritten; only a shorter batch is another.
        auto_register_policy_transforms: no effect, as a recurrent policy always gets its state and `is_init`.
        use_buffers: no effect, as batches always lie in memory that is used again once they are let go.
        trust_policy: call the policy as it is, with a TensorDict, without looking inside.
        compile_policy: compile what of the policy has to be called; True, or arguments for `torch.compile`.
        cudagraph_policy: run the policy as a CUDA graph; True, or arguments for `CudaGraphModule`.
        no_cuda_sync: copy between devices without waiting.
        trajs_per_batch: deliver so many complete episodes at a time instead of frames; to a replay buffer, write
            complete episodes only, flat and without padding.
        traj_format: "padded" to `[N, longest]` with a mask, or "cat" one after the other.
        compact_obs: leave the observations out of "next": inside an episode the following root has them, but its final
            observation, which a truncated episode's value depends on, is then nowhere.
        pre_collect_hook: called before every rollout, where it is made.
        post_collect_hook: called with every batch as it was collected, where it was made.
        worker_idx: the index of this collector among others; part of the trajectory ids.
        replay_buffer: write to this buffer instead of delivering batches: iterating gives None after each, and
            `start()` collects in the background.
        extend_buffer: write to the buffer once per batch; False writes after every step, which is slow.
        trajs_per_write: with a buffer and `trajs_per_batch`, how many complete episodes are written at a time; by
            default all that are complete.
        progress: show a progress bar while iterating.
        fast_policy: run known small policies by their array forms; False always calls the modules.
        frames_per_batch: frames in a batch over all lanes, rounded up to whole steps of all lanes; with several workers
            over all of them where batches are joined (sync), of one where they are not (async); a list says how many
            each worker contributes.
        policy_factory: a function that makes the policy, in each worker, instead of `policy`.
        create_env_kwargs: arguments for the env's factory.
        device: fills in those of the following three that are not given.
        storing_device: where batches lie.
        policy_device: where the policy computes; a policy that lies elsewhere is copied there.
        env_device: where the env's data lie; batches stay there unless policy or storing device say otherwise.
        track_policy_version: write `policy_version`, by default where a batch may be older than the weights; for
            batched envs in this process, `PolicyVersion()`.
    """

    create_env_fn: Any
    policy: Any = None
    _: KW_ONLY
    total_frames: int = -1
    max_frames_per_traj: int | None = None
    init_random_frames: int | None = None
    reset_at_each_iter: bool = False
    postproc: PostProc | None = None
    split_trajs: bool | None = None
    track_traj_ids: bool = True
    exploration_type: ExplorationType | None = ExplorationType.RANDOM
    reset_when_done: bool = True
    set_truncated: bool = False
    interruptor: Interruptor | None = None
    return_same_td: bool = False
    auto_register_policy_transforms: bool | None = None
    use_buffers: bool | None = None
    trust_policy: bool | None = None
    compile_policy: bool | dict[str, Any] | None = None
    cudagraph_policy: bool | dict[str, Any] | None = None
    no_cuda_sync: bool = False
    trajs_per_batch: int | None = None
    traj_format: Literal["padded", "cat"] | None = None
    compact_obs: bool = False
    pre_collect_hook: Callable[[], Any] | None = None
    post_collect_hook: Hook | None = None
    worker_idx: int | None = None
    replay_buffer: Buffer | None = None
    extend_buffer: bool = True
    trajs_per_write: int | None = None
    progress: bool = False
    fast_policy: bool = True
    frames_per_batch: int | Sequence[int]
    policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None
    create_env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None
    device: Device | Sequence[Device | None] | None = None
    storing_device: Device | Sequence[Device | None] | None = None
    policy_device: Device | Sequence[Device | None] | None = None
    env_device: Device | Sequence[Device | None] | None = None
    track_policy_version: bool | PolicyVersion | None = None

    per_worker: ClassVar[tuple[str, ...]] = ()
    """Arguments that may be lists with an element for each worker."""
    foreign: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}
    """Arguments of TorchRL that choose something else: the values that change nothing here, and what to do instead."""

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return 1

    def of(self, name: str, worker: int) -> Any:
        """An argument, for one worker."""
        value = getattr(self, name)
        return value[worker] if name in self.per_worker and isinstance(value, list | tuple) else value

    def told(self, name: str) -> Any:
        """An argument as a collector's attribute tells it: a device as it was understood, for each worker if many."""
        if name not in DEVICES[1:]:
            return getattr(self, name)
        understood = [getattr(self.devices_of(worker), name.removesuffix("_device")) for worker in range(self.workers)]
        return understood if name in self.per_worker else understood[0]

    # -- checking ----------------------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        """Refuse what cannot be right, for any worker."""
        for field in fields(self):
            value = getattr(self, field.name)
            each = value if field.name in self.per_worker and isinstance(value, list | tuple) else [value]
            for one in each:
                check_kind(field.name, one, str(field.type))
            if isinstance(value, Integral) and not isinstance(value, bool):
                object.__setattr__(self, field.name, int(value))  # numpy's integers cannot be saved with the state
        self._check_values()
        self._check_together()
        self._check_machine()

    def _check_values(self) -> None:
        for name in self.per_worker:
            value = getattr(self, name)
            if isinstance(value, list | tuple) and len(value) != self.workers:
                kind = RuntimeError if name.endswith("device") else ValueError
                raise kind(f"{name} has {len(value)} elements for {self.workers} workers.")
        for worker in range(self.workers):
            check_least("frames_per_batch", self.of("frames_per_batch", worker), 1)
        for name in ("trajs_per_batch", "trajs_per_write"):
            check_least(name, getattr(self, name), 1)
        check_least("worker_idx", self.worker_idx, 0)
        if self.worker_idx is not None and self.worker_idx > MAX_WORKER:
            raise ValueError(f"worker_idx must be at most {MAX_WORKER} to fit into ids, got {self.worker_idx}.")
        if self.total_frames == 0:
            raise ValueError("total_frames=0 would collect nothing; use -1 for no end.")
        for name, off in OFF.items():
            if (getattr(self, name) or 0) < -1:  # -1 is TorchRL's way to say that there is none
                raise ValueError(f"{name} must be at least 1, or {off}, got {getattr(self, name)}.")
        check_one_of("traj_format", self.traj_format, ("padded", "cat"))
        if not self.reset_when_done:
            raise ValueError(
                "reset_when_done=False is not supported: a lane that has ended begins a new episode at once. "
                "Use max_frames_per_traj or an env that never ends."
            )

    def _check_together(self) -> None:
        """Refuse arguments that do not go together."""
        self._check_buffer()
        if self.traj_format == "cat" and self.trajs_per_batch is None:
            raise ValueError("traj_format='cat' needs trajs_per_batch: it says how complete episodes are delivered.")
        if self.split_trajs and not self.track_traj_ids:
            raise ValueError("split_trajs=True needs the ids that track_traj_ids=False leaves out.")
        if self.trajs_per_batch is not None and not self.track_traj_ids:
            raise KeyError(
                f"trajs_per_batch={self.trajs_per_batch} puts episodes together by their ids, which "
                "track_traj_ids=False leaves out."
            )
        if self.split_trajs and self.trajs_per_batch is not None:
            raise ValueError(
                f"split_trajs=True and trajs_per_batch={self.trajs_per_batch} exclude each other: the latter already "
                "delivers episodes."
            )
        if self.return_same_td and (self.split_trajs or self.trajs_per_batch is not None):
            other = "split_trajs" if self.split_trajs else "trajs_per_batch"
            raise ValueError(
                f"return_same_td=True overwrites one TensorDict, but {other} delivers another shape each time."
            )

    def _check_buffer(self) -> None:
        """Refuse what makes no sense with a replay buffer, or without."""
        if self.trajs_per_write is not None and (self.replay_buffer is None or self.trajs_per_batch is None):
            raise ValueError(
                f"trajs_per_write={self.trajs_per_write} says how episodes are written to a replay buffer: it needs "
                "replay_buffer and trajs_per_batch."
            )
        if self.replay_buffer is None:
            return
        for name in ("return_same_td", "use_buffers"):
            if getattr(self, name):
                raise TypeError(f"{name}=True is about batches that are delivered; with replay_buffer there are none.")
        if self.extend_buffer:
            return
        for name in ("postproc", "split_trajs"):
            if getattr(self, name):
                raise TypeError(f"extend_buffer=False writes single steps, but {name} works on whole batches.")
        for name in ("trajs_per_batch", "set_truncated"):
            if getattr(self, name):
                raise TypeError(f"extend_buffer=False writes single steps, but {name} is about more than one.")

    def _check_machine(self) -> None:
        """Refuse what this machine has not, before anything starts."""
        has_cuda = torch.cuda.is_available()
        for name in DEVICES:
            for worker in range(self.workers):
                given = self.of(name, worker)
                device = as_device(name, given)
                if device is not None and device.type == "cuda" and not has_cuda:
                    raise ValueError(f"{name}={given!r} needs CUDA, which is not available here; use 'cpu'.")
        if self.cudagraph_policy and not has_cuda:
            raise RuntimeError(
                f"cudagraph_policy={self.cudagraph_policy!r} needs CUDA, which is not available here; leave it out."
            )

    # -- what follows from them --------------------------------------------------------------------------------

    def devices_of(self, worker: int) -> Devices:
        """Where env, policy and storage of a worker are."""
        return Devices.resolve(*(self.of(name, worker) for name in DEVICES))

    def task_of(self, task: EngineTask) -> Task:
        """What a worker is started for: one engine, if a subclass has nothing else in mind."""
        return task

    @property
    def tracks_version(self) -> bool:
        """Whether frames carry the version that made them."""
        raise NotImplementedError

    @property
    def workers_write(self) -> bool:
        """Whether engines write to the replay buffer themselves."""
        return self.replay_buffer is not None

    def engine_settings(self, worker: int, *, shares_policy: bool = False) -> EngineSettings:
        """What an engine needs to know of all this: what has the same name there, and what follows from the rest."""
        shared = {field.name for field in fields(self)} & {field.name for field in fields(EngineSettings)}
        settings = EngineSettings(**{name: getattr(self, name) for name in shared})
        limit, writes = self.max_frames_per_traj, self.workers_write
        return replace(
            settings,
            replay_buffer=self.replay_buffer if writes else None,
            max_frames_per_traj=limit if limit is not None and limit > 0 else None,
            exploration=self.exploration_type,
            track_version=self.tracks_version,
            policy_device=self.devices_of(worker).policy,
            opaque_policy=bool(self.trust_policy),
            shares_policy=shares_policy,
            init_random_frames=(self.init_random_frames or 0) if writes else 0,
            whole_episodes=self.trajs_per_batch is not None,
            transform=Transform(bool(self.split_trajs), self.postproc).if_any() if writes else None,
        )


@dataclass(frozen=True)
class Transform:
    """What is done to a batch before it is delivered or written."""

    splits: bool
    postproc: PostProc | None

    def if_any(self) -> Transform | None:
        """Itself, or None if it changes nothing."""
        return self if self.splits or self.postproc is not None else None

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Split into trajectories, then post-process."""
        if self.splits:
            batch = split_trajectories(batch)
        if self.postproc is None:
            return batch
        try:
            batch = self.postproc(batch)
        except StopIteration as error:  # which would be taken for the end of the batches
            raise RuntimeError("A postproc has raised StopIteration.") from error
        if batch is None:
            raise TypeError(f"postproc={self.postproc!r} returned None; it must return the batch.")
        return batch


@dataclass(frozen=True)
class CollectorConfig(CommonConfig):
    """What a collector in this process can be given: what every collector can, without lists by worker."""

    _: KW_ONLY
    frames_per_batch: int
    policy_factory: Callable[[], Any] | None = None
    create_env_kwargs: dict[str, Any] | None = None
    device: Device | None = None
    storing_device: Device | None = None
    policy_device: Device | None = None
    env_device: Device | None = None
    track_policy_version: bool | PolicyVersion = False

    foreign: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "sync": ((None,), "It collects in this process; use MultiCollector."),
        "num_collectors": ((None, 1), "It is one collector; use MultiCollector."),
        "num_workers": (
            (None, 1),
            "It collects in this process. For workers write MultiSyncCollector(make_env, policy, num_workers=..., "
            "frames_per_batch=...); for lanes in this process, Collector(SerialEnv(4, make_env), policy, ...).",
        ),
        "backend": ((None, "direct"), "It collects in this process, backend='direct'."),
        "backend_options": ((None, {}), "It collects in this process, where they have no meaning."),
    }

    def _check_together(self) -> None:
        super()._check_together()
        if self.policy is not None and self.policy_factory is not None:
            raise TypeError("Give either policy or policy_factory, not both.")

    @property
    def tracks_version(self) -> bool:
        """As asked for."""
        return bool(self.track_policy_version)
