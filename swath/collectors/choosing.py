"""Which lanes of which workers are meant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def lanes_by_worker(index: Any, shape: Sequence[int], count: int, workers: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The lanes at `index` of each of `workers`, of which there are `count` with lanes of `shape`.

    Lanes are counted over all of them, one worker after the other: indices, or True for each.
    """
    if not shape and count == 1:
        raise RuntimeError("reset(index) chooses among lanes, but this env has no batch dimension.")
    lanes = math.prod(shape)
    picked = torch.as_tensor(index, device="cpu")
    numbers = torch.arange(lanes * count, device="cpu")
    if picked.dtype == torch.bool and picked.numel() == numbers.numel():
        picked = picked.reshape(-1)
    elif len(shape) > 1:
        numbers = numbers.view(-1, *shape[1:])
    found = numbers[picked if picked.numel() else picked.long()].unique().tolist()
    own = {one: tuple(lane - one * lanes for lane in found if lane // lanes == one) for one in workers}
    return {one: chosen for one, chosen in own.items() if chosen}
