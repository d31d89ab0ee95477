"""Sampling from known distributions without building them.

Constructing a `torch.distributions` object costs more than a small network. For the families known here the noise of
a whole slot is drawn at once from torch's generator (so that `torch.manual_seed` decides the run), a step only combines
it with the parameters, and the log-probabilities are computed for the whole slot after its last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule
from tensordict.nn.distributions import Delta, OneHotCategorical
from torch import Tensor
from torch import distributions as D

from swath.keys import Key, as_key
from swath.modules.stages import Plain
from swath.modules.tanh_normal import EDGE, TanhNormal, squashed_log_prob, unsquash


class CategoricalStage:
    """Categorical and one-hot: the largest of the logits plus Gumbel noise."""

    def __init__(
        self, rows: Mapping[Key, np.ndarray], keys: tuple[Key, Key, Key | None], greedy: bool, ties: bool = False
    ) -> None:
        """Sample from `keys` = (logits, action, log-prob); greedy `ties` set all of the largest, not the first."""
        logits, action, log_prob = keys
        self.late = _late(log_prob)
        self._logits, self._action = rows[logits], rows[action]
        self._keys = keys
        self._greedy = greedy
        self._ties = ties and greedy
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
        if self._ties:
            np.equal(scores, scores.max(1, keepdims=True), self._action)
            return
        if not self._greedy:
            scores = np.add(scores, self._noise[t], self._scores)
        scores.argmax(1, self._choice)
        if self._one_hot is not None:
            self._one_hot.take(self._choice, 0, self._action)

    def finish(self, columns: Mapping[Key, Tensor], steps: int) -> None:
        """Check the logits and compute the log-probabilities of the choices."""
        logits_key, action_key, log_prob_key = self._keys
        logits = columns[logits_key][:, :steps]
        # Of a row without any finite logit, or with an infinite one, there are no probabilities either.
        _must_hold(logits.amax(-1).isfinite(), logits_key, "Categorical")
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
        interval: Callable[[], tuple[Tensor, Tensor]] | None,
        greedy: bool,
    ) -> None:
        """Sample from `keys` = (loc, scale, action, log-prob); `interval` tells between which ends to squash, if so.

        A squashed log-prob is one number per lane: there, the last dimension is one event.
        """
        loc, scale, action, log_prob = keys
        self.late = _late(log_prob)
        self._loc, self._scale, self._action = rows[loc], rows[scale], rows[action]
        self._keys = keys
        self._greedy = greedy
        self._interval = interval
        self._half, self._middle = np.empty_like(self._action), np.empty_like(self._action)
        self._edge, self._other_edge = np.full_like(self._action, EDGE), np.full_like(self._action, -EDGE)

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Draw the noise of all steps."""
        if self._interval is not None:
            self._ends = self._interval()
            low, high = (end.numpy() for end in self._ends)
            self._half[:] = (high - low) / 2
            self._middle[:] = (high + low) / 2
        if not self._greedy:
            self._noise = torch.randn(steps, *self._loc.shape, generator=generator).numpy()  # [T, N, A]

    def run(self, t: int) -> None:
        """Act."""
        action = self._action
        if self._greedy:
            action[:] = self._loc
        else:
            np.multiply(self._scale, self._noise[t], action)
            np.add(action, self._loc, action)
        if self._interval is not None:
            np.tanh(action, action)
            np.minimum(action, self._edge, out=action)
            np.maximum(action, self._other_edge, out=action)
            np.multiply(action, self._half, action)
            np.add(action, self._middle, action)

    def finish(self, columns: Mapping[Key, Tensor], steps: int) -> None:
        """Check the parameters and compute the log-probabilities of the actions."""
        loc, scale = (columns[key][:, :steps] for key in self._keys[:2])
        _must_hold(~loc.isnan(), self._keys[0], "Normal")
        _must_hold(scale > 0, self._keys[1], "Normal")
        log_prob_key = self._keys[3]
        if log_prob_key is None:
            return
        action = columns[self._keys[2]][:, :steps]
        if self._interval is None:
            log_prob = -0.5 * ((action - loc) / scale).square() - scale.log() - 0.5 * math.log(2 * math.pi)
        else:
            log_prob = squashed_log_prob(unsquash(action, *self._ends), loc, scale, *self._ends).sum(-1)
        columns[log_prob_key][:, :steps] = log_prob


class DeltaStage(Plain):
    """Delta: the parameter itself."""

    def __init__(self, rows: Mapping[Key, np.ndarray], keys: tuple[Key, Key, Key | None]) -> None:
        """Act by `keys` = (param, action, log-prob)."""
        param, action, log_prob = keys
        self.late = _late(log_prob)
        self._param, self._action = rows[param], rows[action]
        self._keys = keys

    def run(self, t: int) -> None:
        """Act."""
        self._action[:] = self._param

    def finish(self, columns: Mapping[Key, Tensor], steps: int) -> None:
        """All of the density is where the action is; nothing is near a parameter that is not finite."""
        param, _, log_prob = self._keys
        if log_prob is not None:
            is_there = columns[param][:, :steps].isfinite().all(-1)
            columns[log_prob][:, :steps] = torch.where(is_there, math.inf, -math.inf)


SamplingStage = CategoricalStage | NormalStage | DeltaStage


