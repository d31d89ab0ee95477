"""Runs: frames that follow each other in one trajectory, without a gap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from swath.data.contents import Contents
from swath.data.episodes import Pieces, find_pieces
from swath.errors import NothingToSampleError
from swath.keys import DONE, NEXT, PADDING_ID, TRAJ_IDS, Key

_TRAJECTORY_KEYS: tuple[Key, ...] = (TRAJ_IDS, "episode")
_END_KEY: Key = (NEXT, DONE)
_CHUNK = 1 << 18
"""How many rows are looked at in one go, so that a first look at a full buffer does not take as much memory again."""


@dataclass(frozen=True)
class FrameRuns:
    """All runs of a buffer, lane after lane and from the oldest to the newest, as arrays `[R]`."""

    lane: np.ndarray
    begin: np.ndarray
    """The position of the first frame."""
    length: np.ndarray

    def __len__(self) -> int:
        return len(self.lane)

    def __getitem__(self, which: np.ndarray | slice) -> FrameRuns:
        return FrameRuns(self.lane[which], self.begin[which], self.length[which])


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
            flags = []  # to name the ids alone means that nothing else counts
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
        self._runs = FrameRuns(nothing, nothing, nothing)

    def find(self, contents: Contents) -> FrameRuns:
        """All runs; the same object as long as nothing changes."""
        if not contents.rows:
            raise NothingToSampleError("The buffer is empty: there is nothing to sample.")
        if contents.edits != self._edits:  # frames were changed where they lie, it is not known which
            self.empty()
            self._edits = contents.edits
        if contents.first != self._seen.start or contents.end != self._seen.stop:
            self._look(contents)
        return self._runs

    def drop_before(self, position: int) -> None:
        """Use no frame before `position` any more: a writer is taking the rows of the oldest frames."""
        self._oldest = max(self._oldest, position)
        self._leave_out_old()

    def _look(self, contents: Contents) -> None:
        """Look at what is new, and leave out what is gone."""
        shape = (contents.lanes, contents.capacity)
        if shape != self._shape or contents.end < self._seen.stop:  # another buffer, or one that was emptied
            self.empty()
        self._shape, self._oldest = shape, max(self._oldest, contents.first)
        start = max(self._seen.stop, self._oldest)
        for chunk in range(start, contents.end, _CHUNK):
            self._add(chunk - 1, self._pieces(contents, chunk - 1, min(chunk + _CHUNK, contents.end)))
        self._seen = range(contents.first, contents.end)
        self._leave_out_old()

    def _pieces(self, contents: Contents, start: int, stop: int) -> Pieces:
        """The pieces of trajectories from `start`, the last frame that was looked at before, up to `stop`."""
        positions = np.arange(start, stop)
        index = contents.in_all_lanes(positions)  # [lanes, rows]
        there = np.repeat((contents.holds(index[0]) & (positions >= self._oldest))[None], contents.lanes, axis=0)
        seams, done = contents.seams[index], np.zeros(index.shape, bool)
        ids, flags = self._signs.read(contents, index)
        for flag in flags:
            done |= _flat(flag).any(-1)
        if ids is not None:
            known = _flat(ids)
            there &= (known != PADDING_ID).all(-1)
            seams[:, 1:] |= (known[:, 1:] != known[:, :-1]).any(-1)
        return find_pieces(done=done, seams=seams, there=there)

    def _add(self, start: int, pieces: Pieces) -> None:
        """Join `pieces`, whose first step is the position `start`, to the runs that are known."""
        runs, length = self._runs, pieces.end - pieces.first
        known = runs.length.copy()
        goes_on = np.zeros(len(pieces), bool)
        if len(runs):
            last = np.searchsorted(runs.lane, pieces.lane, side="right") - 1  # of the runs of that lane
            ends = runs.begin[last] + runs.length[last]
            goes_on = (pieces.first == 0) & (runs.lane[last] == pieces.lane) & (ends == start + 1)
            known[last[goes_on]] += length[goes_on] - 1
        new = ~goes_on
        lane = np.concatenate((runs.lane, pieces.lane[new]))
        begin = np.concatenate((runs.begin, pieces.first[new] + start))
        self._runs = FrameRuns(lane, begin, np.concatenate((known, length[new])))
        if self._shape[0] > 1:  # within a lane they are in order: they came so
            self._runs = self._runs[np.argsort(lane, kind="stable")]

    def _leave_out_old(self) -> None:
        runs, stop = self._runs, self._runs.begin + self._runs.length
        kept = stop > self._oldest
        begin = np.maximum(runs.begin[kept], self._oldest)
        self._runs = FrameRuns(runs.lane[kept], begin, stop[kept] - begin)


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
        contents.entry(keys[0], np.empty(0, np.int64))
    except KeyError as error:
        details = f" {error.args[0]}" if error.args and isinstance(error.args[0], str) else ""
    return f"Trajectories cannot be told apart: the buffer has no entry {wanted}. Set `{argument}`.{details}"
