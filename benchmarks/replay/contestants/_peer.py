"""TorchRL's collector and buffers for W9."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, PrioritizedSampler
from torchrl.envs import EnvBase

from benchmarks import policies
from benchmarks.replay import peer_tree
from benchmarks.replay.contestants import _tensordict as shared
from benchmarks.replay.parts import Background
from benchmarks.replay.workloads import COLLECT, ENVS
from benchmarks.workloads import Workload


def background(
    env: Callable[[Workload], EnvBase], buffer: Callable[..., Any], capacity: int, **kwargs: Any
) -> Background:
    """Two dimensions of storage, for time and envs: with one, it would sample pieces of 25 steps."""
    torch.manual_seed(0)
    made = buffer(storage=LazyTensorStorage(capacity, ndim=2))
    collector = Collector(
        env(COLLECT),
        policies.actor(COLLECT.make_net(), None, None),
        frames_per_batch=COLLECT.frames_per_batch,
        total_frames=-1,
        replay_buffer=made,
        **kwargs,
    )
    # it counts rows, and a row is one step of all envs
    return shared.background(collector, made, frames_per_count=ENVS)


def prioritized(buffer: Callable[..., Any], capacity: int) -> Any:
    peer_tree.load()
    sampler = PrioritizedSampler(capacity, shared.ALPHA, shared.BETA)
    return buffer(storage=LazyTensorStorage(capacity), sampler=sampler)
