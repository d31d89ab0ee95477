"""Snapshots: numbered copies of named tensors that one side publishes and others take.

NOTE [Snapshots]: the trainer publishes weights, workers adopt them, and neither waits for the other. There are a few
copies of the tensors in the memory, written in turn. A copy's stamp is the version that it holds, or `UNFINISHED` while
it is written; `newest` points to the copy that was finished last. A worker takes the newest copy and looks at its stamp
again: if that has changed, the trainer has come round all the copies meanwhile, and it takes the newest again before it
acts. So weights are adopted whole, a trainer that is killed while it publishes leaves the former version in place, and
a worker that is stopped or dead concerns nobody. What is published is a copy: what the trainer does to its own tensors
afterwards is seen by no worker.

What belongs together may lie in several stores. So a version is *released* when all of it is written, in all stores,
whether they have got anything new or not, and a worker takes of each the newest of those that all of them have
released: all of a publication, or nothing. The copy that was released last is not the one that is written next.

This relies on stores to memory becoming visible in order. Where the machine does not keep it (`ordering`), both sides
do what they do under a lock that the memory's processes share.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from swath.errors import DoesNotFitError
from swath.runtime import ordering
from swath.runtime.columns import Columns, Leaf, nbytes
from swath.runtime.locks import ProcessLock
from swath.runtime.memory import Block, MemoryBlock, PrivateBlock, page_aligned

COPIES = 3
UNFINISHED = -1
NEWEST, RELEASED, STAMPS, EXTRAS = 0, 1, 2, 2 + COPIES
"""Where numbers lie in the head: the newest copy, up to which version copies may be taken, the copies' stamps, and the
sizes of their extra values."""
HEAD = page_aligned((EXTRAS + COPIES) * 8)
EXTRA_ROOM = 4096

Values = Mapping[str, Any]
"""Tensors, and extra values that can be pickled, by name."""


@dataclass(frozen=True)
class SnapshotContents:
    """What snapshots hold: tensors by name, the names of extra values, and how many bytes those may take."""

    tensors: Mapping[str, Leaf]
    extras: tuple[str, ...] = ()
    extra_room: int = EXTRA_ROOM


class SnapshotStore(Protocol):
    """Where snapshots are published."""

    contents: SnapshotContents

    @property
    def version(self) -> int:
        """The newest version; -1 before the first."""

    def publish(self, values: Values, version: int, *, releases: bool = True) -> None:
        """Make `values` the newest; those that are not given stay as they are. Never waits for a worker.

        By one thread at a time. Unless it `releases` them, nobody takes them before somebody does.
        """

    def release(self, version: int) -> None:
        """Let versions up to this be taken."""

    def snapshot(self) -> dict[str, Any]:
        """The newest values, copied."""


class Snapshots:
    """The one implementation in memory: shared between processes, or private to one with several threads."""

    def __init__(self, contents: SnapshotContents, block: Block | None = None, *, private: bool = False) -> None:
        """Make room for `contents`, in new memory unless it lies in `block`; nothing is published yet."""
        self.contents = contents
        count = len(contents.tensors)
        self._extras_at = nbytes(contents.tensors, ())
        self._size = page_aligned(self._extras_at + contents.extra_room)
        end = HEAD + COPIES * self._size
        self._block = block or (PrivateBlock if private else MemoryBlock)(end + COPIES * count)
        self._head = self._block.array((EXTRAS + COPIES,), np.int64)
        begins = [HEAD + copy * self._size for copy in range(COPIES)]
        self._copies = [self._block.array((self._size,), np.uint8, begin) for begin in begins]
        self._views = [Columns(contents.tensors, (), block=self._block, offset=begin).tensors for begin in begins]
        self._given = self._block.array((COPIES, count), np.uint8, end)
        """Which tensors each copy holds: those that were never published are left to the workers."""
        self._lock: AbstractContextManager[Any] = nullcontext()
        if not ordering.keeps_order() and self._block.fd >= 0:
            self._lock = ProcessLock(self._block)
        if block is None:
            self._head[RELEASED : STAMPS + COPIES] = UNFINISHED
            for memory in self._copies:
                memory.fill(0)  # so that the first updates need not wait for pages

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.contents, self._block)

    @property
    def version(self) -> int:  # noqa: D102 - see `SnapshotStore`
        return int(self._head[STAMPS + self._head[NEWEST]])

    @property
    def released(self) -> int:
        """Up to which version copies may be taken."""
        with self._lock:
            return int(self._head[RELEASED])

    def release(self, version: int) -> None:  # noqa: D102 - see `SnapshotStore`
        with self._lock:
            self._head[RELEASED] = version

    def publish(self, values: Values, version: int, *, releases: bool = True) -> None:  # noqa: D102 - likewise
        with self._lock:
            self._publish(values, version)
        if releases:
            self.release(version)

    def _publish(self, values: Values, version: int) -> None:
        tensors = self.contents.tensors
        last = int(self._head[NEWEST])
        target = (last + 1) % COPIES
        packed = b""
        if self.contents.extras:
            extras = {name: value for name, value in values.items() if name not in tensors}
            if len(extras) < len(self.contents.extras) and self._head[EXTRAS + last]:
                extras = {**pickle.loads(self._extra_bytes(last)), **extras}
            packed = pickle.dumps(extras)
            if len(packed) > self.contents.extra_room:
                raise DoesNotFitError(len(packed))
        self._head[STAMPS + target] = UNFINISHED
        given = [name in values for name in tensors]
        if not all(given):
            np.copyto(self._copies[target], self._copies[last])
        self._given[target] = all(given) or self._given[last] | np.array(given, np.uint8)
        with torch.no_grad():
            for name, view in self._views[target].items():
                if name in values:
                    view.copy_(values[name])  # type: ignore[index]
        if packed:
            begin = self._extras_at
            self._copies[target][begin : begin + len(packed)] = np.frombuffer(packed, np.uint8)
        self._head[EXTRAS + target] = len(packed)
        self._head[STAMPS + target] = version
        self._head[NEWEST] = target

    def snapshot(self) -> dict[str, Any]:  # noqa: D102 - see `SnapshotStore`
        while (taken := self.copy_of(self.version)) is None:
            continue
        return taken

    def copy_of(self, version: int) -> dict[str, Any] | None:
        """The values of that version, copied; None if there are none any more."""
        taken: dict[str, Any] = {}

        def copy(values: Values) -> None:
            taken.update({name: v.clone() if isinstance(v, Tensor) else v for name, v in values.items()})

        return taken if self.adopt_version(copy, version) else None

    def newest_of(self, released: int) -> int:
        """The newest version up to `released`; -1 if there is none."""
        return max((s for s in self._head[STAMPS : STAMPS + COPIES].tolist() if s <= released), default=UNFINISHED)

    def adopt(self, load: Callable[[Values], Any]) -> int:
        """Let `load` copy the newest values, again if they changed meanwhile; the version that it has then."""
        while not self.adopt_version(load, version := self.newest_of(self.released)):
            continue
        return version

    def adopt_version(self, load: Callable[[Values], Any], version: int) -> bool:
        """Let `load` copy the values of that version; False if they were overwritten meanwhile, or before."""
        with self._lock:
            stamps = self._head[STAMPS : STAMPS + COPIES].tolist()
            if version == UNFINISHED or version not in stamps:
                return False
            copy = stamps.index(version)
            extras = self._extra_bytes(copy)
            views = {
                name: v for (name, v), given in zip(self._views[copy].items(), self._given[copy], strict=True) if given
            }
            if self._head[STAMPS + copy] != version:
                return False
            load({**views, **(pickle.loads(extras) if extras else {})})
            return bool(self._head[STAMPS + copy] == version)

    def _extra_bytes(self, copy: int) -> bytes:
        size = int(self._head[EXTRAS + copy])
        return self._copies[copy][self._extras_at : self._extras_at + size].tobytes()
