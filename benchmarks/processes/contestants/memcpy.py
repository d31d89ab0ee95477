"""The floor of new weights: their bytes copied once, where swath publishes them.

Batches of swath's workers go by between two copies, as for swath itself: they leave caches cold, and a copy takes
about twice as long as one that is repeated with nothing in between.
"""

from __future__ import annotations

import torch

from benchmarks.processes.contestants import swath
from benchmarks.processes.parts import Weights
from benchmarks.processes.workloads import ProcessWorkload


def weights(workload: ProcessWorkload) -> Weights:
    there = swath.weights(workload)
    parameters = list(there.net.parameters())
    source = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, part in zip(parameters, source.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view(parameter.shape)
    target = torch.zeros_like(source)

    def actions() -> torch.Tensor:
        there.update()  # so that workers do what they do for swath
        return there.actions()

    return Weights(there.net, actions, lambda: target.copy_(source), there.close)
