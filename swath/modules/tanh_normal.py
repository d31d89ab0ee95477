"""TanhNormal: a normal distribution squashed into an interval."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch import distributions as D
from torch.nn.functional import softplus

from swath.errors import NoMeanError

EDGE = 1.0 - 1e-6
"""Squashed values keep this far from the ends of `[-1, 1]`: beyond, they could not be told apart any more."""


def squash(u: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """`u` on the real line, into the interval."""
    return u.tanh().clamp(-EDGE, EDGE) * (high - low) / 2 + (high + low) / 2


def unsquash(value: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The real number that `squash` turns into `value`."""
    unit = (value - (high + low) / 2) / ((high - low) / 2)
    return unit.clamp(-EDGE, EDGE).atanh()


def squashed_log_prob(u: Tensor, loc: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Log-density of `squash(u)`, per dimension; written in `u`, so that it stays stable near the ends."""
    normal = -0.5 * ((u - loc) / scale).square() - scale.log() - 0.5 * math.log(2 * math.pi)
    slope = 2.0 * (math.log(2.0) - u - softplus(-2.0 * u)) + ((high - low) / 2).log()
    return normal - slope


class TanhNormal(D.Distribution):
    """A normal variable squashed by tanh into `[low, high]`; the last dimension is one event.

    The log-probability depends on the value alone: a loss finds for a recorded action what was recorded with it.
    Only a sample through which gradients flow is traced back to its unsquashed self, for the gradients' sake.
    """

    arg_constraints: dict[str, D.constraints.Constraint] = {  # noqa: RUF012 - torch declares it so
        "loc": D.constraints.real_vector,
        "scale": D.constraints.positive,
    }
    has_rsample = True

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor,
        low: Tensor | float = -1.0,
        high: Tensor | float = 1.0,
        validate_args: bool | None = None,
    ) -> None:
        """`loc` and `scale` of the normal variable; the interval's ends may differ between dimensions."""
        self.loc, self.scale = torch.broadcast_tensors(loc, scale)
        self.low = torch.as_tensor(low, dtype=loc.dtype, device=loc.device)
        self.high = torch.as_tensor(high, dtype=loc.dtype, device=loc.device)
        if bool((self.high <= self.low).any()):
            raise ValueError(f"TanhNormal needs low < high, got low={low} and high={high}.")
        self._sampled: tuple[Tensor, Tensor] | None = None
        super().__init__(self.loc.shape[:-1], self.loc.shape[-1:], validate_args=validate_args)

    @property
    def support(self) -> Any:
        """The interval."""
        return D.constraints.independent(D.constraints.interval(self.low, self.high), 1)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """A sample through which gradients flow to the parameters."""
        shape = torch.Size(sample_shape) + self.loc.shape
        u = self.loc + self.scale * torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        value = squash(u, self.low, self.high)
        self._sampled = (value, u)
        return value

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of `value`, summed over the event."""
        if self._sampled is not None and self._sampled[0] is value and value.requires_grad:
            u = self._sampled[1]
        else:
            u = unsquash(value, self.low, self.high)
        return squashed_log_prob(u, self.loc, self.scale, self.low, self.high).sum(-1)

    @property
    def deterministic_sample(self) -> Tensor:
        """The squashed location."""
        value = squash(self.loc, self.low, self.high)
        self._sampled = (value, self.loc)
        return value

    median = deterministic_sample  # squashing keeps the order
    mode = deterministic_sample  # as is customary; the exact mode has no closed form

    @property
    def mean(self) -> Tensor:
        """There is no closed form; tensordict then estimates it from samples."""
        raise NoMeanError("The mean of TanhNormal has no closed form; use the median or sample it.")
