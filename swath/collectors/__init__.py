"""The public classes: thin compositions of envs, policies and the rollout engine."""

from swath.collectors.base import BaseCollector
from swath.collectors.collector import Collector
from swath.collectors.config import CollectorConfig, PolicyVersion
from swath.collectors.minari import MinariRecorder
from swath.collectors.multi import MultiCollector
from swath.collectors.multi_async import AsyncCollector, MultiAsyncCollector
from swath.collectors.multi_config import MultiConfig
from swath.collectors.multi_sync import MultiSyncCollector
from swath.collectors.profile import ProfileConfig
from swath.collectors.workers import WorkerRestartedWarning

# Names of the founding documents.
DataCollectorBase = BaseCollector
SyncDataCollector = Collector
aSyncDataCollector = AsyncCollector  # noqa: N816
_MultiDataCollector = MultiCollector
MultiSyncDataCollector = MultiSyncCollector
MultiaSyncDataCollector = MultiAsyncCollector

__all__ = [
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "CollectorConfig",
    "DataCollectorBase",
    "MinariRecorder",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiConfig",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "PolicyVersion",
    "ProfileConfig",
    "SyncDataCollector",
    "WorkerRestartedWarning",
    "_MultiDataCollector",
    "aSyncDataCollector",
]
