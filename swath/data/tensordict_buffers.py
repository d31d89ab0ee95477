"""Buffers of TensorDicts that say where their frames lie, and buffers with priorities."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from swath.data.forms import Entries
from swath.data.prioritized import SAME_WEIGHT, WEIGHT, PrioritizedSampler
from swath.data.replay_buffer import DEFAULT_SIZE, ReplayBuffer
from swath.data.storages import ListStorage, Storage, created
from swath.data.tensor_storages import LazyTensorStorage
from swath.keys import as_key

INDEX = "index"


class TensorDictReplayBuffer(ReplayBuffer):
    """A buffer whose batches hold their `index` and what else the sampler says, such as importance weights.

    Args:
        priority_key: the entry that holds priorities, in what is written and in `update_tensordict_priority`.
        options: see `ReplayBuffer`.
    """

    def __init__(self, *misplaced: NoReturn, priority_key: Any = "td_error", **options: Any) -> None:
        super().__init__(*misplaced, **options)
        self.priority_key = as_key(priority_key)

    def add(self, data: Any) -> Any:
        """Write one frame; with a priority in it, it is sampled by that from the start."""
        return super().add(_without_index(data))

    def extend(
        self, data: Any, *, update_priority: bool = True, source: Any = None, seams: np.ndarray | None = None
    ) -> Tensor:
        """Write a batch of frames; those that come with a priority are sampled by it from the start."""
        return self._extend(_without_index(data), source=source, seams=seams, update_priority=update_priority)

    def write(self, entries: Entries, shape: Sequence[int], *, update_priority: bool = True, **options: Any) -> Tensor:
        """Write tensors by key; see `ReplayBuffer.write`."""
        index = super().write(entries, shape, **options)
        if update_priority and self.priority_key in entries and isinstance(self.sampler, PrioritizedSampler):
            priority = entries[self.priority_key]  # [*lanes, rows, ...]
            self.update_priority(index, priority.movedim(len(shape) - 1, 0).flatten(0, len(shape) - 1))
        return index

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Sample the frames of `data`, a batch of this buffer, by the priorities in it.

        Without effect for samplers that have no priorities.
        """
        if not isinstance(self.sampler, PrioritizedSampler):
            return
        index, priority = data.get(INDEX, None), data.get(self.priority_key, None)
        if index is None:
            raise KeyError(f"The batch has no {INDEX!r}: is it one that this buffer gave?")
        if data.ndim > 1:  # each frame is a batch itself, all of which has one index
            index = index.flatten(1, data.ndim - 1)[:, 0]
        if priority is None:
            warnings.warn(
                f"The batch has no {self.priority_key!r}, by which its frames are to be sampled; they get the priority "
                f"of new ones. Write batch[{self.priority_key!r}] = ... before, or name another entry with "
                "priority_key=.",
                stacklevel=2,
            )
            priority = torch.tensor(self.sampler.default_priority, device="cpu")
        self.update_priority(index, priority)

    def _completed(self, batch: Any, info: dict[Any, Any]) -> Any:
        if not isinstance(batch, TensorDictBase):
            return batch
        for name, value in info.items():
            if not isinstance(name, str):
                continue  # an entry of the batch that was replaced
            entry = torch.stack(value, -1) if isinstance(value, tuple) else value
            entry = entry.to(batch.device or entry.device)
            if batch.ndim > 1:  # one for each frame, also where frames are batches themselves
                entry = entry.view(len(entry), *(1,) * (batch.ndim - 1), *entry.shape[1:])
                entry = entry.expand(*batch.shape, *entry.shape[batch.ndim :])
            batch.set(name, entry)
        return batch


class PrioritizedReplayBuffer(ReplayBuffer):
    """A buffer whose frames are sampled by their priorities; its storage is a `ListStorage` of 1,000 by default.

    `alpha`, `beta`, `eps` and `dtype` are those of `PrioritizedSampler`; for the others see `ReplayBuffer`. `sync` and
    `sampler_device` are there for TorchRL, and change nothing.
    """

    def __init__(
        self,
        *misplaced: NoReturn,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        storage: Storage | Callable[[], Storage] | None = None,
        sync: Any = None,
        sampler_device: Any = None,
        **options: Any,
    ) -> None:
        kept: Storage = created("storage", storage, Storage, lambda: ListStorage(DEFAULT_SIZE))
        sampler = PrioritizedSampler(kept.max_size, alpha, beta, eps, dtype)
        super().__init__(*misplaced, storage=kept, sampler=sampler, **options)


class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """A buffer of TensorDicts whose frames are sampled by their priorities; a `LazyTensorStorage` of 1,000 by default.

    `alpha`, `beta`, `eps` and `reduction` are those of `PrioritizedSampler`; for the others see
    `TensorDictReplayBuffer`. `sync` and `sampler_device` are there for TorchRL, and change nothing.
    """

    def __init__(
        self,
        *misplaced: NoReturn,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        storage: Storage | Callable[[], Storage] | None = None,
        reduction: str = "max",
        sync: Any = None,
        sampler_device: Any = None,
        **options: Any,
    ) -> None:
        kept: Storage = created("storage", storage, Storage, lambda: LazyTensorStorage(DEFAULT_SIZE))
        sampler = PrioritizedSampler(kept.max_size, alpha, beta, eps, reduction=reduction)
        super().__init__(*misplaced, storage=kept, sampler=sampler, **options)


def _without_index(data: Any) -> Any:
    """`data` without the entries that say where and how likely they were elsewhere."""
    names = (INDEX, WEIGHT, SAME_WEIGHT)
    return data.exclude(*names) if isinstance(data, TensorDictBase) and any(name in data for name in names) else data
