"""Several known distributions in one: each head is sampled as it would be by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    composite_lp_aggregate,
)

from swath.keys import Key, as_key, as_path
from swath.modules.families import has_own_generator, sampling_stage
from swath.modules.sampling import SamplingStage
from swath.modules.stages import Filled, Stage


class CompositeStage(Stage):
    """The stages of all heads, one after the other."""

    def __init__(self, heads: Sequence[SamplingStage]) -> None:
        """Run `heads`."""
        self._heads = heads
        self.late = tuple(key for head in heads for key in head.late)
        self.needs_conditions = any(head.needs_conditions for head in heads)

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Draw the noise of all heads."""
        for head in self._heads:
            head.begin(steps, generator)

    def run(self, t: int) -> None:
        """Act with all heads."""
        for head in self._heads:
            head.run(t)

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """Act for some lanes."""
        for head in self._heads:
            head.run_on(lanes, times)

    def run_first(self, count: int, t: int) -> None:
        """Act for the first lanes."""
        for head in self._heads:
            head.run_first(count, t)

    def finish(self, columns: Mapping[Key, Any], filled: Filled) -> None:
        """Compute the log-probabilities of all heads."""
        for head in self._heads:
            head.finish(columns, filled)


def composite_stage(
    module: ProbabilisticTensorDictModule,
    reads: Mapping[Key, np.ndarray],
    writes: Mapping[Key, np.ndarray],
    exploration: InteractionType | None,
    late: bool,
) -> CompositeStage | None:
    """A stage that samples all heads as `module` does; None if one of them is not known."""
    if module.distribution_class is not CompositeDistribution or module.num_samples is not None:
        return None
    if has_own_generator(module) or composite_lp_aggregate(nowarn=True) or len(module.in_keys) != 1:
        return None
    given = dict(module.distribution_kwargs.items())
    names, kinds = given.pop("name_map", None) or {}, given.pop("distribution_map", None)
    samples = [as_key(key) for key in module.dist_sample_keys]
    if given or not isinstance(kinds, Mapping) or set(samples) != {as_key(names.get(n, n)) for n in kinds}:
        return None
    scores = dict(zip(samples, module.log_prob_keys, strict=True)) if module.return_log_prob else {}
    heads: list[SamplingStage] = []
    for name, kind in kinds.items():
        path, sample = (*as_path(as_key(module.in_keys[0])), *as_path(as_key(name))), as_key(names.get(name, name))
        params = {as_path(key)[-1]: key for key in reads if as_path(key)[:-1] == path}
        head = _head(module, kind, params, sample, scores.get(sample))
        stage = sampling_stage(head, reads, writes, exploration, late)
        if stage is None:
            return None
        heads.append(stage)
    return CompositeStage(heads)


def _head(
    module: ProbabilisticTensorDictModule, kind: Callable[..., Any], params: dict[str, Key], sample: Key, score: Any
) -> ProbabilisticTensorDictModule:
    """What would sample one of the heads by itself."""
    return ProbabilisticTensorDictModule(
        in_keys=params,
        out_keys=[sample],
        distribution_class=kind,
        return_log_prob=module.return_log_prob,
        log_prob_key=score,
        default_interaction_type=module.default_interaction_type,
    )
