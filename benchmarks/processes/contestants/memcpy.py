"""The floor of new weights: their bytes copied once.

As for the others, the weights have just been changed, and since the last copy a batch's worth of other memory has gone
through the caches; a copy that is repeated with nothing in between would take half the time.
"""

from __future__ import annotations

import torch

from benchmarks.processes.parts import Weights
from benchmarks.processes.workloads import ProcessWorkload

_OTHER_BYTES = 1 << 26


def weights(workload: ProcessWorkload) -> Weights:
    net = workload.one.make_net()
    parameters = list(net.parameters())
    source = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, part in zip(parameters, source.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view(parameter.shape)
    target = torch.empty_like(source)
    other = torch.zeros(_OTHER_BYTES, dtype=torch.uint8)

    def actions() -> torch.Tensor:
        other.add_(1)
        # nobody collects: what the check reads is the parameter that it has set, out of the copy
        return target[-parameters[-1].numel() :].argmax().view(1)

    return Weights(net, actions, lambda: target.copy_(source), lambda: None)
