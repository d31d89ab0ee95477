"""What swath and the peer share: their buffers take the same calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from typing import Any

import torch
from tensordict import TensorDictBase

from benchmarks.replay import frames
from benchmarks.replay.parts import Background, Buffer, Content, Prioritized
from benchmarks.replay.workloads import BATCH, ROWS

ALPHA, BETA = 0.7, 0.5
_AT_ONCE = 1_000
_PREPARED = 8
"""Different batches to write, so that the source is not always in the nearest cache."""


def content(data: TensorDictBase) -> Content:
    return {
        "observation": data["observation"],
        "next_observation": data["next", "observation"],
        "action": data["action"],
    }


def background(collector: Any, buffer: Any, frames_per_count: int) -> Background:
    """A collector with `start()`; one of `write_count` is `frames_per_count` frames."""
    return Background(
        start=collector.start,
        frames=lambda: int(buffer.write_count) * frames_per_count,
        held=lambda: _held(buffer),
        sample=buffer.sample,
        content=content,
        stop=collector.async_shutdown,
    )


def _held(buffer: Any) -> int:
    """How many frames can be read; again, where one of them is just being written."""
    for _ in range(1000):
        with suppress(IndexError):
            return int(buffer[:].numel())
    raise TimeoutError("The buffer could not be read: some frame was being written each time.")


def buffer(made: Any, capacity: int, pixels: bool) -> Buffer:
    fill(made, capacity, pixels)
    batches = cycle([frames.as_tensordict(frames.make(ROWS, pixels, ROWS * n)) for n in range(_PREPARED)])
    return Buffer(lambda: made.extend(next(batches)), made.sample, content)


def fill(made: Any, capacity: int, pixels: bool) -> None:
    for first in range(0, capacity, _AT_ONCE):
        made.extend(frames.as_tensordict(frames.make(_AT_ONCE, pixels, first)))


def prioritized(made: Any, capacity: int, sample: Callable[[], tuple[TensorDictBase, Any]]) -> Prioritized:
    """`sample` gives a batch and its indices."""
    fill(made, capacity, pixels=False)
    made.update_priority(torch.arange(capacity), torch.rand(capacity) + 0.01)
    priorities = cycle(torch.rand(64, BATCH) + 0.01)

    def turn() -> TensorDictBase:
        data, index = sample()
        made.update_priority(index, next(priorities))
        return data

    return Prioritized(turn, content)
