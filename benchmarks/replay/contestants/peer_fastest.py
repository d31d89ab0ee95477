"""TorchRL with the fastest settings found so far; the search was short, on a busy machine.

For the background, beside the default SerialEnv: one wrapped vector env with `trust_policy=True` and
`track_traj_ids=False` collected about twice as much in both rounds tried, and is used here. Not
settled: the policy compiled as well (equal in one sitting, slower in another), a collector of one
process with a shared buffer (between as fast and a quarter faster in one round), `prefetch=2` (one
round, slower without pause). `extend_buffer=False` is deprecated.

For the buffer by itself: ReplayBuffer samples faster than TensorDictReplayBuffer, which adds indices
to what it delivers. Not settled: `prefetch=3` and `compilable=True`, which wrote a third faster in the
only run; and priorities, where TensorDictReplayBuffer was the faster of the two.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymWrapper

from benchmarks.replay.contestants import _peer
from benchmarks.replay.contestants import _tensordict as shared
from benchmarks.replay.parts import Background, Buffer, Prioritized
from benchmarks.replay.workloads import BATCH
from benchmarks.workloads import Workload

_make = partial(ReplayBuffer, batch_size=BATCH)


def _env(workload: Workload) -> GymWrapper:
    envs = SyncVectorEnv([workload.make_env] * workload.num_envs, autoreset_mode=AutoresetMode.DISABLED)
    return GymWrapper(envs, categorical_action_encoding=True)


def background(capacity: int) -> Background:
    return _peer.background(_env, _make, capacity, trust_policy=True, track_traj_ids=False)


def buffer(capacity: int, pixels: bool) -> Buffer:
    return shared.buffer(_make(storage=LazyTensorStorage(capacity)), capacity, pixels)


def prioritized(capacity: int) -> Prioritized:
    made = _peer.prioritized(_make, capacity)

    def sample() -> tuple[TensorDictBase, Any]:
        data, info = made.sample(return_info=True)
        return data, info["index"]

    return shared.prioritized(made, capacity, sample)
