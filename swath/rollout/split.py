"""split_trajectories: the episodes of a batch, one per row."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from swath.data.episodes import find_pieces
from swath.data.stretches import LARGE, PADDING
from swath.entries import first_entries, leaves_of, trusted
from swath.keys import COLLECTOR, DONE, NEXT, PADDING_ID, TRAJ_IDS, Key, as_key, as_path, nest, under
from swath.runtime.columns import array_of, tensor_of, writable

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
    if as_nested:
        return _nested(rollout.reshape(-1), starts, lengths)
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]  # [trajectories, longest]
    index = np.where(mask, starts[:, None] + np.arange(mask.shape[1]), PADDING)
    dims = None if rollout.names[-1] is None else [None, rollout.names[-1]]
    if _is_plain(rollout, rollout.batch_size):
        entries: dict[Key, Tensor] = {}
        for key, leaf in leaves_of(rollout).items():
            frames = array_of(leaf).reshape(rollout.numel(), *leaf.shape[rollout.ndim :])
            entries[key] = tensor_of(_in_rows(frames, index, PADDING_ID if key == id_key else 0), leaf.dtype)
        entries[mask_key] = torch.from_numpy(mask)
        return trusted(entries, mask.shape, rollout.device, names=dims)
    there = torch.from_numpy(mask).to(ids.device)
    split = rollout.reshape(-1)[torch.from_numpy(index.reshape(-1)).to(ids.device)].reshape(*mask.shape)
    split = split.apply(lambda leaf: _fill_outside(leaf, there, 0))
    _fill_outside(split.get(id_key), there, PADDING_ID)
    split.set(mask_key, there)
    if dims is not None:
        split.names = dims
    return split


def _is_plain(tensordict: TensorDictBase, size: torch.Size) -> bool:
    """Whether there is nothing in it but tensors on the CPU, without gradients, in TensorDicts of one batch size."""
    return type(tensordict) is TensorDict and all(
        value.is_cpu and not value.requires_grad and not value.is_neg() and not value.is_conj()
        if type(value) is Tensor
        else _is_plain(value, size) and value.batch_size == size
        for value in first_entries(tensordict).values()
    )


def _in_rows(frames: np.ndarray, index: np.ndarray, padding: int) -> np.ndarray:
    """The frames `index` `[trajectories, longest]`, with a frame of `padding` behind them that it may ask for.

    Large frames are not copied once more for that.
    """
    if frames[:1].nbytes <= LARGE:
        return np.concatenate((frames, np.full_like(frames, padding, shape=(1, *frames.shape[1:])))).take(index, 0)
    rows = frames.take(index, 0)
    rows[index == PADDING] = padding
    return rows


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
    ends = np.cumsum(lengths)
    order = torch.from_numpy(np.repeat(starts - ends + lengths, lengths) + np.arange(int(lengths.sum())))
    offsets = torch.from_numpy(np.concatenate([[0], ends]))
    entries: dict[Key, Tensor] = {}
    for key in flat.keys(True, True):
        leaf = flat.get(key)
        values = leaf[order.to(leaf.device)]
        entries[as_key(key)] = torch.nested.nested_tensor_from_jagged(values, offsets.to(leaf.device))
    return TensorDict(nest(entries), batch_size=[len(lengths)])
