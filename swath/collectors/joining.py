"""Putting the parts of several workers together to one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from swath.collectors.delivery import Part
from swath.entries import trainable
from swath.keys import MASK, PADDING_ID, TRAJ_IDS, Key

STACK = "stack"


def each_part(parts: Sequence[Part], keys: Sequence[Key]) -> list[TensorDictBase]:
    """The batch of each worker: `[*batch_size, T]`, over the memory of its slot."""
    if parts[0].row is not None:
        whole = _whole(parts, keys)
        with trainable():
            return [whole[part.row][..., : part.collected.steps] for part in parts]
    return [alone(part, keys) for part in parts]


def alone(part: Part, keys: Sequence[Key], steps: int | None = None) -> TensorDictBase:
    """The batch of a worker whose slot is its own: the steps that it has made, or so many."""
    slot, arena = part.slot, part.arena
    assert slot is not None
    assert arena is not None
    batch = slot.batch(keys, part.collected.steps if steps is None else steps)
    if slot.is_shared:
        arena.delivered(slot)
    part.claim = None  # from now on the batch holds the slot
    return batch


def _whole(parts: Sequence[Part], keys: Sequence[Key]) -> TensorDictBase:
    """The one slot that all parts lie in."""
    slot = parts[0].slot
    assert slot is not None
    batch = alone(parts[0], keys, slot.steps)
    for part in parts:
        part.claim = None
    return batch


def joined(parts: Sequence[Part], keys: Sequence[Key], how: int | str, *, marks_gaps: bool) -> TensorDictBase:
    """The parts in one batch; `how` is "stack" or a dimension.

    Parts that lie in one slot and are full are joined already: the batch is a view of that slot. Where workers may stop
    early, `marks_gaps`.
    """
    with trainable():
        return _joined(parts, keys, how, marks_gaps)


def _joined(parts: Sequence[Part], keys: Sequence[Key], how: int | str, marks_gaps: bool) -> TensorDictBase:
    slot = parts[0].slot
    assert slot is not None
    if parts[0].row is not None:
        whole, rows = _whole(parts, keys), [part.row for part in parts]
        if len(parts) < slot.batch_size[0]:  # a worker was dropped while its part was under way
            whole = named(whole[torch.as_tensor(rows, device="cpu")])
        is_full = all(part.collected.steps == slot.steps for part in parts)
        if marks_gaps or not is_full:
            return _with_gaps(whole, parts, how)
        return whole if how == STACK else _concatenated_view(whole, how)
    batches = [alone(part, keys) for part in parts]
    if how != STACK:
        return named(torch.cat(batches, int(how)))
    if len({batch.shape for batch in batches}) == 1:
        return named(torch.stack(batches, 0))
    return LazyStackedTensorDict(*batches, stack_dim=0)


def _concatenated_view(whole: TensorDictBase, dim: int | str) -> TensorDictBase:
    """`[B, *P, T]` with the workers' dimension in another: without a copy where memory allows it."""
    if whole.ndim == 2:  # [B, T]: either way one after the other
        return named(whole.reshape(-1))
    if dim in (0, -whole.ndim + 1):
        return named(whole.flatten(0, 1))
    return named(torch.cat(list(whole.unbind(0)), int(dim)))


def named(batch: TensorDictBase) -> TensorDictBase:
    """`batch`, whose last dimension is time."""
    batch.names = [*(None,) * (batch.ndim - 1), "time"]
    return batch


def _with_gaps(whole: TensorDictBase, parts: Sequence[Part], how: int | str) -> TensorDictBase:
    """A batch of workers of which some have stopped early: their missing frames are marked, or left out."""
    steps = [part.collected.steps for part in parts]
    if how != STACK and (whole.ndim == 2 or how in (-1, whole.ndim - 2)):
        pieces = [piece[..., :count] for piece, count in zip(whole.unbind(0), steps, strict=True)]
        return named(torch.cat(pieces, int(how)))
    time = torch.arange(whole.shape[-1], device="cpu")
    here = time < torch.tensor(steps, device="cpu").view(-1, *(1,) * (whole.ndim - 1))  # [B, 1.., T]
    mask = here.expand(whole.shape).clone()
    if (idle := whole.get(MASK, None)) is not None:
        mask &= idle
    if (ids := whole.get(TRAJ_IDS, None)) is not None:
        ids.masked_fill_(~mask, PADDING_ID)
    whole.set(MASK, mask)
    return whole if how == STACK else _concatenated_view(whole, how)
