"""Sampling from known distributions without building them.

Constructing a `torch.distributions` object costs more than a small network. For the families known here the noise of a
whole slot is drawn at once from torch's generator (so that `torch.manual_seed` decides the run), a step only combines it
with the parameters, and the log-probabilities are computed for the whole slot after its last step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule
from tensordict.nn import distributions as td_distributions
from torch import Tensor
from torch import distributions as D

from swath.keys import Key, as_key
from swath.modules.tanh_normal import TanhNormal, squashed_log_prob

GREEDY = (InteractionType.MODE, InteractionType.DETERMINISTIC)


class CategoricalStage:
    """Categorical and one-hot: the largest of the logits plus Gumbel noise."""

    def __init__(
        self,
        rows: Mapping[Key, np.ndarray],
        logits: Key,
        action: Key,
        log_prob: Key | None,
        greedy: bool,
    ) -> None:
        """Sample `action` from `logits`; both are keys of `rows`."""
        self._logits, self._action = rows[logits], rows[action]
        self._keys = (logits, action, log_prob)
        self._greedy = greedy
        self._scores = np.empty_like(self._logits)
        lanes, choices = self._logits.shape
        self._one_hot = np.eye(choices, dtype=self._action.dtype) if self._action.ndim == 2 else None
        self._choice = np.empty(lanes, np.int64) if self._one_hot is not None else self._action

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Draw the noise of all steps."""
        if not self._greedy:
            noise = torch.empty(steps, *self._logits.shape, dtype=torch.float32).exponential_(generator=generator)
            self._noise = noise.log_().neg_().numpy()  # [T, N, choices]

    def run(self, t: int) -> None:
        """Choose."""
        scores = self._logits
        if not self._greedy:
            scores = np.add(scores, self._noise[t], self._scores)
        scores.argmax(1, self._choice)
        if self._one_hot is not None:
            self._one_hot.take(self._choice, 0, self._action)

    def finish(self, columns: Mapping[Key, Tensor], steps: int) -> None:
        """Check the logits and compute the log-probabilities of the choices."""
        logits_key, action_key, log_prob_key = self._keys
        logits = columns[logits_key][:, :steps]
        _must_be_numbers(logits, logits_key, "Categorical")
        if log_prob_key is not None:
            choice = columns[action_key][:, :steps]
            if self._one_hot is not None:
                choice = choice.argmax(-1)
            picked = logits.log_softmax(-1).gather(-1, choice.unsqueeze(-1)).squeeze(-1)
            columns[log_prob_key][:, :steps] = picked


