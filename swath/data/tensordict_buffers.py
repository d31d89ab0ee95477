"""Buffers of TensorDicts that tell where their frames lie, and buffers with priorities."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from swath.data.prioritized import PrioritizedSampler
from swath.data.replay_buffer import ReplayBuffer
from swath.data.storages import LazyTensorStorage, ListStorage, Storage
from swath.keys import as_key

INDEX = "index"


class TensorDictReplayBuffer(ReplayBuffer):
    """A buffer whose batches hold their `index` and what else the sampler tells, such as importance weights.

    Args:
        priority_key: the entry that holds priorities, in what is written and in `update_tensordict_priority`.
        options: see `ReplayBuffer`.
    """

    def __init__(self, *, priority_key: Any = "td_error", **options: Any) -> None:
        """Put the parts together."""
        super().__init__(**options)
        self.priority_key = as_key(priority_key)

    def extend(self, data: Any, *, update_priority: bool = True) -> Tensor:
        """Write a batch of frames; those that come with a priority are sampled by it from the start."""
        priority = data.get(self.priority_key, None) if isinstance(data, TensorDictBase) else None
        if isinstance(data, TensorDictBase) and INDEX in data:
            data = data.exclude(INDEX)  # it tells where the data lay elsewhere
        index = super().extend(data)
        if priority is not None and update_priority:
            self.update_priority(index, priority)
        return index

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Sample the frames of `data`, a batch of this buffer, by the priorities in it."""
        self.update_priority(data.get(INDEX), data.get(self.priority_key))

    def _finished(self, batch: Any, info: dict[str, Any]) -> Any:
        for name, value in info.items():
            told = torch.stack(value, -1) if isinstance(value, tuple) else value
            batch.set(name, told.view(*batch.batch_size, *told.shape[1:]).to(batch.device or told.device))
        return batch


class PrioritizedReplayBuffer(ReplayBuffer):
    """A buffer whose frames are sampled by their priorities.

    Args:
        alpha: how much priorities count; 0 is uniform.
        beta: how much importance weights make up for it; 1 is fully.
        eps: what is added to priorities, so that none is zero.
        storage: where frames lie; a `ListStorage` by default.
        options: see `ReplayBuffer`.
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        storage: Storage | None = None,
        **options: Any,
    ) -> None:
        """Make the sampler for the storage."""
        storage = ListStorage(1000) if storage is None else storage
        sampler = PrioritizedSampler(storage.max_size, alpha, beta, eps, dtype)
        super().__init__(storage=storage, sampler=sampler, **options)


class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """A buffer of TensorDicts whose frames are sampled by their priorities.

    Args:
        alpha: how much priorities count; 0 is uniform.
        beta: how much importance weights make up for it; 1 is fully.
        eps: what is added to priorities, so that none is zero.
        storage: where frames lie; a `LazyTensorStorage` of 1,000 by default.
        reduction: how priorities of several numbers per frame become one.
        options: see `TensorDictReplayBuffer`.
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        storage: Storage | None = None,
        reduction: str = "max",
        **options: Any,
    ) -> None:
        """Make the sampler for the storage."""
        storage = LazyTensorStorage(1000) if storage is None else storage
        sampler = PrioritizedSampler(storage.max_size, alpha, beta, eps, reduction=reduction)
        super().__init__(storage=storage, sampler=sampler, **options)
