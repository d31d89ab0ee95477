"""Episodes: the one place where frames are cut into episodes, and episodes joined over batches.

`find_pieces` cuts: for `split_trajectories`, for the slices of buffers, for export, and for `Episodes`, which joins the
pieces that come batch by batch.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath.data.stretches import Chunk, Gathering, Stretch, connected, length_of
from swath.entries import trainable, trusted
from swath.errors import LongEpisodeWarning
from swath.keys import (
    DONE,
    MASK,
    NEXT,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    WORKER_BITS,
    after,
)

NEW = 8
"""Batches for which a chunk has room; of large frames, each has its own, and so many are not looked at as most of them
will soon be needed no more."""
LONG = 50_000
"""Frames after which an episode that has not ended is warned of, once."""


@dataclass(frozen=True)
class Pieces:
    """Stretches of frames `[N, T]` that are of one episode each, as arrays `[P]`.

    Attributes:
        lane: the row of each piece.
        first: its first step.
        end: the step after its last one.
        name: the id of its episode.
        is_last: whether its last frame ends the episode.
    """

    lane: np.ndarray
    first: np.ndarray
    end: np.ndarray
    name: np.ndarray
    is_last: np.ndarray

    def __len__(self) -> int:
        return len(self.lane)


def find_pieces(
    *,
    ids: np.ndarray | None = None,
    done: np.ndarray | None = None,
    seams: np.ndarray | None = None,
    there: np.ndarray | None = None,
) -> Pieces:
    """Cut frames `[N, T]`, N lanes each in the order of time, into pieces, lane after lane.

    Args:
        ids: the episode of each frame, told apart from its neighbours. Without ids, pieces are numbered from 0.
        done: which frames end their episode.
        seams: which frames do not continue the one before.
        there: which frames are any; by default those whose id is not negative.
    """
    shape = next(each.shape for each in (ids, done, seams, there) if each is not None)
    cut = np.zeros(shape, bool) if done is None else done.copy()  # after which frames
    if ids is not None:
        cut[:, :-1] |= ids[:, 1:] != ids[:, :-1]
    if seams is not None:
        cut[:, :-1] |= seams[:, 1:]
    if there is not None:
        cut[:, :-1] |= there[:, 1:] != there[:, :-1]
    cut[:, -1:] = True
    end = np.flatnonzero(cut) + 1
    first = np.concatenate(([0], end))[: len(end)]
    real = there.reshape(-1)[first] if there is not None else None if ids is None else ids.reshape(-1)[first] >= 0
    if real is not None:
        first, end = first[real], end[real]
    lane = first // shape[1]
    name = np.arange(len(first)) if ids is None else ids.reshape(-1)[first]
    is_last = np.zeros(len(first), bool) if done is None else done.reshape(-1)[end - 1]
    return Pieces(lane, first - lane * shape[1], end - lane * shape[1], name, is_last)


class _Running:
    """An episode that has not ended yet.

    Attributes:
        source: the worker that it is of.
        is_headless: its beginning went elsewhere, or was given up: what comes of it is dropped.
        pieces: where its frames lie.
        frames: how many they are.
    """

    def __init__(self, source: int, is_headless: bool, pieces: list[Stretch]) -> None:
        self.source, self.is_headless, self.pieces = source, is_headless, pieces
        self.frames = length_of(pieces)


class Episodes:
    """Complete episodes out of frames that come in batches.

    An episode that its worker no longer continues is noticed here, and its frames are counted in `dropped`:

    - If a batch does not begin where the last one of its worker ended, frames went elsewhere in between, or another
      worker has taken the place: all its running episodes are given up. Those that run at the first step of the batch
      have no beginning, so that the rest of them is dropped as it comes, unless the worker began with this batch.
    - Otherwise each batch has frames of all episodes that are running: one that is missing was cut off by a reset.
      Where lanes step at their own pace that is not so, and it is said which episodes ran when the batch began.

    Args:
        keep_headless: keep also episodes whose beginning may be missing.
        keep_unfinished: make complete episodes of those that are given up, the last frame marked as truncated.
        copies: whether frames are copied, as where the memory of a batch is used again.

    Attributes:
        dropped: how many frames were given up.
        left_out: how many episodes were, by cause: "headless" and "unfinished".
    """

    def __init__(self, *, keep_headless: bool = False, keep_unfinished: bool = False, copies: bool = True) -> None:
        self._keep_headless, self._keep_unfinished, self._copies = keep_headless, keep_unfinished, copies
        self._running: dict[int, _Running] = {}
        self._ready: deque[list[Stretch]] = deque()
        self._chunks: list[Chunk] = []
        self._steps: dict[int, int] = {}
        """How many steps each source had made at the end of its last batch."""
        self._held = 0
        self._has_warned = False
        self.dropped = 0
        self.left_out = {"headless": 0, "unfinished": 0}

    @property
    def ready(self) -> int:
        """How many complete episodes wait to be taken."""
        return len(self._ready)

    @property
    def pending_frames(self) -> int:
        """Frames held: of episodes that have not ended yet, and of complete ones. Any thread may ask."""
        return self._held

    def add(
        self,
        frames: TensorDictBase,
        *,
        source: int = 0,
        begin: int | None = None,
        running: np.ndarray | None = None,
    ) -> None:
        """Take in a batch `[..., T]` of the worker `source`. Its frames are copied, and padding (id < 0) left out.

        Args:
            frames: all lanes of the worker, whose last dimension is time.
            source: the worker.
            begin: how many steps the worker had made before this batch; None if that is not known, and then every id
                that is new is taken for a beginning.
            running: the ids of the episodes that ran when this batch began, where they need not all have frames in it.
        """
        ids_of_frames = frames.get(TRAJ_IDS, None)
        if ids_of_frames is None:
            raise KeyError(
                f"Trajectories cannot be put together without {TRAJ_IDS!r}: use track_traj_ids=True with "
                "trajs_per_batch."
            )
        if 0 in frames.shape:
            return
        steps = frames.shape[-1]
        shape = (frames.numel() // steps, steps)
        ids = ids_of_frames.reshape(shape).cpu().numpy()
        done = frames.get((NEXT, DONE)).reshape(*shape, -1).any(-1).cpu().numpy()
        pieces = find_pieces(ids=ids, done=done)
        begins = np.ones(len(pieces), bool)
        expected = self._steps.get(source, 0)
        if begin is not None and begin != expected:  # a discontinuity
            self.forget(source)
            if begin:
                begins = pieces.first > 0 if running is None else ~np.isin(pieces.name, running)
        self._steps[source] = (expected if begin is None else begin) + steps
        if running is not None:
            ours, there = [name for name, one in self._running.items() if one.source == source], set(running.tolist())
            self._give_up([name for name in ours if name not in there])
        self.join(frames, pieces, begins, source, is_all=running is None)

    def join(
        self,
        rows: TensorDictBase,
        pieces: Pieces,
        begins: np.ndarray,
        source: int | None = None,
        *,
        is_all: bool = True,
    ) -> None:
        """Take in `pieces` of `rows` `[..., T]`: all that there is in one batch.

        Args:
            rows: the frames; lanes are counted over all dimensions but the last.
            pieces: where the pieces lie.
            begins: bool `[P]`: whether a piece begins its episode, if its id is new.
            source: the worker that all of them are of; None: each is of the one that its id names.
            is_all: whether an episode that has no piece here was cut off.
        """
        with trainable():
            chunk, place = self._copied(rows) if self._copies else (Chunk(rows.reshape(-1)), 0)
        live = 0
        order = np.lexsort((pieces.name, pieces.end))  # in which they end
        begin = pieces.lane * rows.shape[-1] + place
        firsts, ends, names, lasts, news = (
            each[order].tolist()
            for each in (begin + pieces.first, begin + pieces.end, pieces.name, pieces.is_last, begins)
        )
        all_running, ready, keep_headless = self._running, self._ready, self._keep_headless
        for first, end, name, is_last, is_new in zip(firsts, ends, names, lasts, news, strict=True):
            running = all_running.get(name)
            if running is None:
                is_headless = not (is_new or keep_headless)
                if is_last and not is_headless:  # as most are, where episodes are short: the whole of it is here
                    ready.append([Stretch(chunk, first, end)])
                    live += end - first
                    continue
                self.left_out["headless"] += is_headless
                running = _Running(name >> WORKER_BITS if source is None else source, is_headless, [])
                all_running[name] = running
            if running.is_headless:
                self.dropped += end - first
            else:
                running.pieces.append(Stretch(chunk, first, end))
                running.frames += end - first
                live += end - first
            if is_last:
                del all_running[name]
                if not running.is_headless:
                    ready.append(running.pieces)
        chunk.live += live
        self._held += live
        if not self._has_warned:
            self._warn_if_long()
        sources = {name >> WORKER_BITS for name in names} if source is None else {source} if names else set()
        if is_all:
            seen = set(names)
            self._give_up([n for n, one in self._running.items() if n not in seen and one.source in sources])

    def _copied(self, rows: TensorDictBase) -> tuple[Chunk, int]:
        """A copy of `rows`: the chunk that they are in, and from where on.

        There is room for some batches in a chunk, unless frames are large. Where a new one begins, it also gets what
        is still needed of those that hold little else: so no batch is kept for a few frames, and the pieces of an
        episode mostly lie in one chunk. A frame is copied about once more, as others are let go for those copied.
        """
        chunk, count = Chunk(rows), rows.numel()
        last = self._chunks[-1] if self._chunks else chunk
        if last.room >= count and last.form == chunk.form:
            last.append(chunk)
            return last, last.size - count
        recent = self._chunks[-NEW:] if chunk.is_large else []
        sparse = {one for one in self._chunks if one.is_sparse and one not in recent and one.form == chunk.form}
        held = [*self._ready, *(running.pieces for running in self._running.values())] if sparse else []
        carried = [one for pieces in held for one in pieces if one.chunk in sparse]
        moved = iter(chunk.copy(carried, 0 if chunk.is_large else (NEW - 1) * count))
        for pieces in held:
            pieces[:] = connected([next(moved) if one.chunk in sparse else one for one in pieces])
        self._chunks = [*(one for one in self._chunks if one not in sparse), chunk]
        return chunk, 0

    def _warn_if_long(self) -> None:
        """Say once that frames may pile up."""
        running = next((one for one in self._running.values() if one.frames >= LONG), None)
        if running is None:
            return
        self._has_warned = True
        frames = running.pieces[-1].slice()
        held = self._held * frames.bytes() // len(frames) // 2**20
        warnings.warn(
            f"An episode has {running.frames:,} frames and has not ended. Whole episodes are "
            f"asked for (trajs_per_batch), so that its frames are kept until it does: {held:,} MB are held by now, and "
            "more with every batch. If episodes need not end, cut them off: max_frames_per_traj=1000.",
            LongEpisodeWarning,
            stacklevel=2,
        )

    def lengths(self, count: int) -> list[int]:
        """The lengths of the next `count` complete episodes."""
        return [length_of(episode) for episode in islice(self._ready, count)]

    def take(self, count: int, form: str) -> TensorDictBase:
        """The next `count` complete episodes: "padded" to `[count, longest]` with a mask, or "cat" after each other."""
        episodes = [self._ready.popleft() for _ in range(count)]
        lengths = list(map(length_of, episodes))
        self._held -= sum(lengths)
        for episode in episodes:
            for chunk, first, end in episode:
                chunk.live -= end - first
        with trainable():  # episodes are trained on, wherever they were asked for
            if form == "padded":
                return _padded(episodes, lengths)
            stretches = [stretch for episode in episodes for stretch in episode]
            return _joined(stretches).apply(torch.clone) if self._copies and len(stretches) == 1 else _joined(stretches)

    def forget(self, source: int) -> None:
        """Give up the running episodes of `source`, which will not be continued; it begins anew if it comes again."""
        self._give_up([name for name, running in self._running.items() if running.source == source])
        self._steps.pop(source, None)

    def drop(self) -> None:
        """Give up all running episodes, and what is still to come of them."""
        running = {name: one.source for name, one in self._running.items()}
        self._give_up(running)
        self._running = {name: _Running(source, True, []) for name, source in running.items()}

    def clear(self) -> None:
        """Give up everything, also complete episodes that nobody took."""
        self.drop()
        self.dropped += self._held
        self._held = 0
        self._ready.clear()
        self._chunks.clear()

    def _give_up(self, names: Iterable[int]) -> None:
        for name in sorted(names):
            running = self._running.pop(name)
            if running.is_headless:
                continue
            if self._keep_unfinished:
                with trainable():
                    self._ready.append(_whole(cut_off(_joined(running.pieces))))
                continue
            for stretch in running.pieces:
                stretch.chunk.live -= stretch.size
            self._held -= running.frames
            self.dropped += running.frames
            self.left_out["unfinished"] += 1

    def state_dict(self) -> dict[str, Any]:
        """All frames held, and what is known of workers."""
        return {
            "running": {
                name: {
                    "source": running.source,
                    "is_headless": running.is_headless,
                    "pieces": [piece.slice().clone().to_dict() for piece in running.pieces],
                }
                for name, running in self._running.items()
            },
            "ready": [_joined(episode).clone().to_dict() for episode in self._ready],
            "steps": dict(self._steps),
            "dropped": self.dropped,
            "left_out": dict(self.left_out),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold again what was saved."""
        self._running = {
            int(name): _Running(
                saved["source"], saved["is_headless"], [one for piece in saved["pieces"] for one in _restored(piece)]
            )
            for name, saved in state["running"].items()
        }
        self._ready = deque(map(_restored, state["ready"]))
        self._held = sum(map(length_of, self._ready)) + sum(running.frames for running in self._running.values())
        self._steps = {int(source): steps for source, steps in state["steps"].items()}
        self.dropped, self.left_out = state["dropped"], dict(state["left_out"])


