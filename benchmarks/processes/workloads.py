"""What is measured of several processes, the same for every contestant.

W4, W5 and W6m give two workers what W2 and W6 give one process, so that their rate can be held against
that of one process. W8 steps envs in processes of their own without a policy: CartPole costs so little
that what is left is the way there and back. W10 and W11 ask what starting and new weights cost. W12 and
W13 are W4 and W8 for more and more workers, with the time it takes until they deliver.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from benchmarks import policies
from benchmarks.figures import FRAMES, Figure
from benchmarks.replay.workloads import BACKGROUND, BATCH, COLLECT
from benchmarks.workloads import WORKLOADS as COLLECTING
from benchmarks.workloads import Workload

Kind = Literal["collect", "step", "background", "start", "weights", "batches"]

WORKERS = 2
SCALES = (1, 2, 4, 8, 16)

LARGE: Workload = replace(
    COLLECTING["W2"], name="W11", frames_per_batch=200, make_net=lambda: policies.mlp(4, 2, hidden=1000)
)
"""What one worker collects while weights are sent: CartPole with a network of a million parameters."""

_RATES = (FRAMES, Figure("frames_per_cpu_second", "frames per CPU second"))
"""The second hardly changes with what else the machine does; waiting costs nothing there, spinning does."""
_START = Figure("start_seconds", "seconds to the first batch", 2, less_is_better=True)
_READY = Figure("start_seconds", "seconds to the first reset", 2, less_is_better=True)
_STARTS = (
    Figure("first_seconds", "seconds, first in the process", 2, less_is_better=True),
    Figure("second_seconds", "seconds, second", 2, less_is_better=True),
)
_UPDATES = (
    Figure("sync_ms", "sync: ms per update", 3, less_is_better=True),
    Figure("async_ms", "async: ms per update", 3, less_is_better=True),
)

_COLLECTORS = ("swath", "swath_single", "peer_default", "peer_fastest", "handwritten")
_STEPPERS = (
    "swath", "swath_packed", "swath_tensordict", "swath_collector", "peer_default", "peer_fastest", "gym_async", "sb3",
    "puffer",
)  # fmt: skip


@dataclass(frozen=True)
class ProcessWorkload:
    """One setting."""

    name: str
    title: str
    kind: Kind
    figures: tuple[Figure, ...]
    contestants: tuple[str, ...]
    one: Workload = COLLECTING["W2"]
    """What one worker collects, or the env that is stepped."""
    workers: int = WORKERS
    """Workers, or for "step" the number of envs, each in a process of its own."""
    sync: bool = True
    pause_s: float = 0.0
    """In the background: the trainer wants a batch every so many seconds."""
    family: str = ""
    """Workloads that differ in the number of workers only share a table."""

    @property
    def whole(self) -> Workload:
        """What a batch holds: the frames of all workers, or of one where each delivers by itself."""
        if not self.sync:
            return self.one
        one = self.one
        return replace(one, num_envs=self.workers * one.num_envs, frames_per_batch=self.workers * one.frames_per_batch)


def _scaled_collecting(workers: int) -> ProcessWorkload:
    return ProcessWorkload(
        f"W12x{workers}", f"CartPole-v1, {workers} workers of 8 envs, sync", "collect", (FRAMES, _START),
        ("swath", "peer_default"), workers=workers, family="W12: sync collector, workers of 8 CartPole-v1 envs",
    )  # fmt: skip


def _scaled_stepping(workers: int) -> ProcessWorkload:
    return ProcessWorkload(
        f"W13x{workers}", f"CartPole-v1, {workers} envs, a process each, no policy", "step", (FRAMES, _READY),
        ("swath", "peer_default", "gym_async"), workers=workers,
        family="W13: CartPole-v1 envs, a process each, no policy",
    )  # fmt: skip


WORKLOADS: dict[str, ProcessWorkload] = {
    w.name: w
    for w in (
        ProcessWorkload(
            "W4", "CartPole-v1, 2 workers of 8 envs, sync, 2048 frames per batch", "collect", _RATES, _COLLECTORS,
        ),
        ProcessWorkload(
            "W5", "CartPole-v1, 2 workers of 8 envs, async, 1024 frames per batch", "collect", _RATES, _COLLECTORS,
            sync=False,
        ),
        ProcessWorkload(
            "W6m", "pixels 84x84x4, 2 workers of 8 envs, sync, 1024 frames per batch", "collect", _RATES,
            _COLLECTORS, one=COLLECTING["W6"],
        ),
        ProcessWorkload("W8a", "CartPole-v1, 8 envs, no policy", "step", _RATES, _STEPPERS, workers=8),
        ProcessWorkload(
            "W8b", "CartPole-v1, 2 envs, no policy", "step", _RATES,
            tuple(name for name in _STEPPERS if name not in ("swath_packed", "peer_fastest")),
        ),
        ProcessWorkload(
            "W9m", f"CartPole-v1, 2 workers of 8 envs in the background, {BATCH} frames sampled every 2 ms",
            "background", BACKGROUND, ("swath", "swath_single", "peer_default", "peer_fastest"), one=COLLECT,
            sync=False, pause_s=0.002,
        ),
        ProcessWorkload(
            "W10", "constructor to first batch, CartPole-v1, 2 workers of 8 envs, sync", "start", _STARTS,
            ("swath", "peer_default", "peer_fork"),
        ),
        ProcessWorkload(
            "W11", "update_policy_weights_(), a million parameters, 2 workers", "weights", _UPDATES,
            ("swath", "peer_default", "memcpy"), one=LARGE,
        ),
        *map(_scaled_collecting, SCALES),
        *map(_scaled_stepping, SCALES),
    )
}  # fmt: skip
