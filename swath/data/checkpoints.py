"""Checkpoints of buffers: what is saved, and how it lies on disk.

A checkpoint is a JSON file, and a folder with the raw bytes of each tensor. Loading it executes nothing.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from swath.data.storage_layout import StorageLayout, dtype_named, name_of
from swath.data.storages import ListStorage, Storage
from swath.data.tensor_storages import TensorStorage
from swath.runtime.columns import array_of

STATE_FILE = "replay_buffer.json"
FOLDER = "replay_buffer_"
FORMAT = 1


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
    storage.forget_sources()
    if isinstance(storage, ListStorage):
        storage.items[:] = [_restored(item) for item in state["items"]]
        storage.seams[:used] = state["seams"].numpy()
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
    _load_tensors(storage, StorageLayout.from_json(state["layout"]), state["tensors"], used)
    storage.ledger.load_state_dict(state["ledger"])


def _load_tensors(storage: TensorStorage, layout: StorageLayout, tensors: list[Tensor], used: int) -> None:
    if len(layout.dims) + 1 != storage.ndim or layout.rows != storage.max_size // max(layout.lanes, 1):
        raise ValueError(
            f"The saved buffer has {layout.rows} rows in {len(layout.dims) + 1} dimensions, which do not fit into this "
            f"one of max_size={storage.max_size} and ndim={storage.ndim}."
        )
    if storage.is_ready and storage.layout is not None:
        if (storage.layout.leaves, storage.layout.dims) != (layout.leaves, layout.dims):
            raise ValueError("The saved buffer has other entries than this one, or other shapes or types of them.")
        storage.make_room(used)
    else:
        storage.lay_out(layout, used)
    stamps, seams, *columns = tensors
    storage.ledger.stamps[: max(used, storage.rows_used)] = 0
    storage.ledger.stamps[:used] = stamps.numpy()
    storage.seams.reshape(layout.lanes, -1)[:, :used] = seams.numpy()
    for target, saved in zip(storage.view(used).values(), columns, strict=True):
        target.copy_(saved)


# -- on disk -----------------------------------------------------------------------------------------------------


def dump(state: Any, path: Path) -> None:
    """Write `state` to the directory `path`, beside what else is there.

    Tensors go to a new folder in it; then one file, which names the folder, is replaced in one step, and the folder
    that it named before is removed. Whoever is killed meanwhile leaves the former state, or the new one.
    """
    path = path.resolve()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path / f"{FOLDER}{secrets.token_hex(8)}"
    folder.mkdir(mode=0o700)
    files: list[str] = []
    words = {"format": FORMAT, "folder": folder.name, "state": _in_words(state, folder, files)}
    fresh = path / f".{STATE_FILE}.{folder.name}"
    fresh.write_text(json.dumps(words))
    os.replace(fresh, path / STATE_FILE)
    for former in path.glob(f"{FOLDER}*"):
        if former != folder and _is_ours(former.name):
            shutil.rmtree(former, ignore_errors=True)
    for former in path.glob(f".{STATE_FILE}.{FOLDER}*"):
        former.unlink(missing_ok=True)


def load(path: Path) -> Any:
    """What `dump` has written. Tensors are mapped from the files, and read when they are used."""
    words = json.loads((path / STATE_FILE).read_text())
    if words.get("format") != FORMAT:
        raise ValueError(f"{path} was written in format {words.get('format')!r}; this version reads {FORMAT}.")
    if not _is_ours(words["folder"]):
        raise ValueError(f"{path / STATE_FILE} names the folder {words['folder']!r}, which is none of a checkpoint.")
    return _read_back(words["state"], path / words["folder"])


def _is_ours(name: str) -> bool:
    return re.fullmatch(f"{FOLDER}[0-9a-f]{{16}}", name) is not None


def _in_words(value: Any, folder: Path, files: list[str]) -> Any:
    """`value` in words that JSON knows, with tensors in files of their own."""
    if isinstance(value, Tensor):
        name = f"{len(files):04d}.bin"
        files.append(name)
        array_of(value.detach().cpu().contiguous()).tofile(folder / name)
        return {"tensor": name, "dtype": name_of(value.dtype), "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {
            "dict": [[_in_words(key, folder, files), _in_words(inner, folder, files)] for key, inner in value.items()]
        }
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_in_words(inner, folder, files) for inner in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"A {type(value).__name__} cannot be saved; only tensors, numbers, strings, dicts and lists can.")


def _read_back(words: Any, folder: Path) -> Any:
    if not isinstance(words, dict):
        return words
    if "tensor" in words:
        dtype, shape = dtype_named(words["dtype"]), tuple(words["shape"])
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype, device="cpu")
        raw = np.memmap(folder / Path(words["tensor"]).name, np.uint8, "c", shape=(size,))
        return torch.from_numpy(raw).view(dtype).view(shape)
    if "dict" in words:
        return {_read_back(key, folder): _read_back(inner, folder) for key, inner in words["dict"]}
    ((kind, inner),) = words.items()
    values = [_read_back(value, folder) for value in inner]
    return tuple(values) if kind == "tuple" else values


def _plain(item: Any, copy: bool) -> Any:
    """An item of a list without classes of others: what can be saved and loaded safely."""
    if copy and isinstance(item, TensorDictBase | Tensor):
        item = item.clone()
    if isinstance(item, TensorDictBase):
        return {"tensordict": item.to_dict(), "batch_size": list(item.batch_size)}
    return {"item": item}


def _restored(item: Mapping[str, Any]) -> Any:
    return TensorDict(item["tensordict"], item["batch_size"]) if "tensordict" in item else item["item"]
