"""TorchRL as documented: SerialEnv, Collector.start() in a thread, TensorDictReplayBuffer."""

from __future__ import annotations

from functools import partial
from typing import Any

from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, SerialEnv

from benchmarks.replay.contestants import _peer
from benchmarks.replay.contestants import _tensordict as shared
from benchmarks.replay.parts import Background, Buffer, Prioritized
from benchmarks.replay.workloads import BATCH
from benchmarks.workloads import Workload

_make = partial(TensorDictReplayBuffer, batch_size=BATCH)


def _env(workload: Workload) -> SerialEnv:
    return SerialEnv(workload.num_envs, partial(GymEnv, workload.env_id, categorical_action_encoding=True))


def background(capacity: int) -> Background:
    return _peer.background(_env, _make, capacity)


def buffer(capacity: int, pixels: bool) -> Buffer:
    return shared.buffer(_make(storage=LazyTensorStorage(capacity)), capacity, pixels)


def prioritized(capacity: int) -> Prioritized:
    made = _peer.prioritized(_make, capacity)

    def sample() -> tuple[TensorDictBase, Any]:
        data = made.sample()
        return data, data["index"]

    return shared.prioritized(made, capacity, sample)
