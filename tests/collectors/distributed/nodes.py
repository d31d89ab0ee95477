"""Collectors whose workers are collectors: nodes without a network, behind any carrier."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from socket_carrier import SocketCarrier

from swath.collectors import MultiAsyncCollector, MultiConfig, MultiSyncCollector
from swath.collectors.distributed.inside import Inside
from swath.collectors.multi import MultiCollector
from swath.collectors.worker import FIELDS, EngineTask
from swath.runtime.carrier import Carrier, Task
from swath.testing import CountingEnv


@dataclass(frozen=True)
class NodesConfig(MultiConfig):
    _: KW_ONLY
    collector_class: Any = "single"
    num_workers_per_collector: int = 1
    collector_kwargs: dict[str, Any] | None = None
    sockets: bool = True

    without_effect: ClassVar[tuple[str, ...]] = ()

    def task_of(self, task: EngineTask) -> Task:
        inside = Inside(self.collector_class, self.num_workers_per_collector, self.collector_kwargs or {})
        return inside.task(task, self.supervision)


def carrier_of(self: MultiCollector, config: Any) -> Carrier:
    return SocketCarrier(config.workers, FIELDS) if config.sockets else MultiCollector.make_carrier(self, config)


class SyncNodes(MultiSyncCollector):
    config_class = NodesConfig
    make_carrier = carrier_of


class AsyncNodes(MultiAsyncCollector):
    config_class = NodesConfig
    make_carrier = carrier_of


class Pids(CountingEnv):
    """Tells which process it is in."""

    @property
    def pid(self) -> int:
        return os.getpid()


def counting(lanes: int = 2, lengths: Any = 5, **options: Any) -> Callable[[], Pids]:
    return lambda: Pids((lanes,) if lanes else (), lengths=lengths, **options)
