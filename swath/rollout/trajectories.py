"""Trajectories: their ids, and whole episodes put together from batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from swath.keys import DONE, MASK, NEXT, TRAJ_IDS, Key, as_key, nest

WORKER_BITS = 40
"""An id is (worker << 40 | counter): unique over workers, and in order within one."""
PADDING_ID = -1
"""The id of what is no frame: padding, and lanes that were idle."""


class TrajectoryIds:
    """Gives every trajectory of every lane its number."""

    def __init__(self, lanes: int, worker: int = 0) -> None:
        """Number the lanes' first trajectories."""
        self._worker = worker << WORKER_BITS
        self.count = lanes
        """How many ids were ever given out."""
        self.current = self._worker + np.arange(lanes, dtype=np.int64)
        """The id of each lane's running trajectory."""

    def renew(self, lanes: Iterable[int]) -> None:
        """Give new ids to `lanes`, whose trajectories were cut off."""
        for lane in lanes:
            self.current[lane] = self._worker + self.count
            self.count += 1

    def renumber(self, worker: int) -> None:
        """Number the lanes' trajectories as another worker's, from the first on."""
        self._worker, self.count = worker << WORKER_BITS, 0
        self.renew(range(len(self.current)))

    def restore(self, count: int) -> None:
        """Go on after `count` ids given out elsewhere: none of them is used again."""
        self.count = count
        self.renew(range(len(self.current)))

    def assign(self, done: np.ndarray, out: np.ndarray) -> None:
        """Write the id of every frame to `out` `[N, T]`, where `done` `[N, T]` marks last frames.

        New trajectories are numbered in the order in which they begin, lanes in order where they begin together.
        """
        ends = np.cumsum(done, axis=1)
        before = ends - done  # how many trajectories of this lane have ended before each frame
        counts = ends[:, -1]
        first = np.cumsum(counts + 1) - (counts + 1)  # where each lane's ids begin in the table
        lane, step = np.nonzero(done)
        order = np.lexsort((lane, step))
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        table = np.empty(len(order) + len(done), dtype=np.int64)
        table[first] = self.current
        table[first[lane] + ends[lane, step]] = self._worker + self.count + rank
        out[:] = table[first[:, None] + before]
        self.current = table[first + counts]
        self.count += len(order)


