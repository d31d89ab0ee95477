"""swath's Collector over ParallelEnv: random actions are drawn in its time, and every frame is stored."""

from __future__ import annotations

import numpy as np

from benchmarks.processes.contestants import _swath_env
from benchmarks.processes.parts import Stepper
from benchmarks.processes.workloads import ProcessWorkload
from swath.collectors import Collector

STEPS = 128


def stepper(workload: ProcessWorkload) -> Stepper:
    env = _swath_env.parallel(workload)
    collector = Collector(env, None, frames_per_batch=STEPS * workload.workers, total_frames=-1)
    batches = iter(collector)
    next(batches)

    def step(_: object) -> int:
        return int(next(batches).numel())

    return Stepper(step, lambda: np.empty(0), collector.shutdown, steps=STEPS)
