"""swath's ParallelEnv by its TensorDict surface."""

from __future__ import annotations

from benchmarks.processes.contestants import _swath_env
from benchmarks.processes.parts import Stepper
from benchmarks.processes.workloads import ProcessWorkload


def stepper(workload: ProcessWorkload) -> Stepper:
    return _swath_env.by_tensordicts(_swath_env.parallel(workload))
