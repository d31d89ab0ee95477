"""Collectors with workers on other machines."""

from swath.collectors.distributed.classes import DistributedCollector, DistributedSyncCollector, RPCCollector

__all__ = ["DistributedCollector", "DistributedSyncCollector", "RPCCollector"]
