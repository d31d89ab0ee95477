"""What happened so far: frames, episodes, and where the time went."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

RECENT_EPISODES = 100
SMALL = 256
"""So many frames are looked at one by one in less time than all at once."""


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

    def state_dict(self) -> dict[str, Any]:
        """What is counted on by whoever goes on elsewhere."""
        return {"episodes": self.episodes, "returns": list(self.returns), "lengths": list(self.lengths)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from what was saved; from nothing, if nothing was."""
        self.episodes = state.get("episodes", 0)
        self.returns = deque(state.get("returns", ()), RECENT_EPISODES)
        self.lengths = deque(state.get("lengths", ()), RECENT_EPISODES)

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
            # Copies: another thread may be collecting. Lists, as numpy takes longer for a hundred numbers.
            returns, lengths = list(self.returns), list(self.lengths)
            summary["mean_return"] = sum(returns) / len(returns)
            summary["mean_length"] = sum(lengths) / len(lengths)
        return summary


class EpisodeMeter:
    """Adds up returns and lengths of running episodes, over batches."""

    def __init__(self, lanes: int) -> None:
        self.returns = np.zeros(lanes)
        self._lengths = np.zeros(lanes, dtype=np.int64)
        self._steps = 0
        """Steps of all lanes that are not added to their lengths yet."""

    @property
    def lengths(self) -> np.ndarray:
        """How many steps the running episodes have."""
        if self._steps:
            self._lengths += self._steps
            self._steps = 0
        return self._lengths

    def forget(self, lanes: list[int]) -> None:
        """Begin anew in `lanes`, whose episodes were cut off."""
        self.returns[lanes] = 0.0
        self.lengths[lanes] = 0

    def go_on(self, reward: np.ndarray) -> None:
        """Count a slot `[N, T]` in which no episode has ended, as in most small ones."""
        if reward.size == 1:
            self.returns[0] += reward.item()
            self._steps += 1
            return
        if reward.shape[1] == 1:
            self.returns += reward[:, 0]
        else:
            self.returns += reward.sum(1, dtype=np.float64)
        self._steps += reward.shape[1]

    def end(self, lanes: list[int], stats: RolloutStats) -> None:
        """Count the episodes of `lanes`, which have ended with the last step that was counted."""
        every, lengths = self.returns, self.lengths
        stats.episodes += len(lanes)
        for lane in lanes:
            stats.returns.append(every.item(lane))
            stats.lengths.append(lengths.item(lane))
            every[lane] = lengths[lane] = 0

    def measure(
        self,
        reward: np.ndarray,
        done: np.ndarray,
        real: np.ndarray | None,
        stats: RolloutStats,
        broken: np.ndarray | None = None,
    ) -> None:
        """Count a slot `[N, T]`; `real` tells frames from idle places, and `broken` where episodes were lost."""
        if real is None and broken is None and done.size <= SMALL:
            self._measure_one_by_one(reward, done, stats)
            return
        cut = done if broken is None else done | broken
        if real is None and not cut.any():
            self.go_on(reward)
            return
        counted = np.ones(done.shape, dtype=bool) if real is None else real
        begins = np.ones(done.shape, dtype=bool)
        begins[:, 1:] = cut[:, :-1]
        starts = np.flatnonzero(begins)  # of pieces: parts of episodes that lie in this slot
        lane, step = np.divmod(starts, done.shape[1])
        returns = np.add.reduceat(np.where(counted, reward, 0).reshape(-1), starts, dtype=np.float64)
        lengths = np.add.reduceat(counted.reshape(-1), starts, dtype=np.int64)
        returns[step == 0] += self.returns
        lengths[step == 0] += self.lengths
        last = np.append(starts[1:], done.size) - 1
        over, runs = done.reshape(-1)[last], ~cut.reshape(-1)[last]
        self.returns[:], self.lengths[:] = 0.0, 0
        self.returns[lane[runs]], self.lengths[lane[runs]] = returns[runs], lengths[runs]
        order = np.argsort(last[over] % done.shape[1], kind="stable")  # in which they ended, lanes in order
        stats.episodes += len(order)
        stats.returns.extend(returns[over][order].tolist())
        stats.lengths.extend(lengths[over][order].tolist())

    def _measure_one_by_one(self, reward: np.ndarray, done: np.ndarray, stats: RolloutStats) -> None:
        """The same for a few frames, all of them real: numpy takes longer for these than Python."""
        lanes, ends = (found.tolist() for found in done.nonzero())
        every, lengths = self.returns, self.lengths
        running = {lane: (every.item(lane), lengths.item(lane)) for lane in lanes}
        self.go_on(reward)
        if not lanes:
            return
        rows, begins, over = reward.tolist(), dict.fromkeys(lanes, 0), list[tuple[int, int, float, int]]()
        for lane, end in zip(lanes, ends, strict=True):
            begin = begins[lane]
            returned, length = running.pop(lane, (0.0, 0))
            returned += sum(rows[lane][begin : end + 1])
            over.append((end, lane, returned, length + end + 1 - begin))
            begins[lane] = end + 1
        lengths = self.lengths
        for lane, begin in begins.items():
            every[lane], lengths[lane] = sum(rows[lane][begin:]), len(rows[lane]) - begin
        stats.episodes += len(over)
        for _, _, returned, length in sorted(over):  # in which order they ended, lanes in order
            stats.returns.append(returned)
            stats.lengths.append(length)
