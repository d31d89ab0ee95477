"""What a careful author writes by hand for one project: arrays, a position, a lock, a sum tree.

It takes liberties that a library cannot: it knows its entries beforehand, delivers plain arrays, and
its only promise to two threads is one lock around everything.
"""

from __future__ import annotations

import threading
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.contestants import handwritten
from benchmarks.replay import frames
from benchmarks.replay.frames import Frames
from benchmarks.replay.parts import Background, Buffer, Content, Prioritized
from benchmarks.replay.workloads import BATCH, COLLECT, ROWS

_AT_ONCE = 1_000


class Ring:
    """The last `capacity` frames."""

    def __init__(self, capacity: int, example: Frames) -> None:
        self.capacity = capacity
        self.arrays = {key: np.zeros((capacity, *rows.shape[1:]), rows.dtype) for key, rows in example.items()}
        self.written = 0
        self.lock = threading.Lock()
        self.rng = np.random.default_rng(0)

    def extend(self, batch: Frames) -> None:
        count = len(next(iter(batch.values())))
        with self.lock:
            place = self.written % self.capacity
            until_end = min(count, self.capacity - place)
            for key, rows in batch.items():
                ring = self.arrays[key]
                ring[place : place + until_end] = rows[:until_end]
                ring[: count - until_end] = rows[until_end:]
            self.written += count

    def sample(self) -> Frames:
        with self.lock:
            return self.take(self.rng.integers(min(self.written, self.capacity), size=BATCH))

    def take(self, index: NDArray[np.int64]) -> Frames:
        return {key: ring.take(index, 0) for key, ring in self.arrays.items()}


class SumTree:
    """Sums of priorities, level by level: each call does all its frames at once."""

    def __init__(self, capacity: int) -> None:
        self.levels = (capacity - 1).bit_length()
        self.leaves = 1 << self.levels
        self.sums = np.zeros(2 * self.leaves)

    def set(self, index: NDArray[np.int64], priorities: NDArray[Any]) -> None:
        node = index + self.leaves
        sums = self.sums
        sums[node] = priorities
        for _ in range(self.levels):
            node = node >> 1
            sums[node] = sums[2 * node] + sums[2 * node + 1]

    def find(self, chances: NDArray[np.float64]) -> NDArray[np.int64]:
        """The frames at these shares of the total."""
        mass = chances * self.sums[1]
        node = np.ones(len(chances), np.int64)
        for _ in range(self.levels):
            node = 2 * node
            left = self.sums[node]
            right = mass >= left
            mass -= np.where(right, left, 0.0)
            node += right
        return node - self.leaves


def background(capacity: int) -> Background:
    """The hand-written loop in a thread, its batches written into the ring."""
    loop = handwritten.build(COLLECT)
    assert loop.last_batch is not None
    latest = loop.last_batch
    loop()
    ring = Ring(capacity, _flat(latest()))
    stopping = threading.Event()

    def collect() -> None:
        while not stopping.is_set():
            loop()
            ring.extend(_flat(latest()))

    thread = threading.Thread(target=collect)

    def stop() -> None:
        stopping.set()
        thread.join()

    def held() -> int:
        # zeros where nothing was written yet: CartPole never stands exactly still
        return int(ring.arrays[("observation",)].any(-1).sum())

    def content(batch: Frames) -> Content:
        return {key[0]: rows for key, rows in batch.items()}

    return Background(thread.start, lambda: ring.written, held, ring.sample, content, stop)


def _flat(batch: Any) -> Frames:
    """`[envs, time, ...]` tensors as `[frames, ...]` arrays."""
    return {(key,): tensor.flatten(0, 1).numpy() for key, tensor in batch.items()}


def buffer(capacity: int, pixels: bool) -> Buffer:
    ring = _filled(capacity, pixels)
    batches = cycle([frames.make(ROWS, pixels, ROWS * n) for n in range(8)])
    return Buffer(lambda: ring.extend(next(batches)), ring.sample, _content)


def prioritized(capacity: int) -> Prioritized:
    ring, tree = _filled(capacity, pixels=False), SumTree(capacity)
    rng = np.random.default_rng(0)
    tree.set(np.arange(capacity), rng.random(capacity) + 0.01)
    priorities = cycle(rng.random((64, BATCH)) + 0.01)

    def turn() -> Frames:
        index = np.minimum(tree.find(rng.random(BATCH)), capacity - 1)
        batch = ring.take(index)
        tree.set(index, next(priorities))
        return batch

    return Prioritized(turn, _content)


def _filled(capacity: int, pixels: bool) -> Ring:
    ring = Ring(capacity, frames.make(1, pixels))
    for first in range(0, capacity, _AT_ONCE):
        ring.extend(frames.make(_AT_ONCE, pixels, first))
    return ring


def _content(batch: Frames) -> Content:
    return {
        "observation": batch[("observation",)],
        "next_observation": batch[("next", "observation")],
        "action": batch[("action",)],
    }
