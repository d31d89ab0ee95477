"""swath's ParallelEnv, stepped by rows or by TensorDicts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from benchmarks.processes.parts import Actions, Stepper
from benchmarks.processes.workloads import WORKERS, ProcessWorkload
from swath.envs import EnvBase, GymEnv, ParallelEnv, Rows


def parallel(workload: ProcessWorkload, packed: bool = False) -> EnvBase:
    """One process per env; packed, two processes that share the envs."""
    make = partial(GymEnv, workload.one.env_id, categorical_action_encoding=True)
    per_worker = workload.workers // WORKERS if packed else 1
    return ParallelEnv(workload.workers, make, envs_per_worker=per_worker)


def by_rows(env: EnvBase) -> Stepper:
    """As a collector steps it: actions and answers lie in rows, and finished lanes are reset."""
    action = Rows(env.actions.leaves, env.batch_size)
    out = env.new_out_rows()
    out.restarts = True
    everyone = list(range(env.num_lanes))
    env.reset_into(everyone, out)
    chosen, seen = action.arrays["action"], out.arrays["observation"]
    terminated, truncated = out.arrays["terminated"], out.arrays["truncated"]

    def step(actions: Actions) -> int:
        chosen[:] = actions
        if env.step_into(action, out):
            env.reset_into(np.flatnonzero(terminated | truncated).tolist(), out)
        return env.num_lanes

    return Stepper(step, lambda: seen, env.close)


def by_tensordicts(env: EnvBase) -> Stepper:
    root: list[TensorDictBase] = [env.reset()]

    def prepare(actions: Actions) -> Tensor:
        return torch.from_numpy(actions).view(env.batch_size)

    def step(actions: Tensor) -> int:
        root[0] = env.step_and_maybe_reset(root[0].set("action", actions))[1]
        return env.num_lanes

    def observation() -> NDArray[Any]:
        seen: NDArray[Any] = root[0]["observation"].numpy()
        return seen

    return Stepper(step, observation, env.close, prepare)
