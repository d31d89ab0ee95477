"""Several envs as one: how they are made, and what they must and must not have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from gymnasium import spaces as gs

from swath.envs.base import EnvBase
from swath.envs.rows import Leaf
from swath.envs.spaces import ActionCodec, ObservationCodec
from swath.keys import Key


class Closable(Protocol):
    """What can be closed."""

    def close(self) -> None:
        """Free what it holds."""


Made = TypeVar("Made", bound=Closable)


@dataclass(frozen=True)
class EnvLayout:
    """What an env looks like from outside, as far as others must know before they can step it.

    Spaces, codecs, leaves and places, without the env: it can be sent to another process.
    """

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
    def of(env: EnvBase) -> EnvLayout:
        """The layout of `env`."""
        return EnvLayout(
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


def must_agree(whole: str, layouts: Sequence[EnvLayout]) -> None:
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


def must_differ(simulators: Sequence[Any], cure: str) -> None:
    """Refuse to make several lanes of one simulator."""
    if len({id(simulator) for simulator in simulators}) < len(simulators):
        raise ValueError(
            f"The same env was given twice; each lane needs its own. Build the env inside the factory, as in {cure}."
        )


def make_all(makers: Sequence[Callable[[], Made]]) -> list[Made]:
    """One env of each maker; if one of them fails, those that were made are closed again."""
    made: list[Made] = []
    try:
        for make in makers:
            made.append(make())
    except BaseException:
        for env in made:
            env.close()
        raise
    return made
