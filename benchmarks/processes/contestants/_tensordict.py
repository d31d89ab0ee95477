"""What swath and the peer share: batches of several workers as the checks want them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from benchmarks.contestants._tensordict import run_collector
from benchmarks.processes.parts import Collecting, Weights
from benchmarks.processes.workloads import ProcessWorkload


def collecting(
    collector: Any, net: nn.Module, workload: ProcessWorkload, close: Callable[[], None] | None = None
) -> Collecting:
    run = run_collector(iter(collector), net, close or collector.shutdown)
    return Collecting(run, workload.whole, joined=workload.sync)


def weights(collector: Any, net: nn.Module, close: Callable[[], None] | None = None) -> Weights:
    batches = iter(collector)

    def actions() -> Any:
        data: TensorDictBase = next(batches)
        return data["action"]

    return Weights(net, actions, collector.update_policy_weights_, close or collector.shutdown)
