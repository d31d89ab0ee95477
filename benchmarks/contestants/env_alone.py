"""The envs and nothing else: the ceiling for anybody who steps them in one process.

Actions are drawn before the clock starts; resets are included, as no collector can do without.
Actions are uniform, so CartPole episodes are about as short as under an untrained policy.
"""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import Discrete

from benchmarks.batch import Run
from benchmarks.workloads import Workload


def build(workload: Workload) -> Run:
    envs = [workload.make_env() for _ in range(workload.num_envs)]
    rng = np.random.default_rng(0)
    shape = (workload.steps, workload.num_envs)
    space = envs[0].action_space
    if isinstance(space, Discrete):
        actions = rng.integers(space.n, size=shape)
    else:
        high = workload.action_high or 1.0
        actions = rng.uniform(-high, high, (*shape, 1)).astype(np.float32)
    # rows as lists of what `step` takes, so that not even the indexing of an array is counted
    prepared = [list(row) for row in actions]
    for lane, env in enumerate(envs):
        env.reset(seed=lane)

    def collect() -> int:
        for row in prepared:
            for env, action in zip(envs, row, strict=True):
                _, _, ended, cut, _ = env.step(action)
                if ended or cut:
                    env.reset()
        return workload.frames_per_batch

    return Run(collect)
