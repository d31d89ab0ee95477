"""Sampling from known distributions without building them.

Constructing a `torch.distributions` object costs more than a small network. For the families known here the noise of
a whole slot is drawn at once from torch's generator (so that `torch.manual_seed` decides the run), a step only combines
it with the parameters, and the log-probabilities are computed for the whole slot after its last step. numpy does that
for discrete actions: torch takes its threads for a logarithm of two thousand numbers, and waits for them where other
processes keep the cores busy, as NOTE [BLAS threads] tells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule
from torch import Tensor

from swath.keys import Key, as_key
from swath.modules.judging import all_finite, log_total, must_hold
from swath.modules.stages import Filled, Stage
from swath.modules.tanh_normal import EDGE, squashed_log_prob, unsquash

TINY = np.finfo(np.float32).tiny
SMALLEST = float(TINY)
FEW = 8
"""So many numbers are handled one by one in less time than it takes to call numpy."""
MANY, PIECE = 4096, 8192
"""So many exponential variables are drawn in less time by way of uniform ones, in pieces that stay in the caches."""
LEAST = 2.0**-54
"""Stands for zero among uniform variables, of which there are 2**53; it has no logarithm."""
SEVERAL = 32
"""So many normal variables are judged one by one in less time than it takes to call torch."""
EDGE_HERE, HALF_LOG_2PI = float(np.float32(EDGE)), 0.5 * math.log(2 * math.pi)


class SamplingStage(Stage):
    """Writes an action for the parameters that other stages have written."""

    needs_conditions = False

    def __init__(
        self, module: ProbabilisticTensorDictModule, family: Family, rows: dict[Key, np.ndarray], greedy: bool
    ) -> None:
        """Sample as `module` does, or take the most likely; `rows` are the parameters and, last, the action."""
        self._module, self._family = module, family
        self._keys = tuple(rows)
        *self._params, self._action = rows.values()
        self._rows = list(rows.values())
        self._greedy = greedy
        self._noise: np.ndarray | None = None  # [T, N, ...]
        self._log_prob = as_key(module.log_prob_key) if module.return_log_prob else None
        self._is_prompt = False
        self._score: np.ndarray | None = None
        if self._log_prob is not None:
            self.late = (self._log_prob,)

    def judge_at_once(self, score: np.ndarray | None) -> None:
        """Do in every step what could be done once for the slot: `score` is the row of the log-probabilities.

        That is for parts behind this one that read them, or may change what they are computed from.
        """
        self.late, self._is_prompt = (), True
        self._score = score

    @property
    def fits(self) -> bool:
        """Whether it can sample into such rows: here, whether parameters and action are alike."""
        return len({(array.shape, array.dtype) for array in (*self._params, self._action)}) == 1

    def run(self, t: int) -> None:
        """Act."""
        self._act(self._params, None if self._noise is None else self._noise[t], self._action)
        if self._is_prompt:
            self._judge_rows(slice(None))

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """Act for some lanes."""
        action = self._action[lanes]
        noise = None if self._noise is None else self._noise[times, lanes]
        self._act([array[lanes] for array in self._params], noise, action)
        self._action[lanes] = action
        if self._is_prompt:
            self._judge_rows(lanes)

    def run_first(self, count: int, t: int) -> None:
        """Act for the first lanes."""
        noise = None if self._noise is None else self._noise[t, :count]
        self._act([array[:count] for array in self._params], noise, self._action[:count])
        if self._is_prompt:
            self._judge_rows(slice(count))

    def _judge_rows(self, lanes: slice | np.ndarray) -> None:
        score = self._judge(*[row[lanes] for row in self._rows])
        if self._score is not None and score is not None:
            self._score[lanes] = score

    def finish(self, columns: Mapping[Key, np.ndarray], filled: Filled) -> None:
        """Check the parameters and compute the log-probabilities of the actions, of all steps."""
        if not self._is_prompt:
            score = self._judge(*[columns[key][filled] for key in self._keys])
            if self._log_prob is not None:
                columns[self._log_prob][filled] = score

    def _act(self, params: list[np.ndarray], noise: np.ndarray | None, action: np.ndarray) -> None:
        """Write what is chosen for `params` into `action`; the most likely if there is no noise."""
        raise NotImplementedError

    def _judge(self, *values: np.ndarray) -> Any:
        """The log-probabilities for parameters and action, if these are wanted; refuse parameters that cannot be."""
        raise NotImplementedError


class CategoricalStage(SamplingStage):
    """Categorical and one-hot: the largest of the logits plus Gumbel noise; with a mask, of those it allows.

    The noise is kept with the other sign, which saves a step.
    """

    def __init__(
        self, module: ProbabilisticTensorDictModule, family: Family, rows: dict[Key, np.ndarray], greedy: bool
    ) -> None:
        """Sample from logits; tensordict's one-hot, if greedy, sets all of the largest, and not the first alone."""
        super().__init__(module, family, rows, greedy)
        self._ties = greedy and family.ties
        self._firsts = np.empty(0, np.int64)
        """Where the logits of each frame of a slot begin."""
        self._shape = self._params[0].shape
        self._one_hot = np.eye(self._shape[-1], dtype=self._action.dtype) if self._action.ndim == 2 else None
        self._is_plain = self._one_hot is None and len(self._params) == 1
        self._is_single = False
        """Whether the slot is one frame of few choices, which is chosen and judged without numpy."""
        self._score_of_one = 0.0

    @property
    def fits(self) -> bool:
        """Whether there is something to choose from, and the action has the shape of a choice."""
        shape = self._shape if self._family.one_hot else self._shape[:1]
        alike = all(array.shape == self._shape for array in self._params)
        return len(self._shape) == 2 and self._shape[1] >= 2 and self._action.shape == shape and alike

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Draw the noise of all steps."""
        if not self._greedy:
            if self._noise is None or len(self._noise) != steps:
                self._drawn = torch.empty(steps, *self._shape, dtype=torch.float32, device="cpu")
                self._noise, self._least = self._drawn.numpy(), np.full((1, *self._shape), TINY)
                self._is_single = self._is_plain and self._noise.size == self._shape[1] <= FEW
            if self._noise.size >= MANY:
                self._draw_many(self._noise.reshape(-1), generator)
                return
            if generator is None:  # to say so takes a fifth of the time
                self._drawn.exponential_()
            else:
                self._drawn.exponential_(generator=generator)
            if not self._is_single:
                np.maximum(self._noise, self._least, out=self._noise)  # or the logarithm of zero would be warned of
                np.log(self._noise, self._noise)

    @staticmethod
    def _draw_many(noise: np.ndarray, generator: torch.Generator | None) -> None:
        """The same noise: torch takes most of its time for one logarithm after the other."""
        for start in range(0, len(noise), PIECE):
            piece = noise[start : start + PIECE]
            drawn = torch.rand(len(piece), dtype=torch.float64, device="cpu", generator=generator).numpy()
            np.log(np.maximum(drawn, LEAST, out=drawn), drawn)
            np.log(np.negative(drawn, piece, casting="same_kind"), piece)

    def _act(self, params: list[np.ndarray], noise: np.ndarray | None, action: np.ndarray) -> None:
        if self._is_single and noise is not None:
            (logits,), (waits,) = params[0].tolist(), noise.tolist()
            top, weights, total = self._weighed(logits)
            # The largest of the logits less the logarithms of the noise, without these.
            values = [weight / (wait or SMALLEST) for weight, wait in zip(weights, waits, strict=True)]
            action[0] = choice = values.index(max(values))
            self._score_of_one = logits[choice] - top - math.log(total)
            return
        scores = params[0] if len(params) == 1 else np.where(params[1], params[0], -np.inf)
        if self._ties:
            np.equal(scores, scores.max(1, keepdims=True), action)
            return
        if noise is not None:
            scores = scores - noise
        if self._one_hot is None:
            scores.argmax(1, action)
        else:
            self._one_hot.take(scores.argmax(1), 0, action)

    def finish(self, columns: Mapping[Key, np.ndarray], filled: Filled) -> None:
        """Check and compute; of a single frame, which is all that there is then, that was done with the action."""
        if not self._is_single:
            super().finish(columns, filled)
        elif self._log_prob is not None and not self._is_prompt:
            columns[self._log_prob][0, 0] = self._score_of_one

    def _judge(self, *values: np.ndarray) -> Any:
        logits, *mask, choice = values
        if mask:
            logits = np.where(mask[0], logits, np.float32(-np.inf))
        if self._one_hot is not None:
            choice = choice.argmax(-1)
        if logits.size <= FEW and logits.ndim == 3:
            return [list(map(self._judge_one, *lane)) for lane in zip(logits.tolist(), choice.tolist(), strict=True)]
        flat = logits.reshape(-1)
        if not all_finite(flat):
            # Of a row without any finite logit, or with an infinite one, there are no probabilities either.
            must_hold(np.isfinite(np.maximum.reduce(logits, -1)), self._keys[0], "Categorical")
        if self._log_prob is None:
            return None
        if len(self._firsts) != choice.size:
            self._firsts = np.arange(choice.size) * logits.shape[-1]
        scores: np.ndarray = flat.take(choice.reshape(-1) + self._firsts).reshape(choice.shape)
        scores -= log_total(logits)
        return scores

    def _judge_one(self, logits: list[float], choice: int) -> float:
        """The same for one row: numpy takes ten times as long for a few numbers."""
        top, _, total = self._weighed(logits)
        return logits[choice] - top - math.log(total)

    def _weighed(self, logits: list[float]) -> tuple[float, list[float], float]:
        """The largest, how likely each is beside that one, and the sum of these."""
        top = max(logits)
        weights = [math.exp(logit - top) for logit in logits] if math.isfinite(top) else [math.nan]
        total = sum(weights)
        if total != total:
            must_hold(False, self._keys[0], "Categorical")
        return top, weights, total


class NormalStage(SamplingStage):
    """Normal and tanh-normal: location plus scale times noise, squashed or not."""

    def __init__(
        self, module: ProbabilisticTensorDictModule, family: Family, rows: dict[Key, np.ndarray], greedy: bool
    ) -> None:
        """Sample from location and scale."""
        super().__init__(module, family, rows, greedy)
        self._is_squashed = family.squashed
        action = self._action
        self._half, self._middle = np.empty_like(action), np.empty_like(action)
        self._given: tuple[Any, Any] | None = None
        """The ends of the interval as they were last given, if these are numbers."""
        self._params += [np.full_like(action, EDGE), np.full_like(action, -EDGE), self._half, self._middle]

    @property
    def fits(self) -> bool:
        """Whether all are alike and, if the last dimension is one event, have it."""
        return super().fits and (not self._family.has_events or self._action.ndim > 1)

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Draw the noise of all steps."""
        if self._is_squashed:
            self._take_interval()
        if not self._greedy:
            if self._noise is None or len(self._noise) != steps:
                self._drawn = torch.empty(steps, *self._action.shape, dtype=torch.float32, device="cpu")
                self._noise = self._drawn.numpy()
            self._drawn.normal_(generator=generator)

    def _take_interval(self) -> None:
        """Take the ends as they are now; numbers, as most are, only if they are others."""
        kwargs = self._module.distribution_kwargs
        given = (-1.0, 1.0) if kwargs is None else (kwargs.get("low", -1.0), kwargs.get("high", 1.0))
        are_numbers = isinstance(given[0], float | int) and isinstance(given[1], float | int)
        if are_numbers and given == self._given:
            return
        self._given = given if are_numbers else None
        self._ends = _interval(*given)
        low, high = (end.numpy() for end in self._ends)
        self._half[:] = (high - low) / 2
        self._middle[:] = (high + low) / 2
        self._log_half = float(np.log(self._half[0]).sum())

    def _act(self, params: list[np.ndarray], noise: np.ndarray | None, action: np.ndarray) -> None:
        loc, scale, edge, other_edge, half, middle = params
        if noise is None:
            action[:] = loc
        else:
            np.multiply(scale, noise, action)
            np.add(action, loc, action)
        if self._is_squashed:
            np.tanh(action, action)
            np.minimum(action, edge, out=action)
            np.maximum(action, other_edge, out=action)
            np.multiply(action, half, action)
            np.add(action, middle, action)

    def _judge(self, *values: np.ndarray) -> Tensor | np.ndarray | None:
        if values[0].size <= SEVERAL:
            return self._judge_each(*values)
        loc, scale, action = map(torch.from_numpy, values)
        must_hold(~loc.isnan(), self._keys[0], "Normal")
        must_hold(scale > 0, self._keys[1], "Normal")
        if self._log_prob is None:
            return None
        if self._is_squashed:
            return squashed_log_prob(unsquash(action, *self._ends), loc, scale, *self._ends).sum(-1)
        score = -0.5 * ((action - loc) / scale).square() - scale.log() - 0.5 * math.log(2 * math.pi)
        return score.sum(-1) if self._family.has_events else score

    def _judge_each(self, loc: np.ndarray, scale: np.ndarray, action: np.ndarray) -> np.ndarray:
        """The same for each number by itself: torch takes a hundred times as long for its calls."""
        shape, scores = loc.shape, list[float]()
        if self._is_squashed:  # in single precision, as whoever computes it later will
            action = (action.reshape(-1, shape[-1]) - self._middle[:1]) / self._half[:1]
        rows = zip(*(array.reshape(-1).tolist() for array in (loc, scale, action)), strict=True)
        for mean, width, value in rows:
            if mean != mean or not width > 0:
                must_hold(mean == mean, self._keys[0], "Normal")
                must_hold(width > 0, self._keys[1], "Normal")
            slope = 1.0
            if self._is_squashed:
                value = min(max(value, -EDGE_HERE), EDGE_HERE)
                slope, value = 1.0 - value * value, math.atanh(value)
            distance = (value - mean) / width
            scores.append(-0.5 * distance * distance - math.log(width * slope) - HALF_LOG_2PI)
        if not self._family.has_events:
            return np.array(scores).reshape(shape)
        whole = self._log_half if self._is_squashed else 0.0
        sums = [sum(scores[first : first + shape[-1]]) - whole for first in range(0, len(scores), shape[-1])]
        return np.array(sums).reshape(shape[:-1])


