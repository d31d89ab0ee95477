"""Checkpoints on disk: how a state lies there, and how it is replaced.

A checkpoint is a JSON file, and a file with the bytes of all tensors. Loading it executes nothing.

NOTE [Checkpoints]: every save writes a new file of tensors, then a new JSON file that names it. When both are on the
disk, the JSON file takes the place of the former one in one step, and only then is what that one named removed. Whoever
fails or is killed meanwhile leaves the former checkpoint or the new one. Savers of one directory take turns, so that
none removes what another is writing. Readers do not: one that finds a file gone looks whether the JSON file names
another by now, and then begins anew. Each file has a checksum, as disks lose and change bytes without a word.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from swath.data.storage_layout import dtype_named, name_of
from swath.errors import CheckpointError
from swath.runtime.columns import array_of
from swath.runtime.memory import line_aligned

STATE_FILE = "replay_buffer.json"
FORMAT = 2
"""In format 1, each tensor had a file of its own in a folder, and there were no checksums."""
OURS = re.compile(r"replay_buffer_[0-9a-f]{16}(\.bin)?")
CRC = re.compile(rb'\{"crc": "([0-9a-f]{8})", ')
PIECE = 2**22
"""How many bytes are read or written at a time."""
SMALL = 2**20
"""Smaller tensors are copied, so that what a list holds does not hang on the file."""
WRONG_SUM = "its bytes are not those that were saved, as its checksum shows"
PATIENCE_S = 60.0
PAUSE_S = 1e-3


# -- saving ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Callable[[Any], None]]:
    """A context that gives a function to write a state with. At its end, that is what the directory `path` holds.

    What else is there stays. If the context ends with an error, all is as it was. See NOTE [Checkpoints].
    """
    path = path.resolve()
    missing = [each for each in (path, *path.parents) if not each.exists()]
    tensors = path / f"replay_buffer_{secrets.token_hex(8)}.bin"
    fresh = path / f".{STATE_FILE}.{tensors.stem}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _turn(path) as directory:
            with _new_file(tensors) as file:
                writer = _Writer(file)
                yield writer.write
            words = {"format": FORMAT, "tensors": tensors.name, **writer.words}
            body = json.dumps(words).encode()
            with _new_file(fresh) as file:
                file.write(b'{"crc": "%08x", ' % zlib.crc32(body) + body[1:])
            os.replace(fresh, path / STATE_FILE)
            _sync(directory)
            _remove_others(path, tensors.name)
    except BaseException as error:
        if _is_named(tensors.name, path):  # it was saved, and only cleaning up was not finished
            if isinstance(error, OSError):
                return
            raise
        for remove in (tensors.unlink, fresh.unlink, *(each.rmdir for each in missing)):
            with contextlib.suppress(OSError):  # most are not there, and the directories not empty
                remove()
        if isinstance(error, OSError) and error.errno is not None:
            told = f"Not saved, and what was saved before is as it was: {error.strerror}"
            raise OSError(error.errno, told, error.filename or str(tensors)) from error
        raise


class _Writer:
    """Writes tensors one behind the other, each from a line of the cache on, and the rest in words."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = self._crc = 0
        self.words: dict[str, Any] = {}

    def write(self, state: Any) -> None:
        """Write the file of tensors; what is left is in `words`."""
        words = _in_words(state, self._put)
        self.words = {"bytes": self._size, "tensors_crc": self._crc, "state": words}

    def _put(self, tensor: Tensor) -> int:
        """Where `tensor` lies in the file."""
        self._append(bytes(line_aligned(self._size) - self._size))
        begin, raw = self._size, array_of(tensor.detach().cpu().contiguous()).reshape(-1).view(np.uint8)
        for start in range(0, len(raw), PIECE):
            self._append(raw[start : start + PIECE].data)
        return begin

    def _append(self, piece: bytes | memoryview) -> None:
        self._crc = zlib.crc32(piece, self._crc)
        self._file.write(piece)
        self._size += len(piece)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that only its owner can read, and that is on the disk when the context ends."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[int]:
    """A context in which nobody else saves to the directory `path`; gives a descriptor of it."""
    directory, deadline = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), time.monotonic() + PATIENCE_S
    try:
        while True:
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"Another process has been saving to {path} for {PATIENCE_S:.0f} s.") from None
                time.sleep(PAUSE_S)
            except OSError:  # directories cannot be locked on this file system
                break
        yield directory
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(directory, fcntl.LOCK_UN)  # also if a child was forked meanwhile
        os.close(directory)


def _is_named(name: str, path: Path) -> bool:
    """Whether the checkpoint in `path` is the one whose file of tensors has that name."""
    with contextlib.suppress(OSError):
        return name.encode() in (path / STATE_FILE).read_bytes()
    return False


def _sync(directory: int) -> None:
    with contextlib.suppress(OSError):  # some file systems have nothing to do here
        os.fsync(directory)


