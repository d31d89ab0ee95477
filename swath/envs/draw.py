"""Random values of gymnasium spaces, many at once and from torch's generators."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor
from torch.nn.functional import one_hot

from swath.envs.rows import Leaf


def draw(space: gs.Space[Any], leaf: Leaf, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """`shape` random values of a space that is one leaf, encoded as `leaf` says: `[*shape, *leaf.shape]`."""
    if isinstance(space, gs.Discrete):
        indices = torch.randint(int(space.n), shape, generator=generator, device="cpu")
        values = one_hot(indices, int(space.n)) if leaf.shape == (space.n,) else indices
    elif isinstance(space, gs.MultiDiscrete):
        sizes = [int(n) for n in space.nvec.reshape(-1)]
        parts = [torch.randint(n, shape, generator=generator, device="cpu") for n in sizes]
        if leaf.shape == (sum(sizes),):
            values = torch.cat([one_hot(part, n) for part, n in zip(parts, sizes, strict=True)], -1)
        else:
            values = torch.stack(parts, -1)
    elif isinstance(space, gs.MultiBinary):
        values = torch.randint(2, (*shape, *leaf.shape), generator=generator, device="cpu")
    else:
        assert isinstance(space, gs.Box)
        values = _draw_box(space, shape, generator)
    return values.view(*shape, *leaf.shape).to(leaf.dtype)


def _draw_box(space: gs.Box, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Uniform between two bounds, exponential from one, normal without any, rounded down to integers: as gymnasium.

    Computed in float64, which holds the bounds of every type but 64-bit integers.
    """
    shape = (*shape, *space.shape)
    whole = space.dtype.kind in "iub"
    low, high = (torch.from_numpy(bound.astype(np.float64)) for bound in (space.low, space.high))
    below, above = torch.from_numpy(space.bounded_below), torch.from_numpy(space.bounded_above)
    top = high + 1 if whole else high
    share = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
    values = torch.lerp(low.expand(shape), top.expand(shape), share)
    if not bool((below & above).all()):
        tail = torch.empty(shape, dtype=torch.float64, device="cpu").exponential_(generator=generator)
        normal = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        unbounded = torch.where(below, low + tail, torch.where(above, top - tail, normal))
        values = torch.where(below & above, values, unbounded)
    if whole:
        values = values.floor()
        if space.dtype.itemsize == 8:  # what rounds up beyond the largest integer would wrap around
            high = high.clamp(max=float(np.nextafter(2.0 ** (64 if space.dtype.kind == "u" else 63), 0)))
    return values.minimum(high).maximum(low)
