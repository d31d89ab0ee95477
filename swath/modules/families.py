"""Which distributions are known, and the stage that samples for a policy's module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule
from tensordict.nn.distributions import Delta, OneHotCategorical
from torch import distributions as D

from swath.keys import Key, as_key
from swath.modules.builders import builds_independent_normals, is_formula, is_value
from swath.modules.built import BuiltStage, TruncatedStage
from swath.modules.parts import name_of
from swath.modules.sampling import CategoricalStage, DeltaStage, Family, NormalStage, SamplingStage
from swath.modules.tanh_normal import TanhNormal

MODE, MEAN, MEDIAN = InteractionType.MODE, InteractionType.MEAN, InteractionType.MEDIAN
DETERMINISTIC = InteractionType.DETERMINISTIC

_INDEX = Family(("logits",), (MODE, DETERMINISTIC), CategoricalStage)
_ONE_HOT = replace(_INDEX, one_hot=True)
_NORMAL = Family(("loc", "scale"), (MODE, MEAN, DETERMINISTIC), NormalStage)
_INDEPENDENT = replace(_NORMAL, has_events=True)
_SQUASHED = Family(
    ("loc", "scale"),
    (MODE, MEDIAN, DETERMINISTIC),
    NormalStage,
    frozenset({"low", "high"}),
    squashed=True,
    has_events=True,
)
_DELTA = Family(("param",), (MODE, MEAN, DETERMINISTIC), DeltaStage)

FAMILIES: dict[Any, Family] = {
    D.Categorical: _INDEX,
    D.OneHotCategorical: _ONE_HOT,
    OneHotCategorical: replace(_ONE_HOT, ties=True),
    D.Normal: _NORMAL,
    TanhNormal: _SQUASHED,
    Delta: _DELTA,
}

PEERS = "torchrl.modules.distributions."
PEER_FAMILIES: dict[tuple[str | None, str | None], Family] = {
    (PEERS + "continuous", "TanhNormal"): replace(_SQUASHED, greedy=(DETERMINISTIC,)),
    (PEERS + "continuous", "IndependentNormal"): _INDEPENDENT,
    (PEERS + "continuous", "TruncatedNormal"): Family(("loc", "scale"), (), TruncatedStage, frozenset({"low", "high"})),
    (PEERS + "continuous", "Delta"): _DELTA,
    (PEERS + "discrete", "OneHotCategorical"): replace(_ONE_HOT, ties=True),
    (PEERS + "discrete", "MaskedCategorical"): replace(_INDEX, params=("logits", "mask")),
}
"""TorchRL's classes, by name: they compute what ours do, for as long as they are given no more than is listed."""

IDLE = (("tanh_loc", False), ("validate_args", None), ("validate_args", False))
"""What may be given to a distribution, and asks for nothing."""


def _family_of(module: ProbabilisticTensorDictModule) -> Family | None:
    kind: Any = module.distribution_class
    family = FAMILIES.get(kind) or PEER_FAMILIES.get(name_of(kind))
    if family is not None or not is_formula(kind):
        return family
    if not module.distribution_kwargs and builds_independent_normals(kind):
        return _INDEPENDENT
    given = {} if module.distribution_kwargs is None else dict(module.distribution_kwargs.items())
    if not all(map(is_value, given.values())):
        return None
    return Family(tuple(params_of(module)), (), BuiltStage, frozenset(given))


def params_of(module: ProbabilisticTensorDictModule) -> dict[str, Key]:
    """The keys that the distribution's parameters are read from, by name."""
    names = [name if isinstance(name, str) else str(name[-1]) for name in module.dist_keys]
    return dict(zip(names, map(as_key, module.in_keys), strict=True))


def sampling_stage(
    module: ProbabilisticTensorDictModule,
    reads: Mapping[Key, np.ndarray],
    writes: Mapping[Key, np.ndarray],
    exploration: InteractionType | None,
    late: bool,
) -> SamplingStage | None:
    """A stage that samples as `module` does, and judges `late`, for the whole slot; None if the module has to do it."""
    # What the distribution gets beside its parameters; it may be held in a TensorDict.
    kwargs = {} if module.distribution_kwargs is None else dict(module.distribution_kwargs.items())
    family = _family_of(module)
    exploration = exploration or module.default_interaction_type
    if family is None or exploration not in (InteractionType.RANDOM, *family.greedy) or not draws_once(module):
        return None
    if not {name for name, value in kwargs.items() if (name, value) not in IDLE} <= family.kwargs:
        return None
    named = params_of(module)
    if set(named) != set(family.params):
        return None
    params, action = [named[name] for name in family.params], as_key(module.dist_sample_keys[0])
    kinds = [np.float32 if name != "mask" else np.bool_ for name in family.params]
    if action not in writes or any(key not in reads for key in params):
        return None
    if any(reads[key].dtype != kind for key, kind in zip(params, kinds, strict=True)):
        return None
    if action in params:
        return None  # the log-probability, computed later, would not find the parameter
    rows = {**{key: reads[key] for key in params}, action: writes[action]}
    stage = family.stage(module, family, rows, exploration is not InteractionType.RANDOM)
    if not stage.fits:
        return None
    if not late:
        stage.judge_at_once(writes[stage.late[0]] if stage.late else None)
    return stage


def draws_once(module: ProbabilisticTensorDictModule) -> bool:
    """Whether `module` draws one sample of one entry from torch's own generator."""
    return module.num_samples is None and len(module.dist_sample_keys) == 1 and not has_own_generator(module)


def has_own_generator(module: ProbabilisticTensorDictModule) -> bool:
    """Whether `module` was given a generator, as can be in later versions of tensordict."""
    return getattr(module, "_generator", None) is not None or getattr(module, "_generator_key", None) is not None