def _remove_others(path: Path, current: str) -> None:
    """Remove what former savers have left, whether they had come to an end or not."""
    for former in path.glob("replay_buffer_*"):
        if former.name != current and OURS.fullmatch(former.name):
            if former.is_dir():
                shutil.rmtree(former, ignore_errors=True)
            else:
                former.unlink(missing_ok=True)
    for former in path.glob(f".{STATE_FILE}.replay_buffer_*"):
        former.unlink(missing_ok=True)


def _in_words(value: Any, put: Callable[[Tensor], int]) -> Any:
    """`value` in words that JSON knows, with the places of tensors that `put` has written."""
    if isinstance(value, Tensor):
        return {"tensor": put(value), "dtype": name_of(value.dtype), "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {"dict": [[_in_words(key, put), _in_words(inner, put)] for key, inner in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_in_words(inner, put) for inner in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"A {type(value).__name__} cannot be saved; only tensors, numbers, strings, dicts and lists can.")


# -- loading -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def refusing(file: Path) -> Iterator[None]:
    """A context whose errors name `file`, if they do not name one yet."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(error.errno, error.strerror, str(file)) from error
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        raise CheckpointError(f"{file} was not loaded: {reason}") from error


def load(path: Path) -> Any:
    """What was written to the directory `path`. Large tensors are mapped from the file, and read when they are used."""
    file, deadline = path / STATE_FILE, time.monotonic() + PATIENCE_S
    with refusing(file):
        while True:
            words = _read_words(file)
            named = words["folder" if words["format"] == 1 else "tensors"]
            if not OURS.fullmatch(named):
                raise ValueError(f"it names {named!r}, which is no part of a checkpoint.")
            try:
                fetch = _from_folder(path / named) if words["format"] == 1 else _from_file(path / named, words)
                return _read_back(words["state"], fetch)
            except FileNotFoundError:
                now = _read_words(file)
                if named in (now.get("folder"), now.get("tensors")) or time.monotonic() > deadline:
                    raise


def _read_words(file: Path) -> dict[str, Any]:
    raw = file.read_bytes()
    said = CRC.match(raw)
    if said and zlib.crc32(b"{" + raw[said.end() :]) != int(said[1], 16):
        raise _damaged(file, WRONG_SUM)
    words = json.loads(raw)
    if words.get("format") not in (1, FORMAT):
        raise ValueError(f"it was written in format {words.get('format')!r}; this version reads 1 and {FORMAT}.")
    if words["format"] == FORMAT and not said:
        raise _damaged(file, "it has no checksum")
    assert isinstance(words, dict)
    return words


def _from_file(file: Path, words: Mapping[str, Any]) -> Callable[[Any, int], np.ndarray]:
    """The bytes from some place on in the file of tensors, once it was found to be whole."""
    with refusing(file), open(file, "rb", buffering=0) as opened:
        size, crc, piece = os.fstat(opened.fileno()).st_size, 0, bytearray(PIECE)
        if size != words["bytes"]:
            raise _damaged(file, f"it has {size:,} bytes, and had {words['bytes']:,} when it was saved")
        while count := opened.readinto(piece):
            crc = zlib.crc32(memoryview(piece)[:count], crc)
        if crc != words["tensors_crc"]:
            raise _damaged(file, WRONG_SUM)
        raw = np.memmap(opened, np.uint8, "c") if size else np.empty(0, np.uint8)

    def fetch(begin: int, count: int) -> np.ndarray:
        if not 0 <= begin <= begin + count <= size:
            raise CheckpointError(f"{file} has no {count} bytes from {begin} on.")
        return raw[begin : begin + count]

    return fetch


def _from_folder(folder: Path) -> Callable[[Any, int], np.ndarray]:
    """The first bytes of one of the files in a folder."""

    def fetch(name: str, count: int) -> np.ndarray:
        file = folder / Path(name).name
        with refusing(file):
            if file.stat().st_size != count:
                raise _damaged(file, f"it has {file.stat().st_size:,} bytes, and had {count:,} when it was saved")
            return np.memmap(file, np.uint8, "c", shape=(count,))

    return fetch


def _read_back(words: Any, fetch: Callable[[Any, int], np.ndarray]) -> Any:
    if not isinstance(words, dict):
        return words
    if "tensor" in words:
        dtype, shape = dtype_named(words["dtype"]), tuple(words["shape"])
        if any(length < 0 for length in shape):
            raise ValueError(f"it has a tensor of shape {shape}.")
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype, device="cpu")
        tensor = torch.from_numpy(fetch(words["tensor"], size)).view(dtype).view(shape)
        return tensor.clone() if size < SMALL else tensor
    if "dict" in words:
        return {_read_back(key, fetch): _read_back(inner, fetch) for key, inner in words["dict"]}
    ((kind, inner),) = words.items()
    values = [_read_back(value, fetch) for value in inner]
    return tuple(values) if kind == "tuple" else values


def _damaged(file: Path, how: str) -> CheckpointError:
    return CheckpointError(f"{file} is damaged: {how}. Nothing of it was taken over; load another checkpoint.")
