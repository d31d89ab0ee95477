"""gymnasium's AsyncVectorEnv: a process per env, observations in shared memory, the rest through pipes."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from benchmarks.processes.parts import Actions, Stepper
from benchmarks.processes.workloads import ProcessWorkload


def stepper(workload: ProcessWorkload) -> Stepper:
    count = workload.workers
    envs = AsyncVectorEnv([workload.one.make_env] * count, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    seen: list[Any] = [envs.reset(seed=0)[0]]

    def step(actions: Actions) -> int:
        seen[0] = envs.step(actions)[0]
        return count

    return Stepper(step, lambda: seen[0], envs.close)
