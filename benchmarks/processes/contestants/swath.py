"""swath, used as its README shows it: no setting is tuned for the benchmark."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import pixels, policies
from benchmarks.processes.contestants import _swath_env
from benchmarks.processes.contestants import _tensordict as shared
from benchmarks.processes.parts import Collecting, Stepper, Weights
from benchmarks.processes.workloads import WORKERS, ProcessWorkload
from benchmarks.replay.contestants import _tensordict as replay
from benchmarks.replay.parts import Background
from benchmarks.replay.workloads import BATCH, COLLECT, ENVS
from swath.collectors import MultiAsyncCollector, MultiSyncCollector
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import EnvBase, GymEnv, SerialEnv


def serial(env_id: str, num_envs: int) -> EnvBase:
    pixels.register()  # this runs in a worker
    return SerialEnv(num_envs, partial(GymEnv, env_id, categorical_action_encoding=True))


def collect(workload: ProcessWorkload) -> Collecting:
    collector, net = _collector(workload)
    return shared.collecting(collector, net, workload)


def weights(workload: ProcessWorkload) -> Weights:
    return shared.weights(*_collector(workload))


def _collector(workload: ProcessWorkload) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    one = workload.one
    net = one.make_net()
    collector = (MultiSyncCollector if workload.sync else MultiAsyncCollector)(
        [partial(serial, one.env_id, one.num_envs)] * workload.workers,
        policies.actor(net, None, None),
        frames_per_batch=workload.whole.frames_per_batch,
        total_frames=-1,
    )
    return collector, net


def background(capacity: int) -> Background:
    torch.manual_seed(0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(capacity, ndim=2), batch_size=BATCH, shared=True)
    collector = MultiAsyncCollector(
        [partial(serial, COLLECT.env_id, ENVS)] * WORKERS,
        policies.actor(COLLECT.make_net(), None, None),
        frames_per_batch=COLLECT.frames_per_batch,
        total_frames=-1,
        replay_buffer=buffer,
    )
    return replay.background(collector, buffer, frames_per_count=1)


def stepper(workload: ProcessWorkload) -> Stepper:
    return _swath_env.by_rows(_swath_env.parallel(workload))
