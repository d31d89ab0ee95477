"""Several envs as one: how they are made, and what they must and must not have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swath.envs.base import EnvBase
from swath.envs.rows import Leaf
from swath.envs.spaces import ActionCodec, ObservationCodec
from swath.errors import UnsupportedEnvError
from swath.keys import REWARD, Key


@dataclass(frozen=True)
class EnvLayout:
    """What an env looks like from outside, as far as others must know before they can step it.

    Codecs with their spaces, leaves and places, without the env: it can be sent to another process.
    """

    name: str
    batch_size: tuple[int, ...]
    observations: ObservationCodec
    actions: ActionCodec
    out_leaves: dict[Key, Leaf]
    has_truncated: bool
    device: torch.device | None
    rows_device: torch.device | None

    @staticmethod
    def of(env: EnvBase) -> EnvLayout:
        """The layout of `env`."""
        return EnvLayout(
            name=repr(env),
            batch_size=tuple(env.batch_size),
            observations=env.observations,
            actions=env.actions,
            out_leaves=env.out_leaves,
            has_truncated=env.has_truncated,
            device=env.device,
            rows_device=env.rows_device,
        )


class JoinedEnv(EnvBase):
    """Envs of one layout, each of which is an element of the first batch dimension."""

    def __init__(self, layouts: Sequence[EnvLayout], device: torch.device | str | None) -> None:
        """Look like those of `layouts`, and hand out tensors on `device`, or on theirs."""
        must_agree(type(self).__name__, layouts)
        self._layout = first = layouts[0]
        super().__init__(
            first.observations.space,
            first.actions.space,
            batch_size=(len(layouts), *first.batch_size),
            device=device if device is not None else first.device,
        )
        self.observations, self.actions, self.reward_leaf = first.observations, first.actions, first.out_leaves[REWARD]
        self.has_truncated = all(layout.has_truncated for layout in layouts)

    @property
    def out_leaves(self) -> dict[Key, Leaf]:
        """What a step writes, as the envs themselves say."""
        return self._layout.out_leaves

    @property
    def rows_device(self) -> torch.device | None:
        """Where the envs themselves work."""
        return self._layout.rows_device

    def __repr__(self) -> str:
        """Number of envs, and the first."""
        return f"{type(self).__name__}({self.batch_size[0]}, {self._layout.name})"


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
                    f"({first.name}) in its {what}: {difference(given, wanted)}."
                )


def difference(given: Any, wanted: Any) -> str:
    """Where two layouts differ: of entries, those alone that do."""
    if not isinstance(given, Mapping) or not isinstance(wanted, Mapping):
        return f"{given} instead of {wanted}"
    keys = [key for key in {**wanted, **given} if given.get(key) != wanted.get(key)]
    return ", ".join(f"{key!r} is {_told(given.get(key))} instead of {_told(wanted.get(key))}" for key in keys)


def _told(leaf: Leaf | None) -> str:
    return "missing" if leaf is None else f"{leaf.dtype} {list(leaf.shape)}"


def must_be_on_cpu(whole: str, layouts: Sequence[EnvLayout]) -> None:
    """Refuse envs whose rows other processes cannot map."""
    for index, layout in enumerate(layouts):
        if layout.rows_device is not None and layout.rows_device.type != "cpu":
            raise UnsupportedEnvError(
                f"{whole} shares rows with its workers in the memory of the CPU, but env {index} ({layout.name}) "
                f"works on {layout.rows_device}. Make it on the CPU, or give it many lanes and step it in this process."
            )


def as_seconds(name: str, given: Any) -> float:
    """A time, if it is one."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not given >= 0:
        raise ValueError(f"{name} must be a number of seconds, 0 or more, got {given!r}.")
    return float(given)


def must_differ(simulators: Sequence[Hashable], cure: str) -> None:
    """Refuse to make several lanes of one simulator; each is told by what identifies it."""
    if len(set(simulators)) < len(simulators):
        raise ValueError(
            f"The same env was given twice; each lane needs its own. Build the env inside the factory, as in {cure}."
        )


def must_be_count(name: str, given: Any) -> None:
    """Refuse what is no number of things."""
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"{name} must be a positive whole number, got {given!r}.")


def one_each(name: str, given: Any, count: int) -> list[Any]:
    """`given` for each of `count` envs, or the list of them that was given."""
    if callable(count) or isinstance(count, Sequence):
        raise TypeError(
            f"num_workers comes first, then {name}, as in SerialEnv(4, make_env) or ParallelEnv(4, make_env); got "
            f"{count!r} for it."
        )
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if is_list and not given:
        raise ValueError(f"{name} is an empty list: give it a function for each env, as in [make_env] * 4.")
    must_be_count("num_workers", count)
    if is_list:
        if len(given) != count:
            raise ValueError(f"{name} has {len(given)} elements for num_workers={count}.")
        return list(given)
    return [given] * count


def make_all(makers: Sequence[Callable[[], Any]]) -> list[Any]:
    """One env of each maker; if one of them fails, those that were made are closed again."""
    made: list[Any] = []
    try:
        for make in makers:
            made.append(make())
    except BaseException:
        for env in made:
            env.close()
        raise
    return made
