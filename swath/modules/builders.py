"""Functions that put a distribution together: what they build, found out by calling them once.

`torch.distributions.Independent` cannot be given to a module by itself: users write `lambda loc, scale:
Independent(Normal(loc, scale), 1)`. A function may do anything; but if its code has no branch and no loop, and what it
returns holds the very tensors that it was given, then there is nothing else that it could have done with them.
"""

from __future__ import annotations

import dis
from types import FunctionType
from typing import Any

import torch
from torch import distributions as D


def builds_independent_normals(build: Any) -> bool:
    """Whether `build(loc=, scale=)` is an Independent(Normal(loc, scale), 1), and cannot be anything else."""
    if not isinstance(build, FunctionType) or not _is_straight(build):
        return False
    loc, scale = (torch.arange(start, start + 6.0, device="cpu").view(2, 3) for start in (1.0, 7.0))
    given = (loc.clone(), scale.clone())
    try:
        built = build(loc=loc, scale=scale)
    except Exception:  # it may fail in any way it likes: then it is not known
        return False
    if (
        type(built) is not D.Independent
        or built.reinterpreted_batch_ndims != 1
        or type(built.base_dist) is not D.Normal
    ):
        return False
    are_unchanged = torch.equal(loc, given[0]) and torch.equal(scale, given[1])
    return are_unchanged and _is_same(built.base_dist.loc, loc) and _is_same(built.base_dist.scale, scale)


def _is_same(found: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether it is the tensor that was given; distributions make views of what they get."""
    same_place = found.data_ptr() == given.data_ptr() and found.stride() == given.stride()
    return same_place and found.shape == given.shape


def _is_straight(function: FunctionType) -> bool:
    """Whether all of its code is always run, from top to bottom."""
    jumps = {*dis.hasjrel, *dis.hasjabs}
    return not any(step.opcode in jumps for step in dis.get_instructions(function))
