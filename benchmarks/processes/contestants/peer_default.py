"""TorchRL as documented: SerialEnv in each worker, collectors and ParallelEnv with their defaults."""

from __future__ import annotations

from benchmarks.processes.contestants import _peer
from benchmarks.processes.parts import Collecting, Stepper, Weights
from benchmarks.processes.workloads import ProcessWorkload
from benchmarks.replay.parts import Background


def collect(workload: ProcessWorkload) -> Collecting:
    return _peer.collect(workload, *_peer.VARIANTS["default"])


def stepper(workload: ProcessWorkload) -> Stepper:
    return _peer.stepper(_peer.parallel(workload))


def background(capacity: int) -> Background:
    return _peer.background(capacity, *_peer.VARIANTS["default"])


def weights(workload: ProcessWorkload) -> Weights:
    return _peer.weights(workload)
