"""Collectors with workers on other machines."""

from swath.collectors.distributed.classes import DistributedCollector, DistributedSyncCollector
from swath.collectors.distributed.ray_collector import RayCollector

__all__ = ["DistributedCollector", "DistributedSyncCollector", "RayCollector"]
