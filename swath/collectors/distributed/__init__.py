"""Collectors with workers on other machines."""

from swath.collectors.distributed.classes import DistributedCollector, DistributedSyncCollector
from swath.collectors.distributed.ray_collector import RayCollector
from swath.collectors.distributed.slurm_jobs import submitit_delayed_launcher

# Names of the oldest API.
DistributedDataCollector = DistributedCollector
DistributedSyncDataCollector = DistributedSyncCollector

__all__ = [
    "DistributedCollector",
    "DistributedDataCollector",
    "DistributedSyncCollector",
    "DistributedSyncDataCollector",
    "RayCollector",
    "submitit_delayed_launcher",
]
