"""What a node is started for, as `collector_class`, `num_workers_per_collector` and `collector_kwargs` say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from swath.collectors.collector import Collector
from swath.collectors.config import CollectorConfig
from swath.collectors.distributed.inner import INNER_BITS, InnerAsync, InnerCollector, InnerSync, first_number
from swath.collectors.multi import MultiAsyncCollector, MultiSyncCollector
from swath.collectors.worker import EngineTask
from swath.rollout.engine_settings import EngineSettings
from swath.runtime.carrier import Link, Task
from swath.runtime.supervision import Supervision

KINDS: dict[Any, type[InnerCollector] | None] = {
    **dict.fromkeys(("single", Collector)),
    **dict.fromkeys(("sync", MultiSyncCollector), InnerSync),
    **dict.fromkeys(("async", MultiAsyncCollector), InnerAsync),
}
RENAMED = {"exploration_type": "exploration", "track_policy_version": "track_version", "trust_policy": "opaque_policy"}
"""Arguments that engines know by another name."""
ENGINES = {one.name for one in fields(EngineSettings)} & {one.name for one in fields(CollectorConfig)} | set(RENAMED)
ENGINES -= {"replay_buffer", "extend_buffer", "init_random_frames", "trajs_per_write"}
"""Arguments about engines, which nodes may be given by `collector_kwargs`."""
LIMITS = {"stall_warning_s", "stall_timeout_s", "start_timeout_s"}
WORKERS = {"init_fn", "mp_start_method", "num_sub_threads", "slots_per_worker", "max_staleness", "on_worker_failure"}
WORKERS |= {"max_restarts", *LIMITS}
"""Arguments about inner workers. All others are the trainer's."""


@dataclass(frozen=True)
class InnerTask:
    """What a node with inner workers is started for."""

    task: EngineTask
    kind: type[InnerCollector]
    workers: int
    options: Mapping[str, Any]

    def begin(self, link: Link) -> InnerCollector:
        """Start the workers, in the node."""
        task = self.task
        if task.registered is not None:
            task.registered.adopt()
        arguments = {name: getattr(task.settings, RENAMED.get(name, name)) for name in (*ENGINES, "whole_episodes")}
        arguments |= {"worker_idx": first_number(task.number), "first_worker": task.index * self.workers}
        arguments |= {"policy_factory": task.policy_factory, "create_env_kwargs": task.create_env_kwargs}
        makers = [task.create_env_fn] * self.workers
        inner = self.kind(makers, task.policy, frames_per_batch=1, **arguments, **self.options)
        inner.attach(link)
        if task.seed is not None:
            inner.set_seed(*task.seed)
        return inner


@dataclass(frozen=True)
class Inside:
    """What a node runs: one engine, or a collector of `workers` processes, with `options` (`collector_kwargs`)."""

    collector_class: Any = "single"
    workers: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot be, before anything starts."""
        given = f"collector_class={self.collector_class!r}"
        if self.collector_class not in KINDS:
            raise ValueError(f"collector_class must be one of {', '.join(map(str, KINDS))}, got {given}.")
        kind = KINDS[self.collector_class]
        if self.workers != 1 and kind is None:
            raise RuntimeError(f"num_workers_per_collector={self.workers} needs collector_class='sync' or 'async'.")
        if self.workers > 2**INNER_BITS:
            raise ValueError(f"num_workers_per_collector={self.workers} is above {2**INNER_BITS}: use more nodes.")
        known = ENGINES if kind is None else ENGINES | WORKERS
        if unknown := sorted(set(self.options) - known):
            choice = ", ".join(sorted(known))
            raise ValueError(f"collector_kwargs has {unknown[0]!r}; with {given} it can have {choice}.")
        if kind is InnerSync and self.options.get("on_worker_failure") == "drop":
            raise ValueError(
                f"collector_kwargs has on_worker_failure='drop', but with {given} a batch has rows of all workers of a "
                "node: use 'restart', or collector_class='async'."
            )

    def task(self, task: EngineTask, supervision: Supervision) -> Task:
        """What a node is started for instead of `task`. The time-outs of `supervision` hold within it, too."""
        kind, options = KINDS[self.collector_class], dict(self.options)
        own = {name: options.pop(name) for name in self.options if name in ENGINES}
        if own:
            settings = CollectorConfig(task.create_env_fn, frames_per_batch=1, **own).engine_settings(0)
            chosen = {name: getattr(settings, name) for name in (RENAMED.get(name, name) for name in own)}
            task = replace(task, settings=replace(task.settings, **chosen))
        if kind is None:
            return task
        if task.settings.replay_buffer is not None:
            raise ValueError(
                "A node with inner workers cannot write to a replay buffer: use collector_class='single', or extend "
                "the buffer with the batches that are delivered."
            )
        limits = {name: getattr(supervision, name) for name in LIMITS}
        return InnerTask(task, kind, self.workers, {"init_fn": task.init_fn, **limits, **options})
