"""TorchRL with several processes, in the forms that the contestants choose from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import EnvBase, GymEnv, GymWrapper, ParallelEnv, SerialEnv

from benchmarks import pixels, policies
from benchmarks.processes.contestants import _tensordict as shared
from benchmarks.processes.parts import Actions, Collecting, Stepper, Weights
from benchmarks.processes.workloads import WORKERS, ProcessWorkload
from benchmarks.replay.contestants import _tensordict as replay
from benchmarks.replay.parts import Background
from benchmarks.replay.workloads import BATCH, COLLECT, ENVS

Make = Callable[[str, int], EnvBase]


def gym(env_id: str) -> EnvBase:
    return GymEnv(env_id, categorical_action_encoding=True)


def serial(env_id: str, num_envs: int) -> EnvBase:
    pixels.register()  # this runs in a worker
    return SerialEnv(num_envs, partial(gym, env_id))


def vector(env_id: str, num_envs: int) -> EnvBase:
    """gymnasium's vector env, wrapped: all lanes for one conversion to tensors."""
    pixels.register()
    make = partial(gymnasium.make, env_id, disable_env_checker=True)
    envs = SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.DISABLED)
    return GymWrapper(envs, categorical_action_encoding=True)


_TRUST: dict[str, Any] = {"trust_policy": True}

VARIANTS: dict[str, tuple[Make, dict[str, Any]]] = {
    "default": (serial, {}),
    "serial, trust policy": (serial, _TRUST),
    "vector": (vector, {}),
    "vector, trust policy": (vector, _TRUST),
    "vector, trust policy, cat": (vector, {**_TRUST, "cat_results": 0}),
    "vector, trust policy, no buffers": (vector, {**_TRUST, "use_buffers": False}),
    "vector, trust policy, compiled": (vector, {**_TRUST, "compile_policy": True}),
}
"""What was tried for collectors; `python -m benchmarks.peer_settings W4` runs them beside each other."""


def collect(workload: ProcessWorkload, env: Make, kwargs: dict[str, Any]) -> Collecting:
    collector, net = _collector(workload, env, kwargs)
    return shared.collecting(collector, net, workload, partial(_close, collector))


def weights(workload: ProcessWorkload) -> Weights:
    collector, net = _collector(workload, *VARIANTS["default"])
    return shared.weights(collector, net, partial(_close, collector))


def _collector(workload: ProcessWorkload, env: Make, kwargs: dict[str, Any]) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    one = workload.one
    net = one.make_net()
    make = partial(env, one.env_id, one.num_envs)
    collector = (MultiSyncCollector if workload.sync else MultiAsyncCollector)(
        [make] * workload.workers,
        policies.actor(net, None, None),
        frames_per_batch=workload.whole.frames_per_batch,
        total_frames=-1,
        **kwargs,
    )
    return collector, net


def _close(collector: Any) -> None:
    """Shut down, its weight schemes too: left to the end of the interpreter, they can hang it."""
    collector.async_shutdown()
    for scheme in (collector._weight_sync_schemes or {}).values():
        scheme.shutdown()


def background(capacity: int, env: Make, kwargs: dict[str, Any]) -> Background:
    """Two dimensions of storage, for time and envs: with one, it would sample pieces of 25 steps."""
    torch.manual_seed(0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(capacity, ndim=2), batch_size=BATCH, shared=True)
    collector = MultiAsyncCollector(
        [partial(env, COLLECT.env_id, ENVS)] * WORKERS,
        policies.actor(COLLECT.make_net(), None, None),
        frames_per_batch=COLLECT.frames_per_batch,
        total_frames=-1,
        replay_buffer=buffer,
        **kwargs,
    )
    run = replay.background(collector, buffer, frames_per_count=ENVS)
    return replace(run, stop=partial(_close, collector))


def stepper(env: EnvBase) -> Stepper:
    """By `step_and_maybe_reset`, which is what its collectors step an env by."""
    root: list[TensorDictBase] = [env.reset()]

    def prepare(actions: Actions) -> Tensor:
        return torch.from_numpy(actions).view(env.batch_size)

    def step(actions: Tensor) -> int:
        root[0] = env.step_and_maybe_reset(root[0].set("action", actions))[1]
        return actions.numel()

    def observation() -> NDArray[Any]:
        seen: NDArray[Any] = root[0]["observation"].flatten(0, -2).numpy()
        return seen

    return Stepper(step, observation, env.close, prepare)


def parallel(workload: ProcessWorkload) -> EnvBase:
    """One process per env."""
    return ParallelEnv(workload.workers, partial(gym, workload.one.env_id))


def packed(workload: ProcessWorkload) -> EnvBase:
    """Two processes with a vector env in each."""
    return ParallelEnv(WORKERS, partial(vector, workload.one.env_id, workload.workers // WORKERS))
