"""The arguments of collectors: in one frozen dataclass, checked before anything starts."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeAlias, TypeVar

from tensordict import TensorDictBase

from swath.collectors.buffer_writer import is_buffer
from swath.errors import suggestion
from swath.modules.exploration import ExplorationType
from swath.rollout.devices import Devices
from swath.rollout.loop import Interruptor
from swath.rollout.trajectories import WORKER_BITS

Hook = Callable[[TensorDictBase], Any]
Buffer: TypeAlias = Any
"""A `ReplayBuffer`, or what works like one: it has `extend` and `sample`."""
Config = TypeVar("Config", bound="CollectorConfig")

TRAJ_FORMATS = ("padded", "cat")
SYNONYMS = {
    "devices": "policy_device",
    "passing_devices": "storing_device",
    "exploration_mode": "exploration_type",
}
"""Names of the oldest API; still understood, with a DeprecationWarning."""
POSITIONAL = ("create_env_fn", "policy")
MAX_WORKER = 2 ** (63 - WORKER_BITS) - 1
ELSEWHERE = ("backend", "backend_options", "num_collectors", "sync")
"""Arguments that choose another kind of collector; here they may only say "this process"."""


@dataclass(frozen=True)
class PolicyVersion:
    """Asks for the policy's version in every frame, also with batched envs: `track_policy_version=PolicyVersion()`."""


