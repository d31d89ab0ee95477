"""The peer's settings: every variant that was tried, by name.

`python -m benchmarks.peer_settings` runs them beside each other; `peer_fastest.py` says which won.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, GymEnv, GymWrapper, ParallelEnv, SerialEnv
from torchrl.modules import TanhNormal

from benchmarks import policies
from benchmarks.batch import Run
from benchmarks.contestants._tensordict import run_collector
from benchmarks.workloads import Workload


def _gym(workload: Workload, **kwargs: Any) -> EnvBase:
    return GymEnv(workload.env_id, categorical_action_encoding=workload.discrete, **kwargs)


def _serial(workload: Workload, **kwargs: Any) -> EnvBase:
    return SerialEnv(workload.num_envs, partial(_gym, workload), **kwargs)


def _vector(workload: Workload, mode: AutoresetMode, copy: bool = True) -> EnvBase:
    """gymnasium's vector env, wrapped: eight lanes for one conversion to tensors."""
    envs = SyncVectorEnv([workload.make_env] * workload.num_envs, copy=copy, autoreset_mode=mode)
    return GymWrapper(envs, categorical_action_encoding=workload.discrete)


@dataclass(frozen=True)
class Variant:
    """One way to set the peer up."""

    env: Callable[[Workload], EnvBase] = _gym
    collector: dict[str, Any] = field(default_factory=dict)


_LEAN: dict[str, Any] = {"trust_policy": True, "track_traj_ids": False}
_DISABLED = partial(_vector, mode=AutoresetMode.DISABLED)

_ONE_ENV: dict[str, Variant] = {
    "default": Variant(),
    "no traj ids": Variant(collector={"track_traj_ids": False}),
    "trust policy": Variant(collector={"trust_policy": True}),
    "no buffers": Variant(collector={"use_buffers": False}),
    "same td": Variant(collector={"return_same_td": True}),
    "device cpu": Variant(collector={"device": "cpu"}),
    "compact obs": Variant(collector={"compact_obs": True}),
    "lean": Variant(collector=_LEAN),
    "lean, no buffers": Variant(collector={**_LEAN, "use_buffers": False}),
    "lean, same td": Variant(collector={**_LEAN, "return_same_td": True}),
    "lean, compiled": Variant(collector={**_LEAN, "compile_policy": True}),
    "compiled": Variant(collector={"compile_policy": True}),
    "no traj ids, compiled": Variant(collector={"track_traj_ids": False, "compile_policy": True}),
    "lean, compiled whole": Variant(collector={**_LEAN, "compile_policy": {"fullgraph": True}}),
    "lean, no buffers, compiled": Variant(collector={**_LEAN, "use_buffers": False, "compile_policy": True}),
    "lean, same td, compiled": Variant(collector={**_LEAN, "return_same_td": True, "compile_policy": True}),
}

_MANY_ENVS: dict[str, Variant] = {
    "default": Variant(_serial),
    "serial, no buffers": Variant(partial(_serial, use_buffers=False)),
    "serial, lean": Variant(_serial, _LEAN),
    "num_envs": Variant(lambda w: _gym(w, num_envs=w.num_envs)),
    "parallel": Variant(lambda w: ParallelEnv(w.num_envs, partial(_gym, w))),
    "vector, same step": Variant(partial(_vector, mode=AutoresetMode.SAME_STEP)),
    "vector": Variant(_DISABLED),
    "vector, uncopied": Variant(partial(_DISABLED, copy=False)),
    "vector, lean": Variant(_DISABLED, _LEAN),
    "vector, lean, no buffers": Variant(_DISABLED, {**_LEAN, "use_buffers": False}),
    "vector, lean, same td": Variant(_DISABLED, {**_LEAN, "return_same_td": True}),
    "vector, lean, compact obs": Variant(_DISABLED, {**_LEAN, "compact_obs": True}),
    "vector, lean, compiled": Variant(_DISABLED, {**_LEAN, "compile_policy": True}),
    "vector, lean, same td, compiled": Variant(_DISABLED, {**_LEAN, "return_same_td": True, "compile_policy": True}),
    "vector, lean, no buffers, compiled": Variant(_DISABLED, {**_LEAN, "use_buffers": False, "compile_policy": True}),
}


def variants(workload: Workload) -> dict[str, Variant]:
    return _ONE_ENV if workload.num_envs == 1 else _MANY_ENVS


def build_variant(workload: Workload, name: str) -> Run:
    variant = variants(workload)[name]
    torch.manual_seed(0)
    net = workload.make_net()
    actor = policies.actor(net, workload.action_high, TanhNormal)
    collector = Collector(
        variant.env(workload),
        actor,
        frames_per_batch=workload.frames_per_batch,
        total_frames=-1,
        **variant.collector,
    )
    return run_collector(iter(collector), net, collector.shutdown)
