"""swath's ParallelEnv with several envs in each of two processes."""

from __future__ import annotations

from benchmarks.processes.contestants import _swath_env
from benchmarks.processes.parts import Stepper
from benchmarks.processes.workloads import ProcessWorkload


def stepper(workload: ProcessWorkload) -> Stepper:
    return _swath_env.by_rows(_swath_env.parallel(workload, packed=True))
