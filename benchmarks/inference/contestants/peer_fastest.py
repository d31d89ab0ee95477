"""TorchRL's InferenceServer with the fastest of its transports: slots of fixed layout."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.inference.asking import Serving
from benchmarks.inference.contestants import peer_default
from benchmarks.inference.workloads import INPUTS, OUTPUTS, InferenceWorkload

PRELOADED = peer_default.PRELOADED


def serving(workload: InferenceWorkload) -> Serving:
    options: dict[str, Any] = {"transport": "direct"}
    if workload.in_processes:
        version = torch.zeros((), dtype=torch.int64)
        options = {
            "transport": "process_slot",
            "request_spec": TensorDict({"observation": torch.zeros(INPUTS)}),
            "response_spec": TensorDict({"action": torch.zeros(OUTPUTS), "policy_version": version}),
        }
    return peer_default.serving(workload, num_clients=workload.clients, **options)