class DeltaStage(SamplingStage):
    """Delta: the parameter itself."""

    @property
    def fits(self) -> bool:
        """Whether all are alike and have events."""
        return super().fits and self._action.ndim > 1

    def _act(self, params: list[np.ndarray], noise: np.ndarray | None, action: np.ndarray) -> None:
        action[:] = params[0]

    def _judge(self, *values: np.ndarray) -> np.ndarray:
        # All of the density is where the action is; nothing is near a parameter that is not finite.
        return np.where(np.isfinite(values[0]).all(-1), np.inf, -np.inf)


def _interval(*ends: Any) -> tuple[Tensor, Tensor]:
    """The ends between which TanhNormal squashes."""
    low, high = (torch.as_tensor(end, device="cpu").detach().float() for end in ends)
    return low, high


@dataclass(frozen=True)
class Family:
    """A kind of distribution: its parameters, and what samples from it."""

    params: tuple[str, ...]
    greedy: tuple[InteractionType, ...]
    """The exploration types that take the most likely value, or what stands for it."""
    stage: type[SamplingStage]
    kwargs: frozenset[str] = frozenset()
    """What it may be given beside its parameters."""
    one_hot: bool = False
    """Whether a choice is a vector,"""
    ties: bool = False
    """and the most likely one has all of the largest."""
    squashed: bool = False
    """Whether it is a normal variable squashed into an interval."""
    has_events: bool = False
    """Whether the last dimension is one event: its log-prob is one number."""
