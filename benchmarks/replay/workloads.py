"""What is measured of replay buffers (W9), the same for every contestant.

W9a and W9b collect in the background while the main thread samples: at a trainer's pace, and as fast
as it can. Two figures each, since a buffer can be quick for one side by starving the other. The rest
take a buffer by itself: writing, reading, both for pixels (where copying is the work, so that a plain
copy of the same bytes is the measure), and priorities.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.figures import FRAMES, Figure
from benchmarks.workloads import WORKLOADS as COLLECTING
from benchmarks.workloads import Workload

BATCH = 256
"""Frames per sampled batch."""
ROWS = 200
"""Frames per written batch."""
ENVS = 8

COLLECT: Workload = replace(COLLECTING["W2"], name="W9", frames_per_batch=ROWS)
"""What is collected in the background: W2 in smaller batches, as off-policy training wants them."""

BACKGROUND = (Figure("collected_per_second", "collected frames/s"), Figure("batches_per_second", "sampled batches/s"))
_BOTH_GB = (Figure("extend_gb_per_second", "extend GB/s", 2), Figure("sample_gb_per_second", "sample GB/s", 2))
_SIZES = (Figure("frames_per_second_100k", "100k: frames/s"), Figure("frames_per_second_1m", "1M: frames/s"))

_THREADS = ("swath", "peer_default", "peer_fastest", "sb3", "numpy_ring")
_BUFFERS = _THREADS
_TREES = ("swath", "peer_default", "peer_fastest", "peer_tree", "numpy_ring")


@dataclass(frozen=True)
class ReplayWorkload:
    """One setting."""

    name: str
    title: str
    kind: Literal["background", "buffer", "prioritized"]
    figures: tuple[Figure, ...]
    contestants: tuple[str, ...]
    capacities: tuple[int, ...] = (100_000,)
    """Frames that fit into the buffer; all are measured, one after the other."""
    operations: tuple[Literal["extend", "sample"], ...] = ()
    """For a buffer by itself: what is timed, a figure for each."""
    pause_s: float = 0.0
    """In the background: the trainer wants a batch every so many seconds; 0 for as fast as it can."""
    pixels: bool = False


WORKLOADS: dict[str, ReplayWorkload] = {
    w.name: w
    for w in (
        ReplayWorkload(
            "W9a", f"CartPole-v1, {ENVS} envs, collected in the background, {BATCH} frames sampled every 2 ms",
            "background", BACKGROUND, _THREADS, pause_s=0.002,
        ),
        ReplayWorkload(
            "W9b", f"CartPole-v1, {ENVS} envs, collected in the background, {BATCH} frames sampled without pause",
            "background", BACKGROUND, _THREADS,
        ),
        ReplayWorkload(
            "W9c", f"extend alone, {ROWS} small frames at once", "buffer", (FRAMES,), _BUFFERS, operations=("extend",),
        ),
        ReplayWorkload(
            "W9d", f"sample alone, {BATCH} small frames at once", "buffer", (FRAMES,), _BUFFERS,
            operations=("sample",),
        ),
        ReplayWorkload(
            "W9e", f"extend {ROWS} and sample {BATCH} frames, two 4x84x84 observations in each", "buffer", _BOTH_GB,
            (*_BUFFERS, "memcpy"), capacities=(10_000,), operations=("extend", "sample"), pixels=True,
        ),
        ReplayWorkload(
            "W9f", f"prioritized: sample {BATCH} frames and update their priorities", "prioritized", _SIZES, _TREES,
            capacities=(100_000, 1_000_000),
        ),
    )
}  # fmt: skip
