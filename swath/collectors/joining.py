"""Putting the parts of several workers together to one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from swath.collectors.workers import Work
from swath.keys import MASK, TRAJ_IDS, Key, nest
from swath.rollout import PADDING_ID

STACK = "stack"


def named(entries: dict[Key, torch.Tensor], batch_size: Sequence[int]) -> TensorDictBase:
    """A batch whose last dimension is time."""
    names = [*(None,) * (len(batch_size) - 1), "time"]
    return TensorDict(nest(entries), batch_size=tuple(batch_size), names=names)


@torch.inference_mode(False)  # batches are trained on, wherever they were asked for
def alone(work: Work, keys: Sequence[Key], batch_size: tuple[int, ...]) -> TensorDictBase:
    """The batch of one worker: `[*batch_size, T]`, over the memory of its slot."""
    assert work.slot is not None
    assert work.receipt is not None
    steps = work.receipt.steps
    if work.arena is not None:
        work.arena.delivered(work.slot)
    return named(work.slot.lend(keys, steps), (*batch_size, steps))


@torch.inference_mode(False)
def joined(
    works: Sequence[Work], keys: Sequence[Key], batch_size: tuple[int, ...], how: Any, *, marks_gaps: bool
) -> TensorDictBase:
    """The parts of all `works` in one batch; `how` is "stack" or a dimension.

    Parts that lie in one slot and are full are joined already: the batch is a view of that slot. Where workers may stop
    early, `marks_gaps`.
    """
    slot = works[0].slot
    assert slot is not None
    if all(work.slot is slot for work in works):
        whole = named(slot.lend(keys, slot.steps), (*slot.batch_size, slot.steps))
        if works[0].arena is not None:
            works[0].arena.delivered(slot)
        if len(works) < slot.batch_size[0]:  # a worker was dropped while its part was under way
            lanes = slot.lanes // slot.batch_size[0]
            whole = _renamed(whole[torch.as_tensor([work.first_row // lanes for work in works])])
        is_full = all(work.receipt is not None and work.receipt.steps == slot.steps for work in works)
        if marks_gaps or not is_full:
            return _with_gaps(whole, works, how)
        return whole if how == STACK else _concatenated_view(whole, how)
    parts = [alone(work, keys, batch_size) for work in works]
    if how != STACK:
        return _concatenated(parts, how)
    if len({part.shape for part in parts}) == 1:
        return _renamed(torch.stack(parts, 0))
    return LazyStackedTensorDict(*parts, stack_dim=0)


def _concatenated_view(whole: TensorDictBase, dim: int) -> TensorDictBase:
    """`[B, *P, T]` with the workers' dimension in another: without a copy where memory allows it."""
    if whole.ndim == 2:  # [B, T]: either way one after the other
        return _renamed(whole.reshape(-1))
    if dim in (0, -whole.ndim + 1):
        return _renamed(whole.flatten(0, 1))
    return _concatenated(list(whole.unbind(0)), dim)


def _concatenated(parts: list[TensorDictBase], dim: int) -> TensorDictBase:
    return _renamed(torch.cat(parts, dim))


def _renamed(batch: TensorDictBase) -> TensorDictBase:
    batch.names = [*(None,) * (batch.ndim - 1), "time"]
    return batch


def _with_gaps(whole: TensorDictBase, works: Sequence[Work], how: Any) -> TensorDictBase:
    """A batch of workers of which some have stopped early: their missing frames are marked, or left out."""
    steps = [work.receipt.steps if work.receipt is not None else 0 for work in works]
    if how != STACK and (whole.ndim == 2 or how in (-1, whole.ndim - 2)):
        return _concatenated([part[..., :count] for part, count in zip(whole.unbind(0), steps, strict=True)], how)
    time = torch.arange(whole.shape[-1])
    here = time < torch.tensor(steps).view(-1, *(1,) * (whole.ndim - 1))  # [B, 1.., T]
    mask = here.expand(whole.shape).clone()
    if (idle := whole.get(MASK, None)) is not None:
        mask &= idle
    if (ids := whole.get(TRAJ_IDS, None)) is not None:
        ids.masked_fill_(~mask, PADDING_ID)
    whole.set(MASK, mask)
    return whole if how == STACK else _concatenated_view(whole, how)
