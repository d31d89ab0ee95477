"""swath in one process with the envs of one worker: what the others are held against."""

from __future__ import annotations

from benchmarks.contestants import swath
from benchmarks.processes.parts import Collecting
from benchmarks.processes.workloads import ProcessWorkload
from benchmarks.replay.contestants.swath import background as background


def collect(workload: ProcessWorkload) -> Collecting:
    return Collecting(swath.build(workload.one), workload.one)
