"""PufferLib's Multiprocessing backend: workers that spin on a byte of shared memory, several envs in each.

The trainer spins as well, so there are as many workers as cores are left beside it, and they share the envs: on two
cores one worker was six times as fast as two. A finished env is reset by the next step in place of being stepped; such
a step is no frame.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np

from benchmarks.figures import NotAvailableError
from benchmarks.machine import usable_cores
from benchmarks.processes.parts import Actions, Stepper
from benchmarks.processes.workloads import ProcessWorkload

try:
    import pufferlib.emulation
    import pufferlib.vector
except ImportError:
    raise NotAvailableError("not installed") from None


def _make(env_id: str) -> Any:
    return pufferlib.emulation.GymnasiumPufferEnv(env_creator=partial(gymnasium.make, env_id, disable_env_checker=True))


def _workers(envs: int) -> int:
    """It wants the same number of envs in each."""
    return max(n for n in range(1, max(2, usable_cores())) if envs % n == 0)


def stepper(workload: ProcessWorkload) -> Stepper:
    count = workload.workers
    envs = pufferlib.vector.make(
        _make,
        env_args=[workload.one.env_id],
        backend=pufferlib.vector.Multiprocessing,
        num_envs=count,
        num_workers=_workers(count),
    )
    seen: list[Any] = [envs.reset(seed=0)[0]]
    finished = [0]

    def step(actions: Actions) -> int:
        frames = count - finished[0]
        seen[0], _, terminated, truncated, _ = envs.step(actions)
        finished[0] = int(np.count_nonzero(terminated | truncated))
        return frames

    def close() -> None:
        envs.close()
        for process in envs.processes:
            process.join()

    return Stepper(step, lambda: seen[0].reshape(count, -1), close)
