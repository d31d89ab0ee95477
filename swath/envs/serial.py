"""SerialEnv: several envs as one, stepped one after the other in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from swath.envs.adapt import as_env
from swath.envs.base import EnvBase, make_all, must_differ
from swath.envs.gym import GymEnv
from swath.envs.lanes import GymLanes
from swath.envs.layout import Layout, must_agree
from swath.envs.rows import Leaf, Rows
from swath.errors import annotate
from swath.keys import Key

EnvFactory = Callable[..., Any]


class SerialEnv(EnvBase):
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
        must_differ(self.simulators, "SerialEnv(4, lambda: GymEnv('CartPole-v1'))")
        first = self.envs[0]
        must_agree("SerialEnv", [Layout.of(env) for env in self.envs])
        super().__init__(
            first.observation_space,
            first.action_space,
            batch_size=(num_workers, *first.batch_size),
            device=device if device is not None else first.device,
        )
        self.observations, self.actions = first.observations, first.actions
        self.reward_leaf = first.reward_leaf
        self.has_truncated = all(env.has_truncated for env in self.envs)
        self._lanes = _merged(self.envs)
        self._bound_action: Rows | None = None
        self._bound_out: Rows | None = None

    @property
    def is_merged(self) -> bool:
        """Whether all lanes are gymnasium envs of their own, and stepped as one set."""
        return self._lanes is not None

    @property
    def rows_device(self) -> torch.device | None:
        """Where the envs themselves work."""
        return self.envs[0].rows_device

    @property
    def simulators(self) -> list[Any]:
        """Those of all envs."""
        return [simulator for env in self.envs for simulator in env.simulators]

    @property
    def out_leaves(self) -> dict[Key, Leaf]:
        """What a step writes, as the envs themselves say."""
        return self.envs[0].out_leaves

    def reset_into(self, lanes: Sequence[int], out: Rows) -> None:
        """Begin new episodes in `lanes`, each in the env that it belongs to."""
        if self._lanes is not None:
            try:
                self._lanes.reset_into(lanes, out)
            except Exception as error:
                self._name(error, self._lanes.failed // self.envs[0].num_lanes)
                raise
            return
        if out is not self._bound_out:
            self._bind_out(out)
        size, index = self.envs[0].num_lanes, 0
        try:
            for index, (env, part) in enumerate(zip(self.envs, self._outs, strict=True)):
                own = [lane - index * size for lane in lanes if lane // size == index]
                if own:
                    env.reset_into(own, part)
        except Exception as error:
            self._name(error, index)
            raise

    def step_into(self, action: Rows, out: Rows) -> bool:
        """Step every env on its part of the rows."""
        if self._lanes is not None:
            try:
                return self._lanes.step_into(action, out)
            except Exception as error:
                self._name(error, self._lanes.failed // self.envs[0].num_lanes)
                raise
        if action is not self._bound_action:
            self._actions, self._bound_action = self._split(action), action
        if out is not self._bound_out:
            self._bind_out(out)
        finished, index = False, 0
        try:
            for index, env in enumerate(self.envs):
                finished |= env.step_into(self._actions[index], self._outs[index])
        except Exception as error:
            self._name(error, index)
            raise
        return finished

    def _bind_out(self, out: Rows) -> None:
        self._outs, self._bound_out = self._split(out), out

    def _split(self, rows: Rows) -> list[Rows]:
        """The part of `rows` of each env."""
        size, shape = self.envs[0].num_lanes, tuple(self.envs[0].batch_size)
        return [rows.part(i * size, (i + 1) * size, shape) for i in range(len(self.envs))]

    def _name(self, error: Exception, index: int) -> None:
        """Add to an error in which env it was raised."""
        annotate(error, f"This was env {index} of {self!r}.")

    def _set_seeds(self, seeds: list[int]) -> None:
        if self._lanes is not None:
            self._lanes.seed(seeds)
            return
        size = self.envs[0].num_lanes
        for index, env in enumerate(self.envs):
            env._set_seeds(seeds[index * size : (index + 1) * size])

    def _close(self) -> None:
        for env in self.envs:
            env.close()

    def __repr__(self) -> str:
        """Number of envs, and the first."""
        return f"SerialEnv({len(self.envs)}, {self.envs[0]!r})"


def one_each(name: str, given: Any, count: int) -> list[Any]:
    """`given` for each of `count` envs, or the list of them that was given."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"num_workers must be a positive whole number, got {count!r}.")
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != count:
            raise ValueError(f"{name} has {len(given)} elements for num_workers={count}.")
        return list(given)
    return [given] * count


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
