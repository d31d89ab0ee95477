"""TorchRL's InferenceServer with its default transport."""

from __future__ import annotations

from typing import Any

from torchrl.modules.inference_server import InferenceServer

from benchmarks.inference.asking import Serving, make_policy
from benchmarks.inference.workloads import InferenceWorkload

PRELOADED = ("torchrl.modules.inference_server",)


def serving(workload: InferenceWorkload, **options: Any) -> Serving:
    if workload.in_processes:
        server = InferenceServer(policy_factory=make_policy, service_backend="process", **options)
    else:
        server = InferenceServer(make_policy(), **options)
    clients = server.clients(workload.clients)  # which have to be there before it starts
    server.start()
    return Serving(clients, server.shutdown)