def padded(episodes: list[TensorDictBase]) -> TensorDict:
    """Episodes `[L]` as one `[N, longest]`: zeros behind each, ids -1 there, and a mask of what is real."""
    return _padded([_whole(episode) for episode in episodes], list(map(len, episodes)))


def _padded(episodes: list[list[Stretch]], lengths: list[int]) -> TensorDict:
    shape = (len(episodes), max(lengths))
    mask = np.arange(shape[1]) < np.array(lengths)[:, None]  # [N, longest]
    entries = Gathering(episodes, mask).entries()
    entries[MASK] = torch.from_numpy(mask)
    if (device := entries[after(DONE)].device).type != "cpu":
        entries[MASK] = entries[MASK].to(device)
    return trusted(entries, shape, episodes[0][0].chunk.device)


def cut_off(episode: TensorDictBase) -> TensorDictBase:
    """`episode` with its last frame marked as truncated, in a TensorDict of its own."""
    marked = episode.clone(recurse=False)
    done, truncated = marked.get(after(DONE), None), marked.get(after(TRUNCATED), None)
    example = next(flag for flag in (truncated, done, marked.get(after(TERMINATED), None)) if flag is not None)
    for key, flag in ((DONE, done), (TRUNCATED, truncated)):
        mark = torch.zeros_like(example) if flag is None else flag.clone()
        mark[-1] = True
        marked.get(NEXT).set(key, mark)
    return marked


def _joined(pieces: list[Stretch]) -> TensorDictBase:
    """One after the other: as they lie, if there is but one."""
    if len(pieces) == 1:
        return pieces[0].slice()
    return trusted(Gathering([pieces]).entries(), (length_of(pieces),), pieces[0].chunk.device, names=["time"])


def _whole(frames: TensorDictBase) -> list[Stretch]:
    chunk = Chunk(frames)
    chunk.copy()
    return [Stretch(chunk, 0, len(frames))]


def _restored(entries: dict[str, Any]) -> list[Stretch]:
    return _whole(TensorDict(entries, batch_size=[entries[NEXT][DONE].shape[0]]))