@dataclass(frozen=True, kw_only=True)
class CollectorConfig:
    """What every collector can be told.

    Attributes:
        frames_per_batch: frames in a batch over all lanes, rounded up to whole steps of all lanes.
        total_frames: how many frames to deliver in all, rounded up likewise; -1 for no end.
        policy_factory: a function that makes the policy, instead of `policy`.
        device: fills in those of the following three that are not given.
        storing_device: where batches lie.
        policy_device: where the policy computes; a policy that lies elsewhere is copied there.
        env_device: where the env's data lie; batches stay there unless policy or storing device say otherwise.
        create_env_kwargs: arguments for the env's factory.
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
        compile_policy: compile the policy; True, or arguments for `torch.compile`.
        cudagraph_policy: run the policy as a CUDA graph; True, or arguments for `CudaGraphModule`.
        no_cuda_sync: copy between devices without waiting.
        track_policy_version: write `policy_version`; `PolicyVersion()` for batched envs.
        trajs_per_batch: deliver so many complete episodes at a time instead of frames; to a replay buffer, write
            complete episodes only, flat and without padding.
        traj_format: "padded" to `[N, longest]` with a mask, or "cat" one after the other.
        compact_obs: leave the observations out of "next": inside an episode the following root has them, but its final
            observation, which a truncated episode's value depends on, is then nowhere.
        pre_collect_hook: called before every rollout.
        post_collect_hook: called with every batch before it is delivered.
        worker_idx: the index of this worker; part of the trajectory ids.
        replay_buffer: write to this buffer instead of delivering batches: iterating gives None after each, and
            `start()` collects in the background.
        extend_buffer: write to the buffer once per batch; False writes after every step, which is slow.
        trajs_per_write: with a buffer and `trajs_per_batch`, how many complete episodes are written at a time; by
            default all that are complete.
        progress: show a progress bar while iterating.
        fast_policy: run known small policies by their array forms; False always calls the modules.
    """

    frames_per_batch: int
    total_frames: int = -1
    policy_factory: Callable[[], Any] | None = None
    device: Any = None
    storing_device: Any = None
    policy_device: Any = None
    env_device: Any = None
    create_env_kwargs: dict[str, Any] | None = None
    max_frames_per_traj: int | None = None
    init_random_frames: int | None = None
    reset_at_each_iter: bool = False
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = None
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
    track_policy_version: bool | PolicyVersion = False
    trajs_per_batch: int | None = None
    traj_format: str | None = None
    compact_obs: bool = False
    pre_collect_hook: Callable[[], Any] | None = None
    post_collect_hook: Hook | None = None
    worker_idx: int | None = None
    replay_buffer: Buffer | None = None
    extend_buffer: bool = True
    trajs_per_write: int | None = None
    progress: bool = False
    fast_policy: bool = True

    @classmethod
    def from_arguments(cls: type[Config], owner: str, arguments: Mapping[str, Any]) -> Config:
        """A checked config from keyword arguments; `owner` is the class they were given to."""
        given = _with_new_names(owner, dict(arguments))
        cls._check_elsewhere(owner, given)
        known = {field.name: field for field in fields(cls)}
        unknown = [name for name in given if name not in known]
        if unknown:
            names = [*known, *POSITIONAL]
            told = [f"{name}={given[name]!r}.{suggestion(name, names)}" for name in unknown]
            raise TypeError(f"{owner} got an unknown argument: {' Also '.join(told)}")
        missing = [n for n, field in known.items() if field.default is MISSING and n not in given]
        if missing:
            name = missing[0]
            raise TypeError(f"{owner} needs the argument {name!r}, as in {owner}(env, policy, {name}=1000).")
        if given.get("total_frames", -1) is None:
            given["total_frames"] = -1
        return cls(**given)

    @staticmethod
    def _check_elsewhere(owner: str, given: dict[str, Any]) -> None:
        """Take out what chooses another kind of collector, or refuse it."""
        _check_elsewhere(owner, given)

    def __post_init__(self) -> None:
        """Refuse what cannot be right."""
        self._check_kinds()
        self._check_values()
        self._check_pairs()
        self.devices  # noqa: B018 - raises if one of them is no device

    def _check_kinds(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            check_kind(field.name, value, str(field.type))
            if isinstance(value, Integral) and not isinstance(value, bool):
                object.__setattr__(self, field.name, int(value))  # numpy's integers cannot be saved with the state

    def _check_values(self) -> None:
        at_least("frames_per_batch", self.frames_per_batch, 1)
        at_least("trajs_per_batch", self.trajs_per_batch, 1)
        at_least("trajs_per_write", self.trajs_per_write, 1)
        at_least("worker_idx", self.worker_idx, 0)
        if self.worker_idx is not None and self.worker_idx > MAX_WORKER:
            raise ValueError(f"worker_idx must be at most {MAX_WORKER} to fit into ids, got {self.worker_idx}.")
        if self.total_frames == 0:
            raise ValueError("total_frames=0 would collect nothing; use -1 for no end.")
        if self.traj_format is not None and self.traj_format not in TRAJ_FORMATS:
            hint = suggestion(self.traj_format, TRAJ_FORMATS)
            raise ValueError(f"traj_format must be 'padded' or 'cat', got {self.traj_format!r}.{hint}")
        if not self.reset_when_done:
            raise ValueError(
                "reset_when_done=False is not supported: a lane that has ended begins a new episode at once. "
                "Use max_frames_per_traj or an env that never ends."
            )

    def _check_pairs(self) -> None:
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
        if not self.extend_buffer and (self.postproc is not None or self.split_trajs):
            other = "postproc" if self.postproc is not None else "split_trajs"
            raise TypeError(f"extend_buffer=False writes single steps, but {other} works on whole batches.")
        for name in ("trajs_per_batch", "set_truncated"):
            if not self.extend_buffer and getattr(self, name):
                raise TypeError(f"extend_buffer=False writes single steps, but {name} is about more than one.")

    @property
    def devices(self) -> Devices:
        """Where env, policy and storage are."""
        return Devices.resolve(self.device, self.storing_device, self.policy_device, self.env_device)


def _with_new_names(owner: str, given: dict[str, Any]) -> dict[str, Any]:
    for old, new in SYNONYMS.items():
        if old not in given:
            continue
        if new in given:
            raise TypeError(
                f"{owner} got both {old}={given[old]!r} and {new}={given[new]!r}; {old} is the old name of {new}."
            )
        warnings.warn(f"{old} is an old name; use {new}.", DeprecationWarning, stacklevel=4)
        value = given.pop(old)
        if old == "exploration_mode" and isinstance(value, str):
            value = _exploration(value)
        elif isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]  # they were lists with one device per worker
        given[new] = value
    return given


