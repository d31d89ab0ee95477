"""Sampling from normal distributions that a function of the user's puts together: moved, squashed, or several of them.

What is drawn is made from noise, as for the known families. Log-probabilities are left to the distribution itself,
which is built once for the whole slot.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from tensordict.nn import ProbabilisticTensorDictModule

from swath.keys import Key
from swath.modules.builders import Recipe, is_formula, recipe_of
from swath.modules.sampling import TINY, Family, SamplingStage
from swath.modules.tanh_normal import EDGE

MARGIN = 1e-6
"""TorchRL's TruncatedNormal keeps probabilities, and scales, this far from zero."""


class BuiltStage(SamplingStage):
    """Location plus scale times noise, or those of one of several, and then what is done to it."""

    needs_conditions = True  # a user's function may be called

    def __init__(
        self, module: ProbabilisticTensorDictModule, family: Family, rows: dict[Key, np.ndarray], greedy: bool
    ) -> None:
        """Sample from what the module's function builds out of parameters that have the family's names."""
        super().__init__(module, family, rows, greedy)
        self._names = family.params
        self._shapes = {name: row.shape[1:] for name, row in zip(family.params, self._params, strict=True)}
        self._is_closed = not family.kwargs and is_formula(module.distribution_class, is_closed=True)
        self._recipe: Recipe | None = None
        self._look()

    def _look(self) -> None:
        """See what is built now: values outside the function may have changed, and those it is given."""
        given = self._module.distribution_kwargs
        self._given = {} if given is None else dict(given.items())
        self._recipe = recipe_of(self._module.distribution_class, self._shapes, self._given, self._recipe)
        self._changes = [] if self._recipe is None else [
            None if ends is None else [np.asarray(end, np.float32) for end in ends] for ends in self._recipe.changes
        ]  # fmt: skip

    @property
    def fits(self) -> bool:
        """Whether it is known what is built, and its samples are such actions."""
        recipe, action = self._recipe, self._action
        if recipe is None or recipe.shape != action.shape[1:] or action.dtype != np.float32:
            return False
        loc, scale, *logits = (self._shapes[name] for name in recipe.names)
        one = loc[len(logits) :]  # without the dimension of those that one is chosen from
        return loc == scale and math.prod(one) == math.prod(recipe.shape) and (not logits or logits[0] == loc[:1])

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Draw the noise of all steps: for a choice, if there is one, and for a normal variable."""
        if not self._is_closed:
            self._look()
        if self._recipe is None or not self.fits:
            self._recipe = None
            return
        size, lanes = math.prod(self._recipe.shape), len(self._action)
        self._choices = self._shapes[self._recipe.names[2]][0] if len(self._recipe.names) > 2 else 0
        drawn = torch.empty(steps, lanes, size + self._choices, dtype=torch.float32, device="cpu")
        drawn[..., :size].normal_(generator=generator)
        self._noise = drawn.numpy()
        if self._choices:
            waits = torch.empty(steps, lanes, self._choices, device="cpu").exponential_(generator=generator)
            self._noise[..., size:] = np.log(np.maximum(waits.numpy(), TINY))

    def _act(self, params: list[np.ndarray], noise: np.ndarray | None, action: np.ndarray) -> None:
        if self._recipe is None or noise is None:  # by now it is something else
            action[:] = self._build(params).sample().numpy()
            return
        named = dict(zip(self._names, params, strict=True))
        loc, scale, *logits = (named[name] for name in self._recipe.names)
        if logits:
            choice = (logits[0] - noise[:, -self._choices :]).argmax(1)
            rows, noise = np.arange(len(choice)), noise[:, : -self._choices]
            loc, scale = loc[rows, choice], scale[rows, choice]
        np.multiply(scale.reshape(action.shape), noise.reshape(action.shape), action)
        np.add(action, loc.reshape(action.shape), action)
        for ends in self._changes:
            if ends is None:
                np.tanh(action, action)
                np.minimum(action, EDGE, out=action)  # what lies on an end could not be traced back
                np.maximum(action, -EDGE, out=action)
            else:
                np.multiply(action, ends[1], action)
                np.add(action, ends[0], action)

    def _build(self, params: Any) -> Any:
        given = {name: torch.from_numpy(value) for name, value in zip(self._names, params, strict=True)}
        return self._module.distribution_class(**given, **self._given)

    def _judge(self, *values: np.ndarray) -> Any:
        """What the distribution says; it refuses parameters that cannot be, if it is one that does."""
        *params, action = values
        built = self._build(params)
        return None if self._log_prob is None else built.log_prob(torch.from_numpy(action)).numpy()


class TruncatedStage(BuiltStage):
    """TorchRL's TruncatedNormal: a normal variable between two ends, by its quantiles."""

    def _look(self) -> None:
        """See where the ends are now."""
        given = self._module.distribution_kwargs
        self._given = {} if given is None else dict(given.items())
        ends = (self._given.get("low", -1.0), self._given.get("high", 1.0))
        self._ends = [torch.as_tensor(end, device="cpu").detach().float().numpy() for end in ends]

    @property
    def fits(self) -> bool:
        """Whether all are vectors, and the ends are the same for all lanes."""
        spread = all(end.shape in ((), (1,), self._action.shape[1:]) for end in self._ends)
        return spread and self._action.ndim > 1 and len({(row.shape, row.dtype) for row in self._rows}) == 1

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Draw which quantiles."""
        self._look()
        drawn = torch.empty(steps, *self._action.shape, dtype=torch.float32, device="cpu")
        self._noise = drawn.uniform_(MARGIN, 1 - MARGIN, generator=generator).numpy()

    def _act(self, params: list[np.ndarray], noise: np.ndarray | None, action: np.ndarray) -> None:
        loc, scale = params[0], np.maximum(params[1], MARGIN)
        below, above = (_share((end - loc) / scale) for end in self._ends)
        quantile = _within(below + noise * _within(above - below))
        # numpy has no error function; torch's, on so few numbers, is called in this thread.
        np.multiply(torch.from_numpy(2 * quantile - 1).erfinv_().numpy(), scale * np.float32(math.sqrt(2)), action)
        np.add(action, loc, action)
        np.maximum(action, self._ends[0], out=action)
        np.minimum(action, self._ends[1], out=action)


def _share(x: np.ndarray) -> np.ndarray:
    """How much of a standard normal distribution lies below `x`."""
    return _within(0.5 * (1 + torch.from_numpy(x * np.float32(math.sqrt(0.5))).erf_().numpy()))


def _within(share: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.minimum(np.maximum(share, MARGIN), 1 - MARGIN)
    return found
