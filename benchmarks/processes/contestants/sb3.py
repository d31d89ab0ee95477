"""Stable-Baselines3's SubprocVecEnv: a process per env, everything through pipes."""

from __future__ import annotations

from typing import Any

from benchmarks.figures import NotAvailableError
from benchmarks.processes.parts import Actions, Stepper
from benchmarks.processes.workloads import ProcessWorkload

try:
    from stable_baselines3.common.vec_env import SubprocVecEnv
except ImportError:
    raise NotAvailableError("not installed") from None


def stepper(workload: ProcessWorkload) -> Stepper:
    count = workload.workers
    envs = SubprocVecEnv([workload.one.make_env] * count)
    seen: list[Any] = [envs.reset()]

    def step(actions: Actions) -> int:
        seen[0] = envs.step(actions)[0]
        return count

    return Stepper(step, lambda: seen[0], envs.close)
