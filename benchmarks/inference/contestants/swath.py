"""swath's InferenceServer."""

from __future__ import annotations

from benchmarks.inference.asking import Serving, make_policy
from benchmarks.inference.workloads import InferenceWorkload
from swath.modules import InferenceServer

PRELOADED = ("swath.modules",)


def serving(workload: InferenceWorkload) -> Serving:
    server = InferenceServer(policy_factory=make_policy, backend="process" if workload.in_processes else "thread")
    server.start()
    return Serving(server.clients(workload.clients), server.shutdown)