class TrajectoryAssembler:
    """Turns fixed-frame batches into complete episodes; unfinished ones wait for the next batch."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._open: dict[int, list[TensorDictBase]] = {}
        self._ready: deque[TensorDictBase] = deque()
        self._torn: set[int] = set()
        self.dropped = 0
        """Frames that were given up: of unfinished episodes at a reset or at the end."""

    @property
    def ready(self) -> int:
        """How many complete episodes wait to be taken."""
        return len(self._ready)

    @property
    def open(self) -> list[int]:
        """The ids of unfinished episodes."""
        return list(self._open)

    @property
    def pending_frames(self) -> int:
        """Frames held: of episodes that have not ended yet, and of complete ones that nobody has taken."""
        # Copies: another thread may be collecting.
        pieces = [piece for pieces in list(self._open.values()) for piece in list(pieces)]
        return sum(piece.shape[0] for piece in (*pieces, *list(self._ready)))

    @torch.inference_mode(False)  # episodes are trained on, wherever they were asked for
    def add(self, batch: TensorDictBase) -> None:
        """Take in a batch `[..., T]`. Its frames are copied, so that the batch itself can go back."""
        ids_of_batch = batch.get(TRAJ_IDS, None)
        if ids_of_batch is None:
            raise KeyError(
                f"Trajectories cannot be put together without {TRAJ_IDS!r}: use track_traj_ids=True with "
                "trajs_per_batch."
            )
        rows = batch.reshape(-1, batch.shape[-1]) if batch.ndim > 1 else batch.unsqueeze(0)
        ids = ids_of_batch.reshape(rows.shape).cpu().numpy()
        done = batch.get((NEXT, DONE)).reshape(*rows.shape, -1).any(-1).cpu().numpy()
        cuts = []  # (last step, id, lane, first step): sorted, this is the order in which pieces end
        for lane in range(ids.shape[0]):
            ends = np.flatnonzero(np.concatenate([ids[lane, 1:] != ids[lane, :-1], [True]]) | done[lane])
            begin = 0
            for end in ends.tolist():
                if ids[lane, end] >= 0:
                    cuts.append((end, int(ids[lane, end]), lane, begin))
                begin = end + 1
        for end, name, lane, begin in sorted(cuts):
            if name in self._torn:
                self.dropped += end + 1 - begin
                if done[lane, end]:
                    self._torn.remove(name)
                continue
            self._open.setdefault(name, []).append(rows[lane, begin : end + 1].clone())
            if done[lane, end]:
                pieces = self._open.pop(name)
                self._ready.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, 0))

    def lengths(self, count: int) -> list[int]:
        """The lengths of the next `count` complete episodes."""
        return [episode.shape[0] for episode in islice(self._ready, count)]

    @torch.inference_mode(False)
    def take(self, count: int, form: str) -> TensorDictBase:
        """The next `count` complete episodes: "padded" to `[count, longest]` with a mask, or "cat" after each other."""
        episodes = [self._ready.popleft() for _ in range(count)]
        return padded(episodes) if form == "padded" else torch.cat(episodes, 0)

    def tear(self, ids: Iterable[int], running: Iterable[int]) -> None:
        """Frames of the trajectories `ids` went elsewhere: give them up, and what is to come of those `running`."""
        torn = set(ids)
        self.drop(torn)
        self._torn |= torn.intersection(running)

    def drop(self, ids: Iterable[int] | None = None) -> None:
        """Give up unfinished episodes: those of `ids`, or all of them."""
        for name in list(self._open) if ids is None else ids:
            self.dropped += sum(piece.shape[0] for piece in self._open.pop(int(name), ()))
            self._torn.discard(int(name))

    def clear(self) -> None:
        """Give up everything, also complete episodes that nobody took."""
        self.drop()
        self.dropped += sum(episode.shape[0] for episode in self._ready)
        self._ready.clear()

    def state_dict(self) -> dict[str, Any]:
        """All frames held."""
        return {
            "open": {name: [p.to_dict() for p in pieces] for name, pieces in self._open.items()},
            "ready": [episode.to_dict() for episode in self._ready],
            "dropped": self.dropped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold again what was saved."""
        self._open = {int(n): [_restored(p) for p in pieces] for n, pieces in state["open"].items()}
        self._ready = deque(_restored(episode) for episode in state["ready"])
        self.dropped = state["dropped"]


def _restored(entries: dict[str, Any]) -> TensorDict:
    steps = entries[NEXT][DONE].shape[0]
    return TensorDict(entries, batch_size=[steps])


def padded(episodes: list[TensorDictBase]) -> TensorDict:
    """Episodes `[L]` as one `[N, longest]`: zeros behind each, ids -1 there, and a mask of what is real."""
    lengths = torch.tensor([episode.shape[0] for episode in episodes])
    shape = (len(episodes), int(lengths.max()))
    entries: dict[Key, Tensor] = {}
    for key in episodes[0].keys(True, True):
        leaves = [episode.get(key) for episode in episodes]
        out = leaves[0].new_zeros(*shape, *leaves[0].shape[1:])
        for row, leaf in zip(out, leaves, strict=True):
            row[: leaf.shape[0]] = leaf
        entries[as_key(key)] = out
    mask = torch.arange(shape[1]) < lengths[:, None]  # [N, longest]
    mask = mask.to(episodes[0].get((NEXT, DONE)).device)
    if TRAJ_IDS in entries:
        entries[TRAJ_IDS].masked_fill_(~mask, PADDING_ID)
    entries[MASK] = mask
    return TensorDict(nest(entries), batch_size=shape, device=episodes[0].device)
