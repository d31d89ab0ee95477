"""What a contestant hands over to be measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Content = Mapping[str, Any]
"""A sampled batch by the names that the checks use: observation, next_observation, action, ..."""


def sleep(seconds: float) -> None:
    """What a trainer does between two batches when others collect: nothing at all, or wait."""
    if seconds > 0:
        time.sleep(seconds)


@dataclass
class Background:
    """Collecting beside a trainer."""

    start: Callable[[], None]
    frames: Callable[[], int]
    """Frames collected and written so far."""
    held: Callable[[], int]
    """Frames that are in the buffer: until it is full, the same, but counted by other means."""
    sample: Callable[[], Any]
    content: Callable[[Any], Content]
    """What is in a sampled batch."""
    stop: Callable[[], None]
    between: Callable[[float], None] = sleep
    """Called before each batch with the seconds left until it is due."""


@dataclass
class Buffer:
    """A buffer by itself, full. `extend` writes the next prepared batch."""

    extend: Callable[[], Any]
    sample: Callable[[], Any]
    content: Callable[[Any], Content]


@dataclass
class Prioritized:
    """A full buffer with random priorities; `turn` samples a batch and gives it new priorities."""

    turn: Callable[[], Any]
    content: Callable[[Any], Content] | None = None
    """What is in that batch; None for a bare tree, which delivers indices only."""