def sampling_stage(
    module: ProbabilisticTensorDictModule,
    reads: Mapping[Key, np.ndarray],
    writes: Mapping[Key, np.ndarray],
    exploration: InteractionType | None,
) -> SamplingStage | None:
    """A stage that samples as `module` does; None if the module has to do it."""
    family = _family_of(module.distribution_class)
    exploration = exploration or module.default_interaction_type
    if family is None or exploration not in (InteractionType.RANDOM, *family.greedy) or not _is_plain(module):
        return None
    if not _kwargs(module) <= family.kwargs:
        return None
    names = {_name(name): as_key(key) for name, key in zip(module.dist_keys, module.in_keys, strict=True)}
    if set(names) != set(family.params):
        return None
    params, action = [names[name] for name in family.params], as_key(module.dist_sample_keys[0])
    if action not in writes or any(key not in reads or reads[key].dtype != np.float32 for key in params):
        return None
    rows = {**{key: reads[key] for key in params}, action: writes[action]}
    log_prob = as_key(module.log_prob_key) if module.return_log_prob else None
    return family.make(module, rows, (*params, action, log_prob), exploration is not InteractionType.RANDOM)


def _make_categorical(
    module: ProbabilisticTensorDictModule, rows: Mapping[Key, np.ndarray], keys: Any, greedy: bool
) -> CategoricalStage | None:
    logits, action = rows[keys[0]], rows[keys[1]]
    if logits.ndim != 2 or logits.shape[1] < 2:
        return None
    kind = module.distribution_class
    expected = logits.shape[:1] if kind is D.Categorical else logits.shape
    ties = kind is OneHotCategorical
    return CategoricalStage(rows, keys, greedy, ties) if action.shape == expected else None


def _make_normal(
    module: ProbabilisticTensorDictModule, rows: Mapping[Key, np.ndarray], keys: Any, greedy: bool
) -> NormalStage | None:
    if not _alike(rows):
        return None
    if module.distribution_class is D.Normal:
        return NormalStage(rows, keys, None, greedy)
    has_events = rows[keys[2]].ndim > 1
    return NormalStage(rows, keys, lambda: _interval(module.distribution_kwargs), greedy) if has_events else None


def _make_delta(
    module: ProbabilisticTensorDictModule, rows: Mapping[Key, np.ndarray], keys: Any, greedy: bool
) -> DeltaStage | None:
    return DeltaStage(rows, keys) if _alike(rows) and rows[keys[0]].ndim > 1 else None


@dataclass(frozen=True)
class Family:
    """A kind of distribution: its parameters, and how its stage is made."""

    params: tuple[str, ...]
    greedy: tuple[InteractionType, ...]
    """The exploration types that take the most likely value, or what stands for it."""
    make: Callable[..., SamplingStage | None]
    kwargs: frozenset[str] = frozenset()
    """What it may be given beside its parameters."""


MODE, MEAN, MEDIAN = InteractionType.MODE, InteractionType.MEAN, InteractionType.MEDIAN
DETERMINISTIC = InteractionType.DETERMINISTIC

FAMILIES: dict[Any, Family] = {
    D.Categorical: Family(("logits",), (MODE, DETERMINISTIC), _make_categorical),
    D.OneHotCategorical: Family(("logits",), (MODE, DETERMINISTIC), _make_categorical),
    OneHotCategorical: Family(("logits",), (MODE, DETERMINISTIC), _make_categorical),
    D.Normal: Family(("loc", "scale"), (MODE, MEAN, DETERMINISTIC), _make_normal),
    TanhNormal: Family(("loc", "scale"), (MODE, MEDIAN, DETERMINISTIC), _make_normal, frozenset({"low", "high"})),
    Delta: Family(("param",), (MODE, MEAN, DETERMINISTIC), _make_delta),
}


PEER_TANH_NORMAL = ("torchrl.modules.distributions.continuous", "TanhNormal")
"""TorchRL's class computes what ours does, for as long as it is given no more than the interval."""


def _family_of(kind: Any) -> Family | None:
    if (getattr(kind, "__module__", None), getattr(kind, "__qualname__", None)) == PEER_TANH_NORMAL:
        return replace(FAMILIES[TanhNormal], greedy=(DETERMINISTIC,))
    return FAMILIES.get(kind)


def _interval(kwargs: Any) -> tuple[Tensor, Tensor]:
    """The ends between which TanhNormal squashes, as they are now."""
    given = {} if kwargs is None else kwargs
    low, high = (torch.as_tensor(given.get(*end)).detach().float().cpu() for end in (("low", -1.0), ("high", 1.0)))
    return low, high


def _kwargs(module: ProbabilisticTensorDictModule) -> set[str]:
    """The names of the arguments that the distribution gets beside its parameters; they may be held in a TensorDict."""
    return set() if module.distribution_kwargs is None else set(module.distribution_kwargs.keys())


def _is_plain(module: ProbabilisticTensorDictModule) -> bool:
    """Whether `module` draws one sample of one entry from torch's own generator."""
    return (
        module.num_samples is None
        and len(module.dist_sample_keys) == 1
        # Of tensordict's later versions only.
        and getattr(module, "_generator", None) is None
        and getattr(module, "_generator_key", None) is None
    )


def _alike(rows: Mapping[Key, np.ndarray]) -> bool:
    return len({(row.shape, row.dtype) for row in rows.values()}) == 1


def _name(dist_key: Any) -> str:
    return dist_key if isinstance(dist_key, str) else str(dist_key[-1])


def _late(log_prob: Key | None) -> tuple[Key, ...]:
    return () if log_prob is None else (log_prob,)


def _must_hold(condition: Tensor, key: Key, family: str) -> None:
    """A policy that has diverged must not go on sampling: torch.distributions raises here too."""
    if not bool(condition.all()):
        raise ValueError(
            f"The policy produced {key!r}, the parameters of its {family} distribution, with values that no such "
            "distribution can have, like NaN. Its weights or its inputs are not finite: look at the last optimiser "
            "step, the learning rate and the observations."
        )
