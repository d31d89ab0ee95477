"""Gymnasium environments: one, several stepped one after the other, or a `gymnasium.vector.VectorEnv`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import VectorEnv

from swath.envs.base import EnvBase
from swath.envs.env_layout import make_all, must_differ
from swath.envs.envpool import COLLECT, is_asynchronous
from swath.envs.gym_lanes import GymLanes, VectorLanes
from swath.envs.gym_steps import is_gymnasiums
from swath.envs.rows import Leaf, Rows
from swath.errors import UnsupportedEnvError
from swath.keys import MASK, Key


class GymEnv(EnvBase):
    """A gymnasium environment by name, from an instance, or from a factory.

    `GymEnv("CartPole-v1")` is one lane with an empty batch size; `num_envs=8` makes eight lanes of batch size `[8]`,
    stepped in this process. A `gymnasium.vector.VectorEnv` gives its own number of lanes, in whichever autoreset mode
    it works: the final observation of an episode is always in `("next", ...)`.

    Discrete actions are one-hot (`categorical_action_encoding=True`: integers from 0, whatever the space's `start`);
    a vector of scores is taken by its argmax. RGB images are called "pixels", other arrays "observation", and the
    entries of a Dict keep their names. Images stay uint8.
    """

    def __init__(
        self,
        env: str | gym.Env[Any, Any] | VectorEnv[Any, Any, Any] | Callable[..., Any],
        *,
        num_envs: int = 0,
        categorical_action_encoding: bool = False,
        device: torch.device | str | None = None,
        frame_skip: int | None = None,
        from_pixels: bool = False,
        pixels_only: bool = False,
        **kwargs: Any,
    ) -> None:
        """Make the env (or `num_envs` of it); `kwargs` go to `gymnasium.make` or to the factory.

        Args:
            env: a registered name, an instance, or a callable that returns an instance.
            num_envs: 0 for one env without a batch dimension; otherwise how many lanes.
            categorical_action_encoding: integers instead of one-hot vectors for discrete values.
            device: where the tensors of the surface and of the batches lie.
            frame_skip: repeat each action so many times and add up the rewards.
            from_pixels: add what the env renders as "pixels".
            pixels_only: leave out the other observations then.
            kwargs: for `gymnasium.make`, or for the factory.
        """
        if num_envs < 0:
            raise ValueError(f"num_envs must be 0 (no batch dimension) or more, got {num_envs}.")
        made = _make(env, num_envs, kwargs, from_pixels)
        self._owns_simulators = not isinstance(env, gym.Env | VectorEnv)
        first = made if isinstance(made, VectorEnv) else made[0]
        if is_asynchronous(first):
            raise UnsupportedEnvError(
                f"{type(first).__name__} has a batch_size below its num_envs, so that it steps its envs at their own "
                f"pace: collect with {COLLECT}. To step all together, make it without a batch_size."
            )
        registered = env if isinstance(env, str) else getattr(first.spec, "id", None)  # EnvPool has specs of its own
        self.name: str = registered or type(first.unwrapped).__name__
        if isinstance(made, VectorEnv):
            if frame_skip is not None or from_pixels:
                raise ValueError(
                    "frame_skip and from_pixels do not work with a vector env: wrap the envs that it is made of or use "
                    "GymEnv(name, num_envs=...)."
                )
            space, action_space = made.single_observation_space, made.single_action_space
            batch_size: tuple[int, ...] = (made.num_envs,)
        else:
            made = [_wrap(single, frame_skip, from_pixels, pixels_only) for single in made]
            space, action_space = made[0].observation_space, made[0].action_space
            batch_size = (num_envs,) if num_envs else ()
        super().__init__(
            space,
            action_space,
            batch_size=batch_size,
            device=device,
            categorical_action_encoding=categorical_action_encoding,
        )
        lanes = VectorLanes if isinstance(made, VectorEnv) else GymLanes
        self._lanes: GymLanes | VectorLanes = lanes(made, self.observations, self.actions)

    @property
    def gym_envs(self) -> list[gym.Env[Any, Any]] | None:
        """The gymnasium envs of all lanes, or None for a vector env."""
        return self._lanes.envs if isinstance(self._lanes, GymLanes) else None

    @property
    def vector_env(self) -> VectorEnv[Any, Any, Any] | None:
        """The vector env, or None for separate envs."""
        return self._lanes.env if isinstance(self._lanes, VectorLanes) else None

    @property
    def simulators(self) -> list[Any]:
        """The gymnasium envs under all wrappers, or the vector env."""
        if self.vector_env is not None:
            return [self.vector_env.unwrapped]
        return [env.unwrapped for env in self.gym_envs or ()]

    @property
    def runs_torch(self) -> bool:
        """Not if all are gymnasium's own envs, which know nothing of torch."""
        envs: Sequence[Any] = [self.vector_env] if self.gym_envs is None else self.gym_envs
        return type(self) is not GymEnv or not all(map(is_gymnasiums, envs))

    @property
    def out_leaves(self) -> dict[Key, Leaf]:
        """What a step writes, with a mask where lanes may be idle."""
        mask = {MASK: Leaf((), torch.bool)} if self._lanes.idles else {}
        return super().out_leaves | mask

    @property
    def rows_device(self) -> torch.device | None:
        """The CPU: gymnasium works on arrays."""
        return None

    def reset_into(self, lanes: Sequence[int], out: Rows) -> None:
        """Begin new episodes in `lanes`."""
        self._lanes.reset_into(lanes, out)

    def step_into(self, action: Rows, out: Rows) -> bool:
        """Step every lane."""
        return self._lanes.step_into(action, out)

    @property
    def can_step_lanes(self) -> bool:
        """Separate envs can be stepped one by one, the lanes of a vector env cannot."""
        return isinstance(self._lanes, GymLanes) or self.num_lanes == 1

    def step_lanes_into(self, lanes: Sequence[int], action: Rows, out: Rows) -> bool:
        """Step the envs of `lanes`."""
        if isinstance(self._lanes, GymLanes):
            return self._lanes.step_into(action, out, lanes)
        return super().step_lanes_into(lanes, action, out)

    def seed_lanes(self, seeds: list[int]) -> None:
        """Seed each lane at its next reset."""
        self._lanes.seed(seeds)

    def _close(self) -> None:
        self._lanes.close()

    def __repr__(self) -> str:
        """Name and lanes."""
        return f"GymEnv({self.name}, batch_size={list(self.batch_size)})"


def _make(env: Any, num_envs: int, kwargs: dict[str, Any], from_pixels: bool) -> Any:
    """A vector env, or a list of `num_envs` (at least one) separate envs."""
    make = _factory(env, kwargs, from_pixels)
    first = make()
    if isinstance(first, VectorEnv):
        if num_envs not in (0, first.num_envs):
            raise ValueError(f"num_envs={num_envs} does not fit a vector env of {first.num_envs} envs.")
        return first
    if num_envs > 1 and isinstance(env, gym.Env):
        raise ValueError(f"num_envs={num_envs} needs a name or a factory: one instance cannot be {num_envs} envs.")
    envs = make_all([lambda: first, *[make] * (num_envs - 1)])
    must_differ([id(single.unwrapped) for single in envs], "lambda: gymnasium.make(...)")
    return envs


def _factory(env: Any, kwargs: dict[str, Any], from_pixels: bool) -> Callable[[], Any]:
    """A function of no arguments that makes one env of whatever was given."""
    if isinstance(env, str):
        if from_pixels:
            kwargs = {"render_mode": "rgb_array", **kwargs}
        return lambda: gym.make(env, **kwargs)
    if isinstance(env, gym.Env | VectorEnv):
        if kwargs:
            raise TypeError(f"GymEnv was given an env instance, which takes no further arguments: {sorted(kwargs)}.")
        return lambda: env
    if callable(env):

        def make() -> Any:
            made = env(**kwargs)
            if not isinstance(made, gym.Env | VectorEnv):
                raise no_env(made, f"The factory {env!r} given to GymEnv must return a gymnasium env, not")
            return made

        return make
    raise no_env(env, "GymEnv takes a registered name, a gymnasium env, or a factory of one, got")


def no_env(given: Any, wanted: str, otherwise: str = "") -> UnsupportedEnvError:
    """The error for something that is `given` as an env; what looks like one is told what is missing."""
    kind, cure = type(given), ""
    if kind.__module__.partition(".")[0] == "gym":
        cure = " It is an env of the old gym: gymnasium.make('GymV26Environment-v0', env=env) takes it along, with "
        cure += "pip install shimmy[gym-v26]."
    elif hasattr(given, "reset") and hasattr(given, "step"):
        cure = f" It has reset() and step(), but is no gymnasium.Env: write class {kind.__name__}(gymnasium.Env)."
    return UnsupportedEnvError(f"{wanted} {kind.__name__}: {given!r}.{cure or otherwise}")


def _wrap(env: gym.Env[Any, Any], frame_skip: int | None, from_pixels: bool, pixels_only: bool) -> gym.Env[Any, Any]:
    if frame_skip is not None:
        env = _FrameSkip(env, frame_skip)
    if from_pixels:
        env = gym.wrappers.AddRenderObservation(
            env, render_only=pixels_only, render_key="pixels", obs_key="observation"
        )
    return env


class _FrameSkip(gym.Wrapper[Any, Any, Any, Any]):
    """Repeats each action and adds up the rewards."""

    def __init__(self, env: gym.Env[Any, Any], times: int) -> None:
        if times < 1:
            raise ValueError(f"frame_skip must be at least 1, got {times}.")
        super().__init__(env)
        self._times = times

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        total: Any = 0.0
        for _ in range(self._times):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += reward
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info
