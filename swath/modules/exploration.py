"""How a policy explores: tensordict's interaction type under the name that RL users know."""

from __future__ import annotations

from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn.probabilistic import interaction_type as exploration_type

ExplorationType = InteractionType
"""RANDOM samples; MODE, MEAN, MEDIAN and DETERMINISTIC take that statistic of the policy's distribution."""

set_exploration_type = set_interaction_type
"""Context manager that sets the exploration type for all policies called inside."""

__all__ = ["ExplorationType", "exploration_type", "set_exploration_type"]
