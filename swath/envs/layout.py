"""Layout: what an env looks like from outside, as far as others must know before they can step it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gymnasium import spaces as gs

from swath.envs.base import EnvBase
from swath.envs.rows import Leaf
from swath.envs.spaces import ActionCodec, ObservationCodec
from swath.keys import Key


@dataclass(frozen=True)
class Layout:
    """Spaces, codecs, leaves and places of an env, without the env: it can be sent to another process."""

    name: str
    batch_size: tuple[int, ...]
    observation_space: gs.Space[Any]
    action_space: gs.Space[Any]
    observations: ObservationCodec
    actions: ActionCodec
    out_leaves: dict[Key, Leaf]
    reward_leaf: Leaf
    has_truncated: bool
    device: torch.device | None
    rows_device: torch.device | None

    @staticmethod
    def of(env: EnvBase) -> Layout:
        """The layout of `env`."""
        return Layout(
            name=repr(env),
            batch_size=tuple(env.batch_size),
            observation_space=env.observation_space,
            action_space=env.action_space,
            observations=env.observations,
            actions=env.actions,
            out_leaves=env.out_leaves,
            reward_leaf=env.reward_leaf,
            has_truncated=env.has_truncated,
            device=env.device,
            rows_device=env.rows_device,
        )


def must_agree(whole: str, layouts: Sequence[Layout]) -> None:
    """Refuse to make a `whole` of envs whose rows differ."""
    first = layouts[0]
    for index, layout in enumerate(layouts):
        for what, wanted, given in (
            ("batch_size", first.batch_size, layout.batch_size),
            ("observations", first.out_leaves, layout.out_leaves),
            ("actions", first.actions.leaves, layout.actions.leaves),
        ):
            if wanted != given:
                raise ValueError(
                    f"{whole} needs envs of one layout, but env {index} ({layout.name}) differs from env 0 "
                    f"({first.name}) in its {what}: {given} instead of {wanted}."
                )
