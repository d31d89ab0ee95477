"""TorchRL with the fastest settings found that still deliver the agreed content.

Tried with `python -m benchmarks.peer_settings W4 W6m`: frames/s, each column the medians of one sitting on two cores
that were busy with other work, so compare within a column.

| setting                                             | W4    | W6m   |
|-----------------------------------------------------|-------|-------|
| default: SerialEnv of eight                         | 1,177 | 1,123 |
| SyncVectorEnv wrapped, `trust_policy=True`          | 2,170 | 1,655 |
| the same, `cat_results=0`                           | 2,170 | 1,751 |
| the same, `use_buffers=False`                       | 2,054 | 1,434 |
| the same, `compile_policy=True`                     | 3,000 | 1,776 |

It has no `track_traj_ids=False` for several workers, and MultiSyncCollector reads the ids. The background is not
compiled, as in W9a. ParallelEnv: one vector env in each of two processes instead of one env in each of eight.
"""

from __future__ import annotations

from benchmarks.processes.contestants import _peer
from benchmarks.processes.parts import Collecting, Stepper
from benchmarks.processes.workloads import ProcessWorkload
from benchmarks.replay.parts import Background


def collect(workload: ProcessWorkload) -> Collecting:
    return _peer.collect(workload, *_peer.VARIANTS["vector, trust policy, compiled"])


def stepper(workload: ProcessWorkload) -> Stepper:
    return _peer.stepper(_peer.packed(workload))


def background(capacity: int) -> Background:
    return _peer.background(capacity, *_peer.VARIANTS["vector, trust policy"])
