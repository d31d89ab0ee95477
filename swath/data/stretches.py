"""Stretches: frames that belong together, where they lie, and how they are brought together.

Cutting a batch into episodes copies it once, as a whole, and notes where each piece lies. When episodes are taken,
every entry is brought together at once for all of them: what is done for each piece by itself is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from swath.entries import trusted
from swath.keys import Key, as_key
from swath.runtime.columns import array_of

LARGE = 1024
"""Bytes of a frame's entry from which it is quicker to copy each stretch than to index."""


class Chunk:
    """Frames `[M]` that were copied together.

    Attributes:
        frames: all of them.
        live: how many of them an episode still needs.
    """

    def __init__(self, frames: TensorDictBase) -> None:
        self.frames = frames
        self.live = len(frames)

    @staticmethod
    def copied(rows: TensorDictBase) -> Chunk:
        """A copy of `rows` `[N, T]`, one after the other."""
        size = rows.shape.numel()
        entries = {as_key(name): leaf.reshape(size, *leaf.shape[2:]) for name, leaf in rows.items(True, True)}
        # What had to be copied to be reshaped is copied twice: it does not happen with batches of ours.
        return Chunk(trusted({key: leaf.clone() for key, leaf in entries.items()}, (size,), rows.device))

    @cached_property
    def leaves(self) -> dict[Key, Tensor]:
        """All entries."""
        return {as_key(name): leaf for name, leaf in self.frames.items(True, True)}

    @cached_property
    def arrays(self) -> dict[Key, np.ndarray]:
        """Those on the CPU as arrays."""
        return {key: array_of(leaf) for key, leaf in self.leaves.items() if leaf.device.type == "cpu"}

    @property
    def is_sparse(self) -> bool:
        """Whether most of it is not needed any more."""
        return 2 * self.live < len(self.frames)


class Stretch(NamedTuple):
    """The frames `first` to `end` of a chunk."""

    chunk: Chunk
    first: int
    end: int

    @property
    def size(self) -> int:
        """How many they are."""
        return self.end - self.first

    def slice(self) -> TensorDictBase:
        """The frames where they lie."""
        return self.chunk.frames[self.first : self.end]


def length_of(stretches: Iterable[Stretch]) -> int:
    """How many frames there are in all."""
    return sum(end - first for _, first, end in stretches)


def laid_out(stretches: Sequence[Stretch], places: Sequence[int], size: int) -> dict[Key, Tensor]:
    """All entries in new memory for `size` frames, each stretch from its place on, and zeros between them."""
    by_chunk: dict[Chunk, list[int]] = {}
    for number, stretch in enumerate(stretches):
        by_chunk.setdefault(stretch.chunk, []).append(number)
    first, sizes = np.array([one.first for one in stretches]), np.array([one.size for one in stretches])
    place = np.array(places)
    indices = {
        chunk: (_ranges(first[own], sizes[own]), _ranges(place[own], sizes[own])) for chunk, own in by_chunk.items()
    }
    on_devices: dict[torch.device, dict[Chunk, tuple[Tensor, Tensor]]] = {}
    entries: dict[Key, Tensor] = {}
    is_covered = size == int(sizes.sum())
    for key, example in stretches[0].chunk.leaves.items():
        shape = (size, *example.shape[1:])
        out = (torch.empty if is_covered else torch.zeros)(shape, dtype=example.dtype, device=example.device)
        if example.device.type != "cpu":
            if out.device not in on_devices:
                on_devices[out.device] = {chunk: _tensors(pair, out.device) for chunk, pair in indices.items()}
            for chunk, (of, to) in on_devices[out.device].items():
                out[to] = chunk.leaves[key][of]
        elif example[:1].nbytes > LARGE:
            for stretch, begin in zip(stretches, places, strict=True):
                out[begin : begin + stretch.size] = stretch.chunk.leaves[key][stretch.first : stretch.end]
        else:
            array = array_of(out)
            for chunk, (source, target) in indices.items():
                array[target] = chunk.arrays[key][source]
        entries[key] = out
    return entries


def _tensors(pair: tuple[np.ndarray, np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    of, to = (torch.from_numpy(index).to(device) for index in pair)
    return of, to


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers from each start on, so many, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
