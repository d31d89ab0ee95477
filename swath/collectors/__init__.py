"""The public classes: thin compositions of envs, policies and the rollout engine."""

from swath.collectors.base import BaseCollector
from swath.collectors.collector import Collector
from swath.collectors.config import CollectorConfig, PolicyVersion
from swath.collectors.minari import MinariRecorder
from swath.collectors.profile import ProfileConfig

# Names of the founding documents.
DataCollectorBase = BaseCollector
SyncDataCollector = Collector

__all__ = [
    "BaseCollector",
    "Collector",
    "CollectorConfig",
    "DataCollectorBase",
    "MinariRecorder",
    "PolicyVersion",
    "ProfileConfig",
    "SyncDataCollector",
]
