"""Runs: frames that follow each other in one trajectory, without a gap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from swath.data.contents import Contents
from swath.data.samplers import NothingToSampleError
from swath.keys import DONE, NEXT, TRAJ_IDS, Key

PADDING_ID = -1
"""The trajectory id of what is no frame."""

_TRAJECTORY_KEYS: tuple[Key, ...] = (TRAJ_IDS, "episode")
_END_KEY: Key = (NEXT, DONE)
_CHUNK = 1 << 18
"""How many rows are looked at in one go, so that a first look at a full buffer does not take as much memory again."""


@dataclass(frozen=True)
class Runs:
    """All runs of a buffer, lane after lane and from the oldest to the newest, as arrays `[R]`."""

    lane: np.ndarray
    begin: np.ndarray
    """The position of the first frame."""
    length: np.ndarray

    def __len__(self) -> int:
        """How many runs there are."""
        return len(self.lane)

    def __getitem__(self, which: np.ndarray | slice) -> Runs:
        """Some of the runs."""
        return Runs(self.lane[which], self.begin[which], self.length[which])


@dataclass(frozen=True)
class Signs:
    """What tells trajectories apart. A frame ends its run if any sign says so.

    Attributes:
        traj_key: entry with the id of the trajectory of each frame. If None, a usual one if there is any.
        end_keys: entries that are true for the last frame of a trajectory; one of them must exist. If None, the usual
            one if it exists; but it is left alone if there is the entry `traj_key`.
        ends: the same as an array by frame, instead of any entry.
        trajectories: ids as an array by frame, instead of any entry.
    """

    traj_key: Key | None = None
    end_keys: tuple[Key, ...] | None = None
    ends: np.ndarray | None = None
    trajectories: np.ndarray | None = None

    def read(self, contents: Contents, index: np.ndarray) -> tuple[np.ndarray | None, list[np.ndarray]]:
        """The ids and the flags of the frames `index` `[lanes, rows]`: `[lanes, rows, ...]` each."""
        if self.ends is not None:
            return None, [_long_enough("ends", self.ends, contents)[index]]
        if self.trajectories is not None:
            return _long_enough("trajectories", self.trajectories, contents)[index], []
        traj_keys = _TRAJECTORY_KEYS if self.traj_key is None else (self.traj_key,)
        ids = next(_entries(contents, traj_keys, index), None)
        if self.end_keys is not None:
            flags = list(_entries(contents, self.end_keys, index))
            if not flags:
                raise KeyError(_missing(contents, "end_key", self.end_keys))
        elif ids is not None and self.traj_key is not None:
            flags = []  # whoever names the ids alone means that nothing else counts
        else:
            flags = list(_entries(contents, (_END_KEY,), index))
        if ids is None and not flags:
            raise KeyError(_missing(contents, "traj_key` or `end_key", (*traj_keys, _END_KEY)))
        return ids, flags


class RunFinder:
    """Finds the runs of a buffer, and keeps what it knows: only frames that are new, or were changed, are looked at.

    A run ends where the next frame is not there or does not continue it, and where the signs say so. The oldest frame
    begins one, and so the newest is never followed by the oldest. The end of the memory is no end: the ring goes on.
    """

    def __init__(self, signs: Signs) -> None:
        """Begin with nothing seen."""
        self._signs = signs
        self._edits = 0
        self.empty()

    def empty(self) -> None:
        """Forget all frames."""
        self._shape = (0, 0)
        """Lanes and capacity of the buffer."""
        self._seen = range(0)
        """The positions that were looked at."""
        self._oldest = 0
        """No frame before this position is used."""
        nothing = np.empty(0, np.int64)
        self._stretches = (nothing, nothing, np.empty(0, bool))
        """Where stretches begin, in order: lane, position, and whether it is a run or of no use: holes or padding."""
        self._runs: Runs | None = None

    def find(self, contents: Contents) -> Runs:
        """All runs; the same object as long as nothing changes."""
        if not contents.rows:
            raise NothingToSampleError("The buffer is empty: there is nothing to sample.")
        if contents.edits != self._edits:  # frames were changed where they lie, and nobody knows which
            self.empty()
            self._edits = contents.edits
        if self._runs is None or contents.first != self._seen.start or contents.end != self._seen.stop:
            self._runs = self._look(contents)
        return self._runs

    def drop_before(self, position: int) -> None:
        """Use no frame before `position` any more: a writer is taking the rows of the oldest frames."""
        self._oldest = max(self._oldest, position)
        self._runs = None

    def _look(self, contents: Contents) -> Runs:
        """Look at what is new, and list all runs."""
        shape = (contents.lanes, contents.capacity)
        if shape != self._shape or contents.end < self._seen.stop:  # another buffer, or one that was emptied
            self.empty()
        self._shape, self._oldest = shape, max(self._oldest, contents.first)
        start, parts = max(self._seen.stop, self._oldest), [self._stretches]
        if start < contents.end:
            for chunk in range(start, contents.end, _CHUNK):
                parts.append(self._mark(contents, chunk, min(chunk + _CHUNK, contents.end)))
        self._seen = range(contents.first, contents.end)
        lane, begin, useful = (np.concatenate(each) for each in zip(*parts, strict=True))
        return self._listed(contents, lane, begin, useful)

    def _mark(self, contents: Contents, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find where stretches begin, from `start` up to `stop`; to know, the frame before is looked at too."""
        positions = np.arange(start - 1, stop)
        index = contents.index(positions, np.arange(contents.lanes)[:, None])  # [lanes, 1 + rows]
        there = contents.holds(index[0]) & (positions >= self._oldest)
        usable = np.repeat(there[None], contents.lanes, axis=0)
        joined = ~contents.seams[index[:, 1:]]
        ids, flags = self._signs.read(contents, index)
        for flag in flags:
            joined &= ~_flat(flag[:, :-1]).any(-1)
        if ids is not None:
            known = _flat(ids)
            usable &= (known != PADDING_ID).all(-1)
            joined &= (known[:, 1:] == known[:, :-1]).all(-1)
        useful = usable[:, 1:]
        joined &= useful & usable[:, :-1]
        begins = ~joined & (useful | usable[:, :-1])  # frames of no use are marked once, where they begin
        begins[:, 0] = ~joined[:, 0]  # the frame before may have been of use when it was looked at
        lane, step = np.nonzero(begins)
        return lane, step + start, useful[lane, step]

    def _listed(self, contents: Contents, lane: np.ndarray, begin: np.ndarray, useful: np.ndarray) -> Runs:
        """Put stretches in order, leave out those that are over, and make runs of the others."""
        if contents.lanes > 1:
            order = np.argsort(lane, kind="stable")  # within a lane they are in order: they came so
            lane, begin, useful = lane[order], begin[order], useful[order]
        stop = np.append(begin[1:], contents.end)
        stop[np.flatnonzero(lane[1:] != lane[:-1])] = contents.end
        kept = stop > self._oldest
        lane, stop, useful = lane[kept], stop[kept], useful[kept]
        begin = np.maximum(begin[kept], self._oldest)
        self._stretches = (lane, begin, useful)
        return Runs(lane, begin, stop - begin)[useful]