def _exploration(name: str) -> ExplorationType:
    known = {kind.name.lower(): kind for kind in ExplorationType}
    if name.lower() not in known:
        raise ValueError(f"exploration_mode={name!r} is unknown; use one of {sorted(known)}.{suggestion(name, known)}")
    return known[name.lower()]


def _check_elsewhere(owner: str, given: dict[str, Any]) -> None:
    """Arguments for other kinds of collectors: accepted where they say "one, in this process"."""
    sync, count = given.pop("sync", None), given.pop("num_collectors", None)
    backend, options = given.pop("backend", None), given.pop("backend_options", None)
    if sync is not None:
        if not isinstance(sync, bool):
            raise TypeError(f"sync must be True or False, got {sync!r}.")
        raise ValueError(f"{owner} collects in this process, where sync={sync} has no meaning; use MultiCollector.")
    if count is not None:
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"num_collectors must be a whole number, got {count!r}.")
        if count != 1:
            raise ValueError(f"{owner} is one collector, so num_collectors={count} cannot be; use MultiCollector.")
    if backend not in (None, "direct"):
        raise ValueError(f"{owner} collects in this process (backend='direct'), got backend={backend!r}.")
    if options:
        raise ValueError(f"backend_options={options!r} has no meaning for a collector in this process.")


def refuse_elsewhere(owner: str, given: Mapping[str, Any]) -> None:
    """A subclass of a collector is what it is: nothing may choose another kind."""
    for name in ELSEWHERE:
        if name in given:
            raise TypeError(f"{owner} cannot become another kind of collector; leave out {name}={given[name]!r}.")


def check_kind(name: str, value: Any, annotation: str) -> None:
    """Raise TypeError unless `value` is of one of the kinds in `annotation`, such as "int | None"."""
    kinds = [kind.split("[")[0] for kind in annotation.split(" | ")]
    if not all(kind in KINDS for kind in kinds):
        return  # a subclass's own kind, which it checks itself
    if not any(KINDS[kind][0](value) for kind in kinds):
        wanted = " or ".join(KINDS[kind][1] for kind in kinds)
        raise TypeError(f"{name} must be {wanted}, got {value!r}.{_cure(value, kinds)}")


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "Any": (lambda value: True, "anything"),
    "None": (lambda value: value is None, "None"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "int": (lambda value: isinstance(value, Integral) and not isinstance(value, bool), "a whole number"),
    "float": (lambda value: isinstance(value, Real) and not isinstance(value, bool), "a number"),
    "str": (lambda value: isinstance(value, str), "a string"),
    "dict": (lambda value: isinstance(value, Mapping), "a dict"),
    "Callable": (callable, "callable"),
    "Hook": (callable, "callable"),
    "Buffer": (is_buffer, "a ReplayBuffer"),
    "ExplorationType": (lambda value: isinstance(value, ExplorationType), "an ExplorationType"),
    "Interruptor": (lambda value: hasattr(value, "collection_stopped"), "an object with collection_stopped()"),
    "PolicyVersion": (lambda value: isinstance(value, PolicyVersion), "PolicyVersion()"),
}
"""For each kind of field: whether a value is of it, and what it is called in messages."""


def _cure(value: Any, kinds: list[str]) -> str:
    if "int" in kinds and isinstance(value, float) and value.is_integer():
        return f" Write {int(value)}."
    if "ExplorationType" in kinds and isinstance(value, str):
        known = [kind.name for kind in ExplorationType]
        near = difflib.get_close_matches(value.upper(), known, n=1)
        return f" Use swath.modules.ExplorationType.{near[0] if near else 'RANDOM'}."
    return ""


def at_least(name: str, value: int | None, least: int) -> None:
    """Raise ValueError if there is a `value` and it is smaller than `least`."""
    if value is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")
