"""TorchRL's default, its workers forked: they inherit what is imported, which a spawned one imports anew."""

from __future__ import annotations

import torch.multiprocessing

from benchmarks.processes.contestants import _peer
from benchmarks.processes.parts import Collecting
from benchmarks.processes.workloads import ProcessWorkload


def collect(workload: ProcessWorkload) -> Collecting:
    torch.multiprocessing.set_start_method("fork", force=True)
    return _peer.collect(workload, *_peer.VARIANTS["default"])
