"""Collectors with workers on other machines."""

from swath.collectors.distributed.classes import DistributedCollector, DistributedSyncCollector
from swath.collectors.distributed.slurm_jobs import submitit_delayed_launcher

__all__ = ["DistributedCollector", "DistributedSyncCollector", "submitit_delayed_launcher"]
