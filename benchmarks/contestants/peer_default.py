"""TorchRL as documented: a GymEnv, or a SerialEnv of them, and a Collector with its defaults."""

from __future__ import annotations

from benchmarks.batch import Run
from benchmarks.contestants._peer import build_variant
from benchmarks.workloads import Workload


def build(workload: Workload) -> Run:
    return build_variant(workload, "default")
