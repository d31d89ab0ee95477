"""split_trajectories: the episodes of a batch, one per row."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from swath.data.episodes import find_pieces
from swath.keys import COLLECTOR, DONE, NEXT, PADDING_ID, TRAJ_IDS, Key, as_key, as_path, nest, under
from swath.runtime.columns import writable

ID_NAME = as_path(TRAJ_IDS)[-1]
MASK_NAME = "mask"


@torch.inference_mode(False)  # what comes of it is trained on, wherever it was asked for
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
    written. Rows come in the order of the frames; two separate runs of one id (as when batches are put behind each
    other) are two rows. Padded ids are -1. Frames whose id is negative are no frames, and left out.

    Args:
        rollout: the batch; its last dimension is time.
        prefix: name of the nested TensorDict with ids and mask; "collector" where there is one.
        trajectory_key: key of the ids, instead of `(prefix, "traj_ids")`.
        done_key: key inside "next" that ends a trajectory when there are no ids.
        as_nested: nested tensors instead of padding and mask.
    """
    if rollout.ndim == 0:
        raise ValueError("split_trajectories needs a time dimension, but the batch size is empty.")
    if prefix is None and rollout.get(COLLECTOR, None) is not None:
        prefix = COLLECTOR
    id_key = as_key(trajectory_key or (ID_NAME if prefix is None else under(prefix, ID_NAME)))
    *parents, _ = as_path(id_key)
    mask_key = as_key((*parents, MASK_NAME))
    ids, steps = rollout.get(id_key, None), rollout.shape[-1]
    if ids is None:
        done = _done_of(rollout, as_key(done_key or DONE))
        pieces = find_pieces(done=done.reshape(-1, steps).cpu().numpy())
        names = np.repeat(pieces.name, pieces.end - pieces.first)
        ids = torch.from_numpy(names).reshape(rollout.shape).to(done.device)
        rollout = rollout.copy().set(id_key, ids)
    else:
        pieces = find_pieces(ids=ids.reshape(-1, steps).cpu().numpy())
    starts, lengths = pieces.lane * steps + pieces.first, pieces.end - pieces.first
    flat = rollout.reshape(-1)
    if as_nested:
        return _nested(flat, starts, lengths)
    times = torch.arange(lengths.max(initial=0), device="cpu")
    mask = times < torch.from_numpy(lengths)[:, None]  # [trajectories, longest]
    index = torch.zeros(mask.shape, dtype=torch.int64, device="cpu")
    index[mask] = torch.from_numpy(_ranges(starts, lengths))
    mask, index = mask.to(ids.device), index.to(ids.device)
    split = flat[index.reshape(-1)].reshape(*mask.shape)
    split = split.apply(lambda leaf: _fill_outside(leaf, mask, 0))
    _fill_outside(split.get(id_key), mask, PADDING_ID)
    split.set(mask_key, mask)
    if rollout.names[-1] is not None:
        split.names = [None, rollout.names[-1]]
    return split


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`start, start + 1, ...` of every run, one run after the other."""
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(starts - offsets, lengths) + np.arange(int(lengths.sum()))


def _fill_outside(leaf: Tensor, mask: Tensor, value: int) -> Tensor:
    """Put `value` wherever `mask` is not."""
    writable(leaf).masked_fill_(~mask.view(*mask.shape, *(1,) * (leaf.ndim - mask.ndim)), value)
    return leaf


def _done_of(rollout: TensorDictBase, done_key: Key) -> Tensor:
    """Which frames end their trajectory, `rollout.shape`."""
    key = under(NEXT, done_key)
    done: Tensor | None = rollout.get(key, None)
    if done is None:
        there = sorted(map(str, rollout.keys()))
        raise KeyError(f"split_trajectories found neither trajectory ids nor {key!r} in {there}.")
    return done.reshape(*rollout.shape, -1).any(-1)


def _nested(flat: TensorDictBase, starts: np.ndarray, lengths: np.ndarray) -> TensorDict:
    """All entries over the same offsets, so that they can be computed with together."""
    order = torch.from_numpy(_ranges(starts, lengths))
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    entries: dict[Key, Tensor] = {}
    for key in flat.keys(True, True):
        leaf = flat.get(key)
        values = leaf[order.to(leaf.device)]
        entries[as_key(key)] = torch.nested.nested_tensor_from_jagged(values, offsets.to(leaf.device))
    return TensorDict(nest(entries), batch_size=[len(lengths)])
