"""Collectors with workers on other machines."""

from swath.collectors.distributed.classes import DistributedCollector, DistributedSyncCollector

# Names of the oldest API.
DistributedDataCollector = DistributedCollector
DistributedSyncDataCollector = DistributedSyncCollector

__all__ = [
    "DistributedCollector",
    "DistributedDataCollector",
    "DistributedSyncCollector",
    "DistributedSyncDataCollector",
]
