"""WeightStore: numbered snapshots of a model's weights in shared memory.

NOTE [Weights]: the trainer publishes, workers adopt, and neither waits for the other. There are a few copies of the
weights in the memory, written in turn. A copy's stamp is the version that it holds, or `UNFINISHED` while it is
written; `newest` points to the copy that was finished last. A worker takes the newest copy and looks at its stamp
again: if that has changed, the trainer has come round all the copies meanwhile, and it takes the newest again before it
acts. So weights are adopted whole, a trainer that is killed while it publishes leaves the former version in place, and
a worker that is stopped or dead concerns nobody. What is published is a copy: what the trainer does to its own tensors
afterwards is seen by no worker. (Relies, as NOTE [Writing and reading at once] does, on stores becoming visible in
order.)
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swath.runtime import MemoryBlock
from swath.runtime.memory import line_aligned, page_aligned
from swath.weights.sources import Layout

COPIES = 3
UNFINISHED = -1
NEWEST, STAMPS, EXTRAS = 0, 1, 1 + COPIES
"""Where numbers lie in the head: the newest copy, the copies' stamps, and the sizes of their extra states."""
HEAD = page_aligned((EXTRAS + COPIES) * 8)
EXTRA_ROOM = 4096


class DoesNotFitError(ValueError):
    """The extra state has outgrown the store: a larger one is needed."""

    def __init__(self, needed: int) -> None:
        """Say how many bytes it takes."""
        super().__init__(f"The extra state takes {needed} bytes.")
        self.needed = needed


class WeightStore:
    """The weights of one model, for all workers that are given the store."""

    def __init__(self, layout: Layout, extra_room: int = EXTRA_ROOM, block: Any = None) -> None:
        """Make room for `layout`; nothing is published yet."""
        self.layout = layout
        self._extra_room = extra_room
        self._offsets, end = {}, 0
        for name, (shape, dtype) in layout.tensors.items():
            self._offsets[name] = end
            end += line_aligned(math.prod(shape) * dtype.itemsize)
        self._extras_at = end
        self._size = page_aligned(end + extra_room)
        self._masks_at = HEAD + COPIES * self._size
        self.block = MemoryBlock(self._masks_at + COPIES * len(layout.tensors)) if block is None else block
        self._head = self.block.array((EXTRAS + COPIES,), np.int64)
        self._copies = [self.block.array((self._size,), np.uint8, HEAD + i * self._size) for i in range(COPIES)]
        self._given = self.block.array((COPIES, len(layout.tensors)), np.uint8, self._masks_at)
        """Which tensors each copy holds: those that were never published are left to the workers."""
        with torch.inference_mode(False):  # they are written to wherever weights are published
            self._views = [self._over(memory) for memory in self._copies]
        if block is None:
            self._head[STAMPS : STAMPS + COPIES] = UNFINISHED
            for memory in self._copies:
                memory.fill(0)  # so that the first updates need not wait for pages

    def _over(self, memory: np.ndarray) -> dict[str, Tensor]:
        views = {}
        for name, (shape, dtype) in self.layout.tensors.items():
            begin = self._offsets[name]
            raw = torch.from_numpy(memory[begin : begin + math.prod(shape) * dtype.itemsize])
            views[name] = raw.view(dtype).view(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
        return views

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the block."""
        return type(self), (self.layout, self._extra_room, self.block)

    @property
    def version(self) -> int:
        """The newest version; -1 before the first."""
        return int(self._head[STAMPS + self._head[NEWEST]])

    def publish(self, weights: Mapping[str, Any], version: int) -> None:
        """Make `weights`, by the names of the layout, the newest; those that are not given stay as they are."""
        extras = {name: value for name, value in weights.items() if name not in self._offsets}
        last = int(self._head[NEWEST])
        target = (last + 1) % COPIES
        packed = b""
        if self.layout.extras:
            if len(extras) < len(self.layout.extras) and self._head[EXTRAS + last]:
                extras = {**pickle.loads(self._extra_bytes(last)), **extras}
            packed = pickle.dumps(extras)
            if len(packed) > self._extra_room:
                raise DoesNotFitError(len(packed))
        self._head[STAMPS + target] = UNFINISHED
        given = np.array([name in weights for name in self._offsets], np.uint8)
        if not given.all():
            np.copyto(self._copies[target], self._copies[last])
        self._given[target] = self._given[last] | given
        with torch.no_grad():
            for name, view in self._views[target].items():
                if name in weights:
                    view.copy_(weights[name])
        if packed:
            begin = self._extras_at
            self._copies[target][begin : begin + len(packed)] = np.frombuffer(packed, np.uint8)
        self._head[EXTRAS + target] = len(packed)
        self._head[STAMPS + target] = version
        self._head[NEWEST] = target

    def larger(self, needed: int) -> WeightStore:
        """A store with more room for extra state, and the newest version of this one."""
        store = WeightStore(self.layout, 2 * max(needed, self._extra_room))
        if self.version >= 0:
            store.publish(self.snapshot(), self.version)
        return store

    def snapshot(self) -> dict[str, Any]:
        """The newest weights, copied."""
        taken: dict[str, Any] = {}

        def copied(weights: dict[str, Any]) -> None:
            taken.update({name: w.clone() if isinstance(w, Tensor) else w for name, w in weights.items()})

        self.adopt(copied)
        return taken

    def adopt(self, load: Callable[[dict[str, Any]], Any]) -> int:
        """Let `load` copy the newest weights, again if they changed meanwhile; the version that it has then."""
        while True:
            copy = int(self._head[NEWEST])
            version = int(self._head[STAMPS + copy])
            if version == UNFINISHED:  # we are late: another is the newest by now
                continue
            extras = self._extra_bytes(copy)
            views = {
                name: v for (name, v), given in zip(self._views[copy].items(), self._given[copy], strict=True) if given
            }
            if self._head[STAMPS + copy] != version:
                continue
            load({**views, **(pickle.loads(extras) if extras else {})})
            if self._head[STAMPS + copy] == version:
                return version

    def _extra_bytes(self, copy: int) -> bytes:
        size = int(self._head[EXTRAS + copy])
        return self._copies[copy][self._extras_at : self._extras_at + size].tobytes()
