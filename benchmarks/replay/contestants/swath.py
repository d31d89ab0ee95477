"""swath, used as its README shows it: no setting is tuned for the benchmark."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks import policies
from benchmarks.replay.contestants import _tensordict as shared
from benchmarks.replay.parts import Background, Buffer, Prioritized
from benchmarks.replay.workloads import BATCH, COLLECT, ENVS
from swath.collectors import Collector
from swath.data import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, TensorDictReplayBuffer
from swath.envs import GymEnv, SerialEnv


def background(capacity: int) -> Background:
    torch.manual_seed(0)
    env = SerialEnv(ENVS, partial(GymEnv, COLLECT.env_id, categorical_action_encoding=True))
    buffer = ReplayBuffer(storage=LazyTensorStorage(capacity, ndim=2), batch_size=BATCH)
    collector = Collector(
        env,
        policies.actor(COLLECT.make_net(), None, None),
        frames_per_batch=COLLECT.frames_per_batch,
        total_frames=-1,
        replay_buffer=buffer,
    )
    return shared.background(collector, buffer, frames_per_count=1)


def buffer(capacity: int, pixels: bool) -> Buffer:
    return shared.buffer(ReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=BATCH), capacity, pixels)


def prioritized(capacity: int) -> Prioritized:
    made = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity),
        sampler=PrioritizedSampler(capacity, shared.ALPHA, shared.BETA),
        batch_size=BATCH,
    )

    def sample():  # type: ignore[no-untyped-def]
        data = made.sample()
        return data, data["index"]

    return shared.prioritized(made, capacity, sample)
