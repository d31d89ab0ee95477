"""What a collector over counting envs must deliver, computed frame by frame in the plainest way there is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from tensordict import TensorDictBase

from swath.keys import DONE, FLAGS, MASK, NEXT, REWARD, STEP_COUNT, TERMINATED, TRAJ_IDS, TRUNCATED
from swath.testing.checks import ONE_STEP, counted
from swath.testing.counting import Lengths, length_of


@dataclass
class Frame:
    """One transition, or a place that holds none."""

    lane: int
    episode: int
    step: int
    id: int
    terminated: bool = False
    truncated: bool = False
    is_idle: bool = False

    @property
    def done(self) -> bool:
        """Whether the episode ends here."""
        return self.terminated or self.truncated


class CountingReference:
    """Counting envs and the collector's bookkeeping, without arrays, slots, or anything clever.

    Args:
        lanes: how many lanes; 1 for an env without a batch dimension.
        lengths: how long the episodes are, as for the counting envs.
        truncate: whether episodes are truncated rather than terminated.
        limit: `max_frames_per_traj`.
        set_truncated: as the collector's.
        idles: whether finished lanes spend a step on their reset, as those of `CountingVectorEnv` do.
        worker: the index of the worker, which is part of the ids.
    """

    def __init__(
        self,
        lanes: int,
        lengths: Lengths,
        *,
        truncate: bool = False,
        limit: int | None = None,
        set_truncated: bool = False,
        idles: bool = False,
        worker: int = 0,
    ) -> None:
        """Begin episode 0 in every lane."""
        self.lanes, self.lengths, self.truncate, self.limit = lanes, lengths, truncate, limit
        self.set_truncated, self.idles = set_truncated, idles
        self.episode, self.step = [0] * lanes, [0] * lanes
        self.pending = [False] * lanes
        self.next_id = worker << 40
        self.id = [self._new_id() for _ in range(lanes)]
        self.frames = 0
        self.ended: list[int] = []
        """Lengths of all episodes that came to their end, in order."""
        self.open: dict[int, list[Frame]] = {}
        self.complete: list[list[Frame]] = []
        """Whole episodes, in the order in which they ended."""
        self.dropped = 0
        """Frames of episodes that were cut off."""

    def _new_id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def length(self, lane: int, episode: int) -> int:
        """How many frames that episode has, if it is not cut off."""
        whole = length_of(self.lengths, lane, episode)
        return whole if self.limit is None else min(whole, self.limit)

    def reset(self, lanes: Iterable[int] | None = None, *, new_ids: bool = True) -> None:
        """Begin new episodes in `lanes`."""
        for lane in range(self.lanes) if lanes is None else lanes:
            self.dropped += len(self.open.pop(self.id[lane], []))
            self.episode[lane], self.step[lane], self.pending[lane] = self.episode[lane] + 1, 0, False
            if new_ids:
                self.id[lane] = self._new_id()

    def collect(self, steps: int) -> list[list[Frame]]:
        """The frames of a batch, `[lane][t]`."""
        rows: list[list[Frame]] = [[] for _ in range(self.lanes)]
        for t in range(steps):
            for lane in range(self.lanes):
                rows[lane].append(self._step(lane))
            ended = [lane for lane in range(self.lanes) if rows[lane][t].done]
            for lane in ended:
                self.ended.append(self.step[lane])
                if self.idles and len(ended) < self.lanes:
                    self.pending[lane] = True
                else:
                    self.episode[lane], self.step[lane] = self.episode[lane] + 1, 0
            if self.set_truncated and t == steps - 1:
                for row in rows:
                    row[t].truncated |= not row[t].terminated
            for lane in range(self.lanes):
                if rows[lane][t].done and not rows[lane][t].is_idle:
                    self.id[lane] = self._new_id()
            self._keep([row[t] for row in rows])
        return rows

    def _step(self, lane: int) -> Frame:
        if self.pending[lane]:
            self.episode[lane], self.step[lane], self.pending[lane] = self.episode[lane] + 1, 0, False
            return Frame(lane, 0, 0, -1, is_idle=True)
        frame = Frame(lane, self.episode[lane], self.step[lane], self.id[lane])
        self.step[lane] += 1
        self.frames += 1
        over = self.step[lane] >= length_of(self.lengths, lane, frame.episode)
        frame.terminated = over and not self.truncate
        frame.truncated = (over and self.truncate) or self.step[lane] == self.limit
        return frame

    def _keep(self, frames: Iterable[Frame]) -> None:
        """Add the frames of one step to the episodes, those with lower ids first."""
        for frame in sorted(frames, key=lambda frame: frame.id):
            if frame.is_idle:
                continue
            self.open.setdefault(frame.id, []).append(frame)
            if frame.done:
                self.complete.append(self.open.pop(frame.id))


def assert_holds(batch: TensorDictBase, rows: Sequence[Sequence[Frame]], *, compact: bool = False) -> None:
    """The batch `[..., T]` holds exactly the frames `rows` `[N][T]`, in every entry."""
    frames = [frame for row in rows for frame in row]
    assert batch.numel() == len(frames), f"{batch.numel()} places instead of {len(frames)}"
    assert batch.shape[-1] == len(rows[0]), f"{batch.shape[-1]} steps instead of {len(rows[0])}"
    flat = batch.reshape(-1)
    real = np.array([not frame.is_idle for frame in frames])
    numbers = np.array([(f.lane, f.episode, f.step) for f in frames])[real]

    def values(source: TensorDictBase, key: str) -> np.ndarray:
        return np.asarray(source.get(key).numpy()[real][:, 0])

    following = flat.get(NEXT)
    np.testing.assert_array_equal(counted(flat)[real], numbers)
    np.testing.assert_array_equal(values(following, REWARD), numbers[:, 2] + 1)
    if compact:
        assert set(following.keys()) <= {REWARD, STEP_COUNT, *FLAGS}, "an observation is left in 'next'"
    else:
        np.testing.assert_array_equal(counted(following)[real], numbers + ONE_STEP)
    for name in (TERMINATED, TRUNCATED, DONE):
        np.testing.assert_array_equal(values(following, name), np.array([getattr(f, name) for f in frames])[real], name)
        assert not flat.get(name).any(), f"the root says {name}"
    if flat.get(STEP_COUNT, None) is not None:
        np.testing.assert_array_equal(values(flat, STEP_COUNT), numbers[:, 2])
        np.testing.assert_array_equal(values(following, STEP_COUNT), numbers[:, 2] + 1)
    if flat.get(TRAJ_IDS, None) is not None:
        np.testing.assert_array_equal(flat.get(TRAJ_IDS).numpy(), [frame.id for frame in frames])
    if flat.get(MASK, None) is not None:
        np.testing.assert_array_equal(flat.get(MASK).numpy(), real)
    else:
        assert real.all(), "there are places without a frame, but no mask"
