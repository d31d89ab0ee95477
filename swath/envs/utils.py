"""What users of `torchrl.envs.utils` look for under that name."""

from __future__ import annotations

from collections.abc import Iterable

from tensordict import TensorDictBase
from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn.probabilistic import interaction_type as exploration_type

from swath.envs.check import check_env
from swath.keys import ACTION, NEXT, REWARD, Key

ExplorationType = InteractionType
"""RANDOM samples; MODE, MEAN, MEDIAN and DETERMINISTIC take that statistic of the policy's distribution."""

set_exploration_type = set_interaction_type
"""Context manager that sets the exploration type for all policies called inside."""

check_env_specs = check_env


def step_mdp(tensordict: TensorDictBase, action_keys: Iterable[Key] = (ACTION,)) -> TensorDictBase:
    """What the step after `tensordict` begins from: its "next" without the reward, and what else lies at its root."""
    root = tensordict.exclude(NEXT, *action_keys)
    root.update(tensordict.get(NEXT).exclude(REWARD))
    return root


__all__ = ["ExplorationType", "check_env", "check_env_specs", "exploration_type", "set_exploration_type", "step_mdp"]
