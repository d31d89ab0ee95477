"""What sampling stages judge parameters and actions by: few numbers, or many, in as few calls as there can be."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from swath.keys import Key

SOME = 96
"""So many exponentials are added up by one slow call in less time than by several quick ones."""
MANY_ROWS = 32
"""For each choice so many rows, and more, are combined by columns in less time."""
MANY_PAIRS = 256
"""So many rows of two choices, and more, are added up by several quick calls in less time than by one slow one."""
SMALL = 4096
"""So many numbers, and more, are multiplied in this thread; see NOTE [BLAS threads]."""


def all_finite(flat: np.ndarray) -> bool:
    """Whether all numbers are finite; perhaps not, if some are very large."""
    return math.isfinite(flat.dot(flat)) if flat.size <= SMALL else bool(np.isfinite(flat).all())


def log_total(logits: np.ndarray) -> np.ndarray:
    """The logarithm of the exponentials of `logits` `[..., A]`, added up over the choices."""
    total: np.ndarray
    if logits.shape[-1] == 2 and logits.size < 2 * MANY_PAIRS:
        total = np.logaddexp(logits[..., 0], logits[..., 1])
    elif logits.shape[-1] == 2:
        total = np.abs(logits[..., 0] - logits[..., 1])
        np.log1p(np.exp(np.negative(total, total), total), total)
        total += np.maximum(logits[..., 0], logits[..., 1])
    elif logits.size <= SOME:
        total = np.logaddexp.reduce(logits, -1)
    else:
        top = _over_choices(np.maximum, logits)
        total = np.log(_over_choices(np.add, np.exp(logits - top[..., None])))
        total += top
    return total


def _over_choices(combine: np.ufunc, values: np.ndarray) -> np.ndarray:
    """`values` `[..., A]` combined over the choices: numpy takes its time for each row, so many rows go by columns."""
    choices = values.shape[-1]
    found: np.ndarray
    if values.size < MANY_ROWS * choices**2:
        found = combine.reduce(values, -1)  # by the ufunc: the methods of arrays take a detour by way of Python
        return found
    found = combine(values[..., 0], values[..., 1])
    for choice in range(2, choices):
        combine(found, values[..., choice], out=found)
    return found


def must_hold(condition: Tensor | np.ndarray | bool, key: Key, family: str) -> None:
    """A policy that has diverged must not go on sampling: torch.distributions raises here too."""
    if not (condition if isinstance(condition, bool) else bool(condition.all())):
        raise ValueError(
            f"The policy produced {key!r}, the parameters of its {family} distribution, with values that no such "
            "distribution can have, like NaN. Its weights or its inputs are not finite: look at the last optimiser "
            "step, the learning rate and the observations."
        )
