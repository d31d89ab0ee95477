"""What happened so far: frames, episodes, and where the time went."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

RECENT_EPISODES = 100


@dataclass
class Timings:
    """Seconds spent, by what they were spent on."""

    env: float = 0.0
    policy: float = 0.0
    bookkeeping: float = 0.0
    waiting: float = 0.0
    """Between two batches: the consumer's own time."""

    def add(self, env: float, policy: float, whole: float) -> None:
        """Count a rollout of `whole` seconds; what was neither env nor policy was bookkeeping."""
        self.env += env
        self.policy += policy
        self.bookkeeping += whole - env - policy


@dataclass
class RolloutStats:
    """Counters of one loop."""

    frames: int = 0
    batches: int = 0
    episodes: int = 0
    idle_frames: int = 0
    """Places in batches that hold no transition, marked in the mask."""
    timings: Timings = field(default_factory=Timings)
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_EPISODES))
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_EPISODES))

    def summary(self) -> dict[str, float | int]:
        """A flat dict of numbers; means are over the last 100 episodes."""
        summary: dict[str, float | int] = {
            "frames": self.frames,
            "batches": self.batches,
            "episodes": self.episodes,
            "time/env": self.timings.env,
            "time/policy": self.timings.policy,
            "time/bookkeeping": self.timings.bookkeeping,
            "time/waiting": self.timings.waiting,
        }
        if self.idle_frames:
            summary["idle_frames"] = self.idle_frames
        if self.returns:
            summary["mean_return"] = float(np.mean(self.returns))
            summary["mean_length"] = float(np.mean(self.lengths))
        return summary


class EpisodeMeter:
    """Adds up returns and lengths of running episodes, over batches."""

    def __init__(self, lanes: int) -> None:
        """All lanes begin at nothing."""
        self.returns = np.zeros(lanes)
        self.lengths = np.zeros(lanes, dtype=np.int64)

    def forget(self, lanes: list[int]) -> None:
        """Begin anew in `lanes`, whose episodes were cut off."""
        self.returns[lanes] = 0.0
        self.lengths[lanes] = 0

    def measure(self, reward: np.ndarray, done: np.ndarray, real: np.ndarray | None, stats: RolloutStats) -> None:
        """Count a slot `[N, T]`; `real` tells frames from idle places."""
        totals = np.cumsum(reward, axis=1, dtype=np.float64)
        counts = np.broadcast_to(np.arange(1, done.shape[1] + 1), done.shape)
        if real is not None:
            counts = np.cumsum(real, axis=1)
        lanes, steps = np.nonzero(done)
        for lane, step in sorted(zip(lanes.tolist(), steps.tolist(), strict=True), key=lambda end: end[1]):
            stats.episodes += 1
            stats.returns.append(float(self.returns[lane] + totals[lane, step]))
            stats.lengths.append(int(self.lengths[lane] + counts[lane, step]))
            self.returns[lane] = -totals[lane, step]
            self.lengths[lane] = -counts[lane, step]
        self.returns += totals[:, -1]
        self.lengths += counts[:, -1]
