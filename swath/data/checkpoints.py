"""What is saved of a storage, and what may be loaded into one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from swath.data.ledger import Ledger
from swath.data.storage_layout import StorageLayout
from swath.data.storages import ListStorage, Storage
from swath.data.tensor_storages import TensorStorage


def storage_state(storage: Storage, copy: bool = True) -> dict[str, Any]:
    """All frames and counters of `storage`, while nobody writes; without `copy`, over its own memory."""
    used = storage.rows_used
    state: dict[str, Any] = {"ledger": storage.ledger.state_dict(), "max_size": storage.max_size, "rows": used}
    if isinstance(storage, ListStorage):
        seams = torch.from_numpy(storage.seams[:used].copy())
        return {**state, "items": [_plain(item, copy) for item in storage.items[:used]], "seams": seams}
    assert isinstance(storage, TensorStorage)
    if storage.layout is None:
        return {**state, "layout": None}
    lanes = storage.layout.lanes
    tensors = [
        torch.from_numpy(storage.ledger.stamps[:used]),
        torch.from_numpy(storage.seams.reshape(lanes, -1)[:, :used]),
        *storage.view().values(),
    ]
    return {**state, "layout": storage.layout.to_json(), "tensors": [t.clone() if copy else t for t in tensors]}


def load_storage_state(storage: Storage, state: Mapping[str, Any]) -> None:
    """Hold what was saved, while nobody writes. What does not fit is refused, and then nothing has changed.

    If it is interrupted when it has begun to change something, the storage is empty.
    """
    if state["max_size"] != storage.max_size:
        raise ValueError(
            f"The saved buffer has max_size={state['max_size']} and this one {storage.max_size}: they must be the same."
        )
    if ("items" in state) != isinstance(storage, ListStorage):
        raise ValueError(
            f"What was saved cannot be held by a {type(storage).__name__}: it was another kind of storage."
        )
    if isinstance(storage, ListStorage):
        _load_items(storage, state)
    elif state["layout"] is not None:
        assert isinstance(storage, TensorStorage)
        _load_tensors(storage, state)
    else:
        storage.forget_sources()
        if storage.is_ready:
            storage.ledger.clear()


def _load_items(storage: ListStorage, state: Mapping[str, Any]) -> None:
    used = _rows_used(state, storage.max_size)
    items, seams = [_restored(item) for item in state["items"]], state["seams"]
    if len(items) != used:
        raise ValueError(f"{len(items)} items were saved, and should be {used}.")
    _check("seams", seams, (used,), torch.bool)
    storage.forget_sources()
    storage.ledger.clear()
    storage.items[:] = items
    storage.seams[:used] = seams.numpy()
    positions = np.arange(state["ledger"]["origin"], state["ledger"]["head"])[-storage.max_size :]
    storage.ledger.stamps[positions % storage.max_size] = positions + 1
    storage.ledger.load_state_dict(state["ledger"])


def _load_tensors(storage: TensorStorage, state: Mapping[str, Any]) -> None:
    layout = StorageLayout.from_json(state["layout"])
    if len(layout.dims) + 1 != storage.ndim or layout.lanes < 1 or layout.rows != storage.max_size // layout.lanes:
        raise ValueError(
            f"The saved buffer has {layout.rows} rows in {len(layout.dims) + 1} dimensions, which do not fit into this "
            f"one of max_size={storage.max_size} and ndim={storage.ndim}."
        )
    ours = storage.layout if storage.is_ready else None
    if ours is not None and (ours.leaves, ours.dims) != (layout.leaves, layout.dims):
        raise ValueError("The saved buffer has other entries than this one, or other shapes or types of them.")
    used = _rows_used(state, layout.rows)
    stamps, seams, *columns = state["tensors"]
    _check("stamps", stamps, (used,), torch.int64)
    _check("seams", seams, (layout.lanes, used), torch.bool)
    for (key, leaf), column in zip(layout.leaves.items(), columns, strict=True):
        _check(repr(key), column, (*layout.dims, used, *leaf.shape), leaf.dtype)
    if ours is not None:
        storage.make_room(used)
    else:
        storage.lay_out(layout, used)
    storage.forget_sources()
    storage.ledger.clear()
    for target, saved in zip(storage.view(used).values(), columns, strict=True):
        target.copy_(saved)
    storage.seams.reshape(layout.lanes, -1)[:, :used] = seams.numpy()
    storage.ledger.stamps[:used] = stamps.numpy()
    storage.ledger.load_state_dict(state["ledger"])


def _rows_used(state: Mapping[str, Any], capacity: int) -> int:
    """How many rows were used, if the counters of a saved state are such as there can be."""
    counters = Ledger.checked_state(state["ledger"])
    used = min(counters["head"] - counters["origin"], capacity)
    if used < 0 or used != state["rows"] or counters["origin"] % capacity:
        raise ValueError(f"The saved counters {counters} are not those of {state['rows']} rows among {capacity}.")
    return used


def _check(name: str, saved: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if (saved.shape, saved.dtype) != (shape, dtype):
        raise ValueError(
            f"{name} was saved as {saved.dtype} of shape {tuple(saved.shape)}, and should be {dtype} of {shape}."
        )


def _plain(item: Any, copy: bool) -> Any:
    """An item of a list without classes of others: what can be saved and loaded safely."""
    if copy and isinstance(item, TensorDictBase | Tensor):
        item = item.clone()
    if isinstance(item, TensorDictBase):
        return {"tensordict": item.to_dict(), "batch_size": list(item.batch_size)}
    return {"item": item}


def _restored(item: Mapping[str, Any]) -> Any:
    return TensorDict(item["tensordict"], item["batch_size"]) if "tensordict" in item else item["item"]
