"""Collectors with workers on other machines."""

from swath.collectors.distributed.classes import DistributedCollector, DistributedSyncCollector, RPCCollector
from swath.collectors.distributed.ray_collector import RayCollector
from swath.collectors.distributed.slurm_jobs import submitit_delayed_launcher

# Names of the oldest API.
DistributedDataCollector = DistributedCollector
DistributedSyncDataCollector = DistributedSyncCollector
RPCDataCollector = RPCCollector

__all__ = [
    "DistributedCollector",
    "DistributedDataCollector",
    "DistributedSyncCollector",
    "DistributedSyncDataCollector",
    "RPCCollector",
    "RPCDataCollector",
    "RayCollector",
    "submitit_delayed_launcher",
]
