"""Checkpoints of buffers: what is saved, and how it lies on disk.

A checkpoint is a directory with one JSON file and the raw bytes of each tensor. Loading it executes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from swath.data.layout import Layout, array_of, dtype_named, name_of
from swath.data.storages import ListStorage, Storage, TensorStorage

STATE_FILE = "state.json"
FORMAT = 1


def storage_state(storage: Storage, copy: bool = True) -> dict[str, Any]:
    """All frames and counters of `storage`, while nobody writes; without `copy`, over its own memory."""
    used = storage.rows_used
    state: dict[str, Any] = {"ledger": storage.ledger.state_dict(), "max_size": storage.max_size, "rows": used}
    if isinstance(storage, ListStorage):
        return {**state, "items": [_plain(item) for item in storage.items[:used]]}
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
    """Hold what was saved, while nobody writes."""
    if state["max_size"] != storage.max_size:
        raise ValueError(
            f"The saved buffer has max_size={state['max_size']} and this one {storage.max_size}: they must be the same."
        )
    if ("items" in state) != isinstance(storage, ListStorage):
        raise ValueError(
            f"What was saved cannot be held by a {type(storage).__name__}: it was another kind of storage."
        )
    used = state["rows"]
    if isinstance(storage, ListStorage):
        storage.items[:] = [_restored(item) for item in state["items"]]
        storage.ledger.load_state_dict(state["ledger"])
        positions = np.arange(storage.ledger.first, storage.ledger.head)
        storage.ledger.stamps[:] = 0
        storage.ledger.stamps[positions % storage.max_size] = positions + 1
        return
    assert isinstance(storage, TensorStorage)
    if state["layout"] is None:
        if storage.is_ready:
            storage.ledger.clear()
        return
    _load_tensors(storage, Layout.from_json(state["layout"]), state["tensors"], used)
    storage.ledger.load_state_dict(state["ledger"])


def _load_tensors(storage: TensorStorage, layout: Layout, tensors: list[Tensor], used: int) -> None:
    if storage.is_ready and storage.layout is not None:
        if (storage.layout.leaves, storage.layout.dims) != (layout.leaves, layout.dims):
            raise ValueError("The saved buffer has other entries than this one, or other shapes or types of them.")
    else:
        storage.lay_out(layout)
    stamps, seams, *columns = tensors
    storage.ledger.stamps[:] = 0
    storage.ledger.stamps[:used] = stamps.numpy()
    storage.seams.reshape(layout.lanes, -1)[:, :used] = seams.numpy()
    for target, saved in zip(storage.view(used).values(), columns, strict=True):
        target.copy_(saved)


# -- on disk -----------------------------------------------------------------------------------------------------


def dump(state: Any, path: Path) -> None:
    """Write `state` to the directory `path`, replacing what is there once everything is written."""
    fresh, former = _beside(path, "new"), _beside(path, "old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700, parents=True)
    files: list[str] = []
    words = {"format": FORMAT, "state": _told(state, fresh, files)}
    (fresh / STATE_FILE).write_text(json.dumps(words))
    shutil.rmtree(former, ignore_errors=True)
    if path.exists():
        os.rename(path, former)
    os.rename(fresh, path)
    shutil.rmtree(former, ignore_errors=True)


def load(path: Path) -> Any:
    """What `dump` has written. Tensors are mapped from the files, and read when they are used."""
    if not path.exists() and _beside(path, "old").exists():  # killed between two renames
        path = _beside(path, "old")
    words = json.loads((path / STATE_FILE).read_text())
    if words.get("format") != FORMAT:
        raise ValueError(f"{path} was written in format {words.get('format')!r}; this version reads {FORMAT}.")
    return _understood(words["state"], path)


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}")


def _told(value: Any, folder: Path, files: list[str]) -> Any:
    """`value` in words that JSON knows, with tensors in files of their own."""
    if isinstance(value, Tensor):
        name = f"{len(files):04d}.bin"
        files.append(name)
        array_of(value.detach().cpu().contiguous()).tofile(folder / name)
        return {"tensor": name, "dtype": name_of(value.dtype), "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {"dict": [[_told(key, folder, files), _told(inner, folder, files)] for key, inner in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_told(inner, folder, files) for inner in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"A {type(value).__name__} cannot be saved; only tensors, numbers, strings, dicts and lists can.")


def _understood(words: Any, folder: Path) -> Any:
    if not isinstance(words, dict):
        return words
    if "tensor" in words:
        dtype, shape = dtype_named(words["dtype"]), tuple(words["shape"])
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        raw = np.memmap(folder / Path(words["tensor"]).name, np.uint8, "c", shape=(size,))
        return torch.from_numpy(raw).view(dtype).view(shape)
    if "dict" in words:
        return {_understood(key, folder): _understood(inner, folder) for key, inner in words["dict"]}
    ((kind, inner),) = words.items()
    values = [_understood(value, folder) for value in inner]
    return tuple(values) if kind == "tuple" else values


def _plain(item: Any) -> Any:
    """An item of a list without classes of others: what can be saved and loaded safely."""
    if isinstance(item, TensorDictBase):
        return {"tensordict": item.to_dict(), "batch_size": list(item.batch_size)}
    return {"item": item}


def _restored(item: Mapping[str, Any]) -> Any:
    return TensorDict(item["tensordict"], item["batch_size"]) if "tensordict" in item else item["item"]
