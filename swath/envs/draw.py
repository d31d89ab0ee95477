"""Random values of gymnasium spaces, many at once and from torch's generators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor
from torch.nn.functional import one_hot

from swath.envs.rows import Leaf

Draw = Callable[[torch.Generator | None], Tensor]
"""What draws values, each time that it is called; it may write over those that it drew before."""


def drawer(space: gs.Space[Any], leaf: Leaf, shape: tuple[int, ...]) -> Draw:
    """What draws `shape` random values of a space that is one leaf, encoded as `leaf` says: `[*shape, *leaf.shape]`."""
    if isinstance(space, gs.Discrete):
        draw = _integers(int(space.n), shape)
        if leaf.shape == (space.n,):
            draw = partial(_one_hot, draw, int(space.n))
    elif isinstance(space, gs.MultiDiscrete):
        sizes = [int(n) for n in space.nvec.reshape(-1)]
        parts = [_integers(n, shape) for n in sizes]
        if leaf.shape == (sum(sizes),):
            ones = [partial(_one_hot, part, n) for part, n in zip(parts, sizes, strict=True)]
            draw = lambda generator: torch.cat([part(generator) for part in ones], -1)  # noqa: E731
        else:
            draw = lambda generator: torch.stack([part(generator) for part in parts], -1)  # noqa: E731
    elif isinstance(space, gs.MultiBinary):
        draw = _integers(2, (*shape, *leaf.shape))
    else:
        assert isinstance(space, gs.Box)
        draw = _box(space, shape)
    if leaf.dtype is torch.int64 and leaf.shape == ():
        return draw
    return lambda generator: draw(generator).view(*shape, *leaf.shape).to(leaf.dtype)


def _integers(n: int, shape: tuple[int, ...]) -> Draw:
    """From 0 to `n`, into the same memory each time: of few numbers, to find some takes longer than to draw them."""
    with torch.inference_mode(False):  # it may be written to in another mode than now
        memory = torch.empty(shape, dtype=torch.int64, device="cpu")
    return lambda generator: memory.random_(0, n) if generator is None else memory.random_(0, n, generator=generator)


def _one_hot(draw: Draw, n: int, generator: torch.Generator | None) -> Tensor:
    return one_hot(draw(generator), n)


def _box(space: gs.Box, shape: tuple[int, ...]) -> Draw:
    """Uniform between two bounds, exponential from one, normal without any, rounded down to integers: as gymnasium.

    Computed in float64, which holds the bounds of every type but 64-bit integers.
    """
    shape = (*shape, *space.shape)
    whole = space.dtype.kind in "iub"
    low, high = (torch.from_numpy(bound.astype(np.float64)) for bound in (space.low, space.high))
    below, above = torch.from_numpy(space.bounded_below), torch.from_numpy(space.bounded_above)
    top = high + 1 if whole else high
    is_bounded = bool((below & above).all())
    if whole and space.dtype.itemsize == 8:  # what rounds up beyond the largest integer would wrap around
        high = high.clamp(max=float(np.nextafter(2.0 ** (64 if space.dtype.kind == "u" else 63), 0)))
    first, last = low.expand(shape), top.expand(shape)

    def draw(generator: torch.Generator | None) -> Tensor:
        share = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
        values = torch.lerp(first, last, share)
        if not is_bounded:
            tail = torch.empty(shape, dtype=torch.float64, device="cpu").exponential_(generator=generator)
            normal = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
            unbounded = torch.where(below, low + tail, torch.where(above, top - tail, normal))
            values = torch.where(below & above, values, unbounded)
        return (values.floor() if whole else values).minimum(high).maximum(low)

    return draw