class NormalStage:
    """Normal and tanh-normal: location plus scale times noise, squashed or not."""

    def __init__(
        self,
        rows: Mapping[Key, np.ndarray],
        keys: tuple[Key, Key, Key, Key | None],
        interval: tuple[Tensor, Tensor] | None,
        greedy: bool,
        event: bool,
    ) -> None:
        """Sample from `keys` = (loc, scale, action, log-prob); `event` adds the log-prob up over the last dimension."""
        loc, scale, action, _ = keys
        self._loc, self._scale, self._action = rows[loc], rows[scale], rows[action]
        self._keys = keys
        self._greedy = greedy
        self._event = event
        self._interval = interval
        if interval is not None:
            low, high = (np.broadcast_to(x.numpy(), self._action.shape[1:]) for x in interval)
            self._half = np.ascontiguousarray(np.broadcast_to((high - low) / 2, self._action.shape))
            self._middle = np.ascontiguousarray(np.broadcast_to((high + low) / 2, self._action.shape))

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Draw the noise of all steps."""
        if not self._greedy:
            self._noise = torch.randn(steps, *self._loc.shape, generator=generator)  # [T, N, A]
            self._noise_rows = self._noise.numpy()

    def run(self, t: int) -> None:
        """Act."""
        action = self._action
        if self._greedy:
            action[:] = self._loc
        else:
            np.multiply(self._scale, self._noise_rows[t], action)
            np.add(action, self._loc, action)
        if self._interval is not None:
            np.tanh(action, action)
            np.multiply(action, self._half, action)
            np.add(action, self._middle, action)

    def finish(self, columns: Mapping[Key, Tensor], steps: int) -> None:
        """Check the parameters and compute the log-probabilities from the noise."""
        loc, scale = (columns[key][:, :steps] for key in self._keys[:2])
        _must_be_numbers(loc, self._keys[0], "Normal")
        _must_be_numbers(scale, self._keys[1], "Normal")
        log_prob_key = self._keys[3]
        if log_prob_key is None:
            return
        z = torch.zeros_like(loc) if self._greedy else self._noise[:steps].transpose(0, 1)
        if self._interval is None:
            log_prob = -0.5 * z.square() - scale.log() - 0.5 * math.log(2 * math.pi)
        else:
            log_prob = squashed_log_prob(loc + scale * z, z, scale, *self._interval)
        columns[log_prob_key][:, :steps] = log_prob.sum(-1) if self._event else log_prob


def sampling_stage(
    module: ProbabilisticTensorDictModule,
    reads: Mapping[Key, np.ndarray],
    writes: Mapping[Key, np.ndarray],
    exploration: InteractionType | None,
) -> tuple[Any, list[Key]] | None:
    """A stage that samples as `module` does, with the keys that it fills late; None if the module has to do it."""
    exploration = exploration or module.default_interaction_type
    if not _is_plain(module) or not (exploration in GREEDY or exploration is InteractionType.RANDOM):
        return None
    action = as_key(module.dist_sample_keys[0])
    log_prob = as_key(module.log_prob_key) if module.return_log_prob else None
    inputs = {_name(d): as_key(k) for d, k in zip(module.dist_keys, module.in_keys, strict=True)}
    if action not in writes or any(k not in reads or reads[k].dtype != np.float32 for k in inputs.values()):
        return None
    greedy = exploration is not InteractionType.RANDOM
    family, kwargs = module.distribution_class, module.distribution_kwargs or {}
    target, late = writes[action], [] if log_prob is None else [log_prob]
    rows = {**{key: reads[key] for key in inputs.values()}, action: target}
    if family in CATEGORICALS and set(inputs) == {"logits"} and not kwargs:
        indices = family is D.Categorical
        if rows[inputs["logits"]].ndim == 2 and target.ndim == (1 if indices else 2):
            return CategoricalStage(rows, inputs["logits"], action, log_prob, greedy), late
    if family in NORMALS and set(inputs) == {"loc", "scale"} and len({a.shape for a in rows.values()}) == 1:
        keys = (inputs["loc"], inputs["scale"], action, log_prob)
        if family is D.Normal and not kwargs:
            return NormalStage(rows, keys, None, greedy, event=False), late
        if family is TanhNormal and set(kwargs) <= {"low", "high"} and target.ndim > 1:
            ends = (kwargs.get("low", -1.0), kwargs.get("high", 1.0))
            low, high = (torch.as_tensor(end, dtype=torch.float32).cpu() for end in ends)
            return NormalStage(rows, keys, (low, high), greedy, event=True), late
    return None


CATEGORICALS = (D.Categorical, D.OneHotCategorical, td_distributions.OneHotCategorical)
NORMALS = (D.Normal, TanhNormal)


def _is_plain(module: ProbabilisticTensorDictModule) -> bool:
    """Whether `module` draws one sample of one entry from torch's own generator."""
    return (
        module.num_samples is None
        and module._generator is None
        and module._generator_key is None
        and len(module.dist_sample_keys) == 1
    )


def _name(dist_key: Any) -> str:
    return dist_key if isinstance(dist_key, str) else str(dist_key[-1])


def _must_be_numbers(parameters: Tensor, key: Key, family: str) -> None:
    """A policy that has diverged must not go on sampling: torch.distributions raises here too."""
    if bool(parameters.isnan().any()):
        raise ValueError(
            f"The policy produced NaN in {key!r}, the parameters of its {family} distribution. Its weights or its "
            "inputs are not finite: look at the last optimiser step, the learning rate and the observations."
        )
