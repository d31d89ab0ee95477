"""Whole episodes from frames that lie in pieces: in batches, or in a ring of which the oldest part is overwritten.

NOTE [Beginnings] A frame does not say what was before it. The first frame there is of an episode counts as its
beginning if one of these says so, the first that can:

1. `is_init`, where the frames have it;
2. `step_count` of 0, where they have that;
3. the caller, who knows that no frames are missing (`whole=True`);
4. its id. Workers number their episodes in the order in which they begin, and write batch after batch, each lane in one
   piece. So an id that comes again, with others in between, is in a later batch. When that has happened twice, one
   whole batch has passed, and with it all episodes that were running when the oldest frames were written: ids above
   all of those began later;
5. the frame before it, in the same run (no seam between them): that one ended an episode. This is believed only as long
   as no ids come again or go down without a seam, which is how lanes look that were put in a row without telling.

Otherwise the beginning may have been overwritten, and the episode counts as headless. What can still be taken for whole
wrongly: several lanes in a row without seams, in so few frames that no id comes again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from swath.data.contents import Contents
from swath.data.episodes import Episodes, Pieces, cut_off, find_pieces
from swath.keys import FLAGS, IS_INIT, NEXT, STEP_COUNT, TRAJ_IDS, WORKER_BITS, Key, after, nest

PLACE = "_place"
"""Where a frame lies among those that are looked at."""


def episodes_of(
    frames: TensorDictBase,
    seams: Sequence[bool] | np.ndarray | None = None,
    *,
    whole: bool = False,
    keep_headless: bool = False,
    keep_unfinished: bool = False,
    fetch: Callable[[np.ndarray], TensorDictBase] | None = None,
) -> Iterator[TensorDictBase]:
    """The complete episodes `[L]` among `frames` `[M]`, in the order in which they end.

    Pieces with the same `("collector", "traj_ids")` are one episode, however far apart they lie. Frames without ids are
    cut at seams and where an episode ends, and nothing is joined. See NOTE [Beginnings] for what is complete.

    Args:
        frames: in the order of time within each run of frames; frames with a negative id are padding.
        seams: bool `[M]`, True where a frame does not continue the one before it, as where another lane begins. Frame 0
            never does.
        whole: whether no earlier frames are missing, as in a buffer that has never been full.
        keep_headless: give also episodes whose beginning may be missing.
        keep_unfinished: give also episodes without an end, the last frame marked as truncated.
        fetch: a function that gives the frames at some places among the M, in that order. `frames` then need only have
            flags, ids, and `is_init` or `step_count`, and no more than one episode is ever read at a time.
    """
    episodes = Episodes(keep_headless=keep_headless, keep_unfinished=keep_unfinished, copies=False)
    if fetch is not None:
        frames = frames.clone(recurse=False).set(PLACE, torch.arange(len(frames), device="cpu"))
    rows = frames.unsqueeze(0)
    episodes.join(rows, *cut_into_pieces(rows, None if seams is None else np.asarray(seams)[None], whole=whole))
    episodes.drop()
    while episodes.ready:
        episode = episodes.take(1, "cat")
        if fetch is not None:
            episode = fetch(episode.get(PLACE).numpy())
            if not any(flag[-1] for flag in flags_of(episode)):
                episode = cut_off(episode)
        yield episode


def cut_into_pieces(
    rows: TensorDictBase, seams: np.ndarray | None = None, *, whole: bool = False
) -> tuple[Pieces, np.ndarray]:
    """The pieces of frames `[N, T]`, and whether each, if its id is new, begins its episode; see NOTE [Beginnings]."""
    done = np.logical_or(*flags_of(rows))
    seams = np.zeros(done.shape, bool) if seams is None else seams.copy()
    seams[:, :1] = True
    given = rows.get(TRAJ_IDS, None)
    ids = None if given is None else given.reshape(rows.shape).cpu().numpy()
    pieces = find_pieces(ids=ids, done=done, seams=seams)
    if ids is None:
        ids = np.repeat(pieces.name, pieces.end - pieces.first).reshape(done.shape)
    is_init, count = rows.get(IS_INIT, None), rows.get(STEP_COUNT, None)
    if is_init is not None:
        begins = _per_frame(is_init, rows)
    elif count is not None:
        begins = ~_per_frame(count != 0, rows)
    else:
        begins = np.ones_like(seams) if whole else _surely_begun(ids, done, seams)
    return pieces, begins[pieces.lane, pieces.first]


def episodes_in(
    contents: Contents, read: Callable[[np.ndarray], TensorDictBase], **keep: bool
) -> Iterator[TensorDictBase]:
    """The complete episodes that a buffer holds, as `episodes_of` finds them; one is read at a time.

    Frames that are missing in between may have been of any episode, so that none is joined over them.

    Args:
        contents: what there is.
        read: gives the frames of some indices (see `Contents`), in that order.
        keep: `keep_headless` and `keep_unfinished`, as for `episodes_of`.
    """
    positions = np.arange(contents.first, contents.end)
    there = contents.holds(contents.index(positions))
    edges = np.flatnonzero(np.diff(there, prepend=False, append=False))
    for begin, end in edges.reshape(-1, 2).tolist():
        index = contents.in_all_lanes(positions[begin:end])  # [lanes, rows]
        seams = contents.seams[index]
        seams[:, 0] = True
        yield from episodes_of(
            _marks(contents, index.reshape(-1)),
            seams.reshape(-1),
            whole=begin == 0 and contents.first == contents.origin,
            fetch=partial(_read_at, read, index.reshape(-1)),
            **keep,
        )


def _marks(contents: Contents, index: np.ndarray) -> TensorDict:
    """What tells episodes apart, of the frames `index`."""
    entries: dict[Key, Tensor] = {}
    for key in (*map(after, FLAGS), TRAJ_IDS, IS_INIT, STEP_COUNT):
        with contextlib.suppress(KeyError):
            entries[key] = torch.from_numpy(contents.entry(key, index))
    return TensorDict(nest(entries), batch_size=[len(index)])


def _read_at(read: Callable[[np.ndarray], TensorDictBase], index: np.ndarray, places: np.ndarray) -> TensorDictBase:
    return read(index[places])


def _surely_begun(ids: np.ndarray, done: np.ndarray, seams: np.ndarray) -> np.ndarray:
    """Where an episode begins for sure if its id is there for the first time, `[N, T]`; see NOTE [Beginnings]."""
    flat_ids, flat_done, flat_seams = ids.reshape(-1), done.reshape(-1), seams.reshape(-1)
    changes = flat_seams.copy()
    changes[1:] |= (flat_ids[1:] != flat_ids[:-1]) | flat_done[:-1]
    at = np.flatnonzero(changes & (flat_ids >= 0))
    watches: dict[int, _Watch] = {}
    is_interleaved = False
    for place, name in zip(at.tolist(), flat_ids[at].tolist(), strict=True):
        before = int(flat_ids[place - 1]) if place else -1
        comes_again = watches.setdefault(name >> WORKER_BITS, _Watch()).sees(name, place, before == name)
        is_interleaved |= not flat_seams[place] and (comes_again or name < before)
    newest = np.array([watches[name >> WORKER_BITS].newest for name in flat_ids[at].tolist()], np.int64)
    begun = np.zeros(flat_ids.shape, bool)
    begun[at] = flat_ids[at] > newest
    if not is_interleaved:
        begun[1:] |= flat_done[:-1] & ~flat_seams[1:] & (flat_ids[1:] >= flat_ids[:-1])
    return begun.reshape(ids.shape)


class _Watch:
    """Looks out for the end of the first whole batch of one worker, and remembers the newest id until then."""

    def __init__(self) -> None:
        self.newest = -1
        self._seen: dict[int, int] = {}
        self._second: int | None = None
        self._has_passed = False

    def sees(self, name: int, place: int, follows: bool) -> bool:
        """Take note of a piece of `name` at `place`, which may follow another of its own; whether it comes again."""
        last = self._seen.get(name)
        comes_again = last is not None and not follows
        if comes_again and self._second is None:
            self._second = place
        elif comes_again and last is not None and self._second is not None and last >= self._second:
            self._has_passed = True
        self._seen[name] = place
        if not self._has_passed:
            self.newest = max(self.newest, name)
        return comes_again


def flags_of(frames: TensorDictBase) -> tuple[np.ndarray, np.ndarray]:
    """terminated and truncated of each frame, from whichever flags there are."""
    done, terminated, truncated = (_flag(frames, after(key)) for key in FLAGS)
    never = np.zeros(frames.shape, bool)
    if terminated is None:
        if done is None and truncated is None:
            raise KeyError(f"These frames have none of the flags {FLAGS} in {NEXT!r}, which tell where episodes end.")
        terminated = never if done is None else done if truncated is None else done & ~truncated
    if truncated is None:
        truncated = never if done is None else done & ~terminated
    return terminated, truncated


def _flag(frames: TensorDictBase, key: Key) -> np.ndarray | None:
    flag = frames.get(key, None)
    return None if flag is None else _per_frame(flag, frames)


def _per_frame(flag: Tensor, frames: TensorDictBase) -> np.ndarray:
    """A flag `[*frames, ...]` as one bool for each frame."""
    return np.asarray(flag.reshape(*frames.shape, -1).any(-1).cpu().numpy())
