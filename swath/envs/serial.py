"""SerialEnv: several envs as one, stepped one after the other in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from swath.envs.adapt import as_env
from swath.envs.base import EnvBase
from swath.envs.env_layout import EnvLayout, JoinedEnv, make_all, must_differ, one_each
from swath.envs.gym import GymEnv
from swath.envs.gym_lanes import GymLanes
from swath.envs.rows import Rows
from swath.errors import annotate

EnvFactory = Callable[..., Any]


class SerialEnv(JoinedEnv):
    """`num_workers` envs with the batch size `[num_workers, *child]`.

    The envs may differ in all but their layout: the same keys, shapes and dtypes.
    """

    _owns_simulators = False  # each of the envs sees to its own

    def __init__(
        self,
        num_workers: int,
        create_env_fn: EnvFactory | Sequence[EnvFactory] | Sequence[EnvBase],
        *,
        create_env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Build the envs: `create_env_fn` is one factory for all, or a list with one for each."""
        factories = one_each("create_env_fn", create_env_fn, num_workers)
        kwargs = one_each("create_env_kwargs", create_env_kwargs or {}, num_workers)
        self.envs = make_all([partial(as_env, f, k) for f, k in zip(factories, kwargs, strict=True)])
        must_differ(list(map(id, self.simulators)), "SerialEnv(4, lambda: GymEnv('CartPole-v1'))")
        super().__init__([EnvLayout.of(env) for env in self.envs], device)
        self._lanes: GymLanes | EnvLanes = _merged(self.envs) or EnvLanes(self.envs)

    @property
    def is_merged(self) -> bool:
        """Whether all lanes are gymnasium envs of their own, and stepped as one set."""
        return isinstance(self._lanes, GymLanes)

    @property
    def simulators(self) -> list[Any]:
        """Those of all envs."""
        return [simulator for env in self.envs for simulator in env.simulators]

    @property
    def runs_torch(self) -> bool:
        """Whether one of the envs does."""
        return type(self) is not SerialEnv or any(env.runs_torch for env in self.envs)

    def reset_into(self, lanes: Sequence[int], out: Rows) -> None:
        """Begin new episodes in `lanes`, each in the env that it belongs to."""
        try:
            self._lanes.reset_into(lanes, out)
        except Exception as error:
            self._name(error, self._lanes.failed // self.envs[0].num_lanes)
            raise

    def step_into(self, action: Rows, out: Rows, lanes: Sequence[int] | None = None) -> bool:
        """Step every env on its part of the rows, or `lanes`, each in the env that it belongs to."""
        try:
            return self._lanes.step_into(action, out, lanes)
        except Exception as error:
            self._name(error, self._lanes.failed // self.envs[0].num_lanes)
            raise

    @property
    def can_step_lanes(self) -> bool:
        """Whether each of the envs can."""
        return all(env.can_step_lanes for env in self.envs)

    def step_lanes_into(self, lanes: Sequence[int], action: Rows, out: Rows) -> bool:
        """Step `lanes`."""
        if not self.can_step_lanes:
            return super().step_lanes_into(lanes, action, out)
        return self.step_into(action, out, lanes)

    def _name(self, error: Exception, index: int) -> None:
        """Add to an error in which env it was raised."""
        annotate(error, f"This was env {index} of {self!r}.")

    def seed_lanes(self, seeds: list[int]) -> None:
        """Seed each lane in its env."""
        self._lanes.seed(seeds)

    def _close(self) -> None:
        for env in self.envs:
            env.close()


class EnvLanes:
    """Envs with the same number of lanes each, stepped one after the other on their parts of the rows."""

    def __init__(self, envs: Sequence[EnvBase]) -> None:
        """Step `envs`."""
        self._envs = envs
        self._size, self._shape = envs[0].num_lanes, tuple(envs[0].batch_size)
        self.failed = 0
        """The first lane of the env that has raised last."""
        self._bound_action: Rows | None = None
        self._bound_out: Rows | None = None

    def reset_into(self, lanes: Sequence[int], out: Rows) -> None:
        """Reset the envs of `lanes`."""
        if out is not self._bound_out:
            self._outs, self._bound_out = self._split(out), out
        for index, own in self._shares(lanes).items():
            self.failed = index * self._size
            self._envs[index].reset_into(own, self._outs[index])

    def step_into(self, action: Rows, out: Rows, lanes: Sequence[int] | None = None) -> bool:
        """Step all envs, or those of `lanes`."""
        if action is not self._bound_action:
            self._actions, self._bound_action = self._split(action), action
        if out is not self._bound_out:
            self._outs, self._bound_out = self._split(out), out
        finished = False
        if lanes is None:
            for index, env in enumerate(self._envs):
                self.failed = index * self._size
                finished |= env.step_into(self._actions[index], self._outs[index])
        else:
            for index, own in self._shares(lanes).items():
                self.failed = index * self._size
                finished |= self._envs[index].step_lanes_into(own, self._actions[index], self._outs[index])
        return finished

    def seed(self, seeds: list[int]) -> None:
        """Seed each lane."""
        for index, env in enumerate(self._envs):
            env.seed_lanes(seeds[index * self._size : (index + 1) * self._size])

    def _shares(self, lanes: Sequence[int]) -> dict[int, list[int]]:
        """By env: those of `lanes` that it has, as it counts them."""
        shares: dict[int, list[int]] = {}
        for lane in lanes:
            shares.setdefault(lane // self._size, []).append(lane % self._size)
        return shares

    def _split(self, rows: Rows) -> list[Rows]:
        """The part of `rows` of each env."""
        size = self._size
        return [rows.part(i * size, (i + 1) * size, self._shape) for i in range(len(self._envs))]


def _merged(envs: Sequence[EnvBase]) -> GymLanes | None:
    """One set of lanes for envs that are all plain gymnasium envs, which spares a call per lane and step."""
    flat: list[Any] = []
    for env in envs:
        own = env.gym_envs if type(env) is GymEnv else None
        if own is None or env.observation_space != envs[0].observation_space:
            return None
        if env.action_space != envs[0].action_space:
            return None
        flat.extend(own)
    return GymLanes(flat, envs[0].observations, envs[0].actions)