def _flat(values: np.ndarray) -> np.ndarray:
    """`[lanes, rows, ...]` as `[lanes, rows, n]`."""
    return values.reshape(*values.shape[:2], -1)


def _entries(contents: Contents, keys: Sequence[Key], index: np.ndarray) -> Iterator[np.ndarray]:
    """Those of the entries `keys` that exist, for the frames `index`."""
    for key in keys:
        try:
            entry = contents.entry(key, index)
        except KeyError:
            continue
        yield entry


def _long_enough(name: str, given: np.ndarray, contents: Contents) -> np.ndarray:
    """An array by frame, filled up to the size of the buffer."""
    frames = contents.lanes * contents.capacity
    needed = frames if contents.lanes > 1 else min(frames, contents.end)
    if not needed <= len(given) <= frames:
        raise ValueError(
            f"`{name}` must have an element for each frame: the buffer holds {needed} frames and has room for "
            f"{frames}, got {len(given)} elements."
        )
    return np.concatenate((given, np.zeros(frames - len(given), given.dtype)))


def _missing(contents: Contents, argument: str, keys: Sequence[Key]) -> str:
    wanted = " or ".join(map(repr, keys))
    try:
        contents.column(keys[0])
    except KeyError as error:
        details = f" {error.args[0]}" if error.args and isinstance(error.args[0], str) else ""
    return f"Trajectories cannot be told apart: the buffer has no entry {wanted}. Set `{argument}`.{details}"
