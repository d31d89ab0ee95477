"""Tracing rollouts with torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from swath.collectors.kinds import check_kind
from swath.errors import suggestion

ACTIVITIES = {"cpu": torch.profiler.ProfilerActivity.CPU, "cuda": torch.profiler.ProfilerActivity.CUDA}


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """How to trace: `num_rollouts` in all, of which the first `warmup_rollouts` are not recorded."""

    workers: Sequence[int] = (0,)
    num_rollouts: int = 3
    warmup_rollouts: int = 1
    save_path: str | None = None
    activities: Sequence[str] = ("cpu", "cuda")
    record_shapes: bool = True
    profile_memory: bool = False
    with_stack: bool = True
    with_flops: bool = False
    on_trace_ready: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        """Refuse what would record nothing."""
        for field in fields(self):
            check_kind(field.name, getattr(self, field.name), str(field.type))
        if self.warmup_rollouts < 0:
            raise ValueError(f"warmup_rollouts must be >= 0, got {self.warmup_rollouts}.")
        if self.num_rollouts <= self.warmup_rollouts:
            raise ValueError(
                f"num_rollouts={self.num_rollouts} must be greater than warmup_rollouts={self.warmup_rollouts}, or "
                "nothing is recorded."
            )
        for name in self.activities:
            if name not in ACTIVITIES:
                raise ValueError(f"activities may hold 'cpu' and 'cuda', got {name!r}.{suggestion(name, ACTIVITIES)}")

    def should_profile_worker(self, worker_idx: int) -> bool:
        """Whether rollouts of that worker are to be traced."""
        return worker_idx in self.workers

    def get_save_path(self, worker_idx: int) -> Path:
        """Where the trace of that worker is written."""
        return Path((self.save_path or "./collector_profile_{worker_idx}.json").format(worker_idx=worker_idx))

    def get_activities(self) -> list[torch.profiler.ProfilerActivity]:
        """What is recorded here: CUDA only where there is any."""
        return [ACTIVITIES[name] for name in self.activities if name == "cpu" or torch.cuda.is_available()]


class ProfilingHook:
    """A post-collect hook that counts rollouts, and traces those that the config asks for."""

    def __init__(self, config: ProfileConfig, worker: int, inner: Callable[[TensorDictBase], Any] | None) -> None:
        """Begin with the first rollout; `inner` is the hook that was there before."""
        self.config = config
        self.inner = inner
        self._worker = worker
        self._seen = 0
        self._profiler: Any = None
        if config.should_profile_worker(worker) and config.warmup_rollouts == 0:
            self._start()

    def __call__(self, batch: TensorDictBase) -> None:
        """Count a rollout."""
        if self.inner is not None:
            self.inner(batch)
        self._seen += 1
        if not self.config.should_profile_worker(self._worker):
            return
        if self._seen == self.config.warmup_rollouts:
            self._start()
        elif self._seen == self.config.num_rollouts:
            self.stop()

    def stop(self) -> None:
        """End the trace, if one is running, and write it."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        if self.config.on_trace_ready is not None:
            self.config.on_trace_ready(profiler)
        else:
            profiler.export_chrome_trace(str(self.config.get_save_path(self._worker)))

    def _start(self) -> None:
        self._profiler = torch.profiler.profile(
            activities=self.config.get_activities(),
            record_shapes=self.config.record_shapes,
            profile_memory=self.config.profile_memory,
            with_stack=self.config.with_stack,
            with_flops=self.config.with_flops,
        )
        self._profiler.start()
