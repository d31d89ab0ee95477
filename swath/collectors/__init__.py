"""The public classes: thin compositions of envs, policies and the rollout engine."""

from swath.collectors.async_batched import AsyncBatchedCollector, AsyncBatchedConfig
from swath.collectors.collector import Collector
from swath.collectors.config import CollectorConfig, PolicyVersion
from swath.collectors.multi import AsyncCollector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from swath.collectors.multi_config import MultiConfig
from swath.collectors.profile import ProfileConfig
from swath.collectors.surface import BaseCollector
from swath.errors import WorkerRestartedWarning

# Names of the founding documents.
DataCollectorBase = BaseCollector
SyncDataCollector = Collector
aSyncDataCollector = AsyncCollector  # noqa: N816
_MultiDataCollector = MultiCollector
MultiSyncDataCollector = MultiSyncCollector
MultiaSyncDataCollector = MultiAsyncCollector

__all__ = [
    "AsyncBatchedCollector",
    "AsyncBatchedConfig",
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "CollectorConfig",
    "DataCollectorBase",
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
