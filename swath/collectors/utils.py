"""split_trajectories: the episodes of a batch, one per row."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from swath.keys import COLLECTOR, DONE, NEXT, TRAJ_IDS, Key, as_key, as_path, nest, under
from swath.rollout.trajectories import PADDING_ID

ID_NAME = as_path(TRAJ_IDS)[-1]
MASK_NAME = "mask"


def split_trajectories(
    rollout: TensorDictBase,
    *,
    prefix: str | None = None,
    trajectory_key: Key | None = None,
    done_key: Key | None = None,
    as_nested: bool = False,
) -> TensorDictBase:
    """Split `rollout` `[..., T]` into its trajectories: `[trajectories, longest]`, padded with zeros, with a mask.

    Trajectories are told apart by their ids; without ids, by where `("next", "done")` ends them, and the ids found are
    written. Rows come in the order of the frames; two separate runs of one id (as when batches are put behind each other)
    are two rows. Padded ids are -1. Frames whose id is negative are no frames, and left out.

    Args:
        rollout: the batch; its last dimension is time.
        prefix: name of the nested TensorDict with ids and mask; "collector" where there is one.
        trajectory_key: key of the ids, instead of `(prefix, "traj_ids")`.
        done_key: key inside "next" that ends a trajectory when there are no ids.
        as_nested: nested tensors instead of padding and mask.
    """
    if rollout.ndim == 0:
        raise ValueError("split_trajectories needs a time dimension, but the batch size is empty.")
    if prefix is None and COLLECTOR in rollout.keys():
        prefix = COLLECTOR
    id_key = as_key(trajectory_key) if trajectory_key is not None else _named(prefix, ID_NAME)
    *parents, _ = as_path(id_key)
    mask_key = as_key((*parents, MASK_NAME))
    names = rollout.names
    rollout = rollout.copy()
    shape = rollout.shape
    ids = rollout.get(id_key, None)
    if ids is None:
        ids = _ids_from_done(rollout, as_key(done_key or DONE))
        rollout.set(id_key, ids)
    runs = ids.reshape(-1, shape[-1]).cpu().numpy()  # [rows, T]
    change = np.ones(runs.shape, dtype=bool)
    change[:, 1:] = runs[:, 1:] != runs[:, :-1]
    starts = np.flatnonzero(change)
    lengths = np.diff(np.append(starts, runs.size))
    real = runs.reshape(-1)[starts] >= 0
    starts, lengths = starts[real], lengths[real]
    flat = rollout.reshape(-1)
    if as_nested:
        pieces = [flat[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
        return _nested(pieces)
    longest = int(lengths.max()) if len(lengths) else 0
    device = ids.device
    mask = torch.arange(longest) < torch.from_numpy(lengths)[:, None]  # [trajectories, longest]
    index = torch.zeros(mask.shape, dtype=torch.int64)
    index[mask] = torch.from_numpy(_ranges(starts, lengths))
    mask, index = mask.to(device), index.to(device)
    split = flat[index.reshape(-1)].reshape(*mask.shape)
    split = split.apply(lambda leaf: _blank(leaf, mask))
    split.set(id_key, split.get(id_key).masked_fill(~mask, PADDING_ID))
    split.set(mask_key, mask)
    if names and names[-1] is not None:
        split.names = [None, names[-1]]
    return split


def _named(prefix: str | None, name: str) -> Key:
    return name if prefix is None else under(prefix, name)


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`start, start + 1, ...` of every run, one run after the other."""
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(starts - offsets, lengths) + np.arange(int(lengths.sum()))


def _blank(leaf: Tensor, mask: Tensor) -> Tensor:
    """Zeros outside the mask."""
    outside = ~mask
    return leaf.masked_fill_(outside.view(*mask.shape, *(1,) * (leaf.ndim - mask.ndim)), 0)


def _ids_from_done(rollout: TensorDictBase, done_key: Key) -> Tensor:
    """Number the trajectories by where they end; a new row always begins a new one."""
    done = rollout.get((NEXT, *as_path(done_key)), None)
    if done is None:
        raise KeyError(
            f"split_trajectories found neither trajectory ids nor {(NEXT, *as_path(done_key))!r} in {sorted(map(str, rollout.keys()))}."
        )
    steps = rollout.shape[-1]
    ended = done.reshape(*rollout.shape, -1).any(-1).reshape(-1, steps)
    begins = torch.ones_like(ended)
    begins[:, 1:] = ended[:, :-1]
    return (begins.reshape(-1).cumsum(0) - 1).reshape(rollout.shape)


def _nested(pieces: list[TensorDictBase]) -> TensorDict:
    entries = {
        as_key(key): torch.nested.nested_tensor([piece.get(key) for piece in pieces])
        for key in pieces[0].keys(True, True)
    }
    return TensorDict(nest(entries), batch_size=[len(pieces)])
