"""Envs whose data prove that each frame is where it belongs.

An observation is `(lane, episode, step)`: which lane this is, how many episodes it had before, and how many steps of
this episode were made. The reward of a step is the number of the step. So every entry of a batch can be checked alone,
and against its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces as gs
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict, TensorDictBase

from swath.envs import EnvBase
from swath.keys import OBSERVATION, RESET, REWARD, TERMINATED, TRUNCATED

Lengths = int | Sequence[int] | Sequence[Sequence[int]]
"""Episode lengths: one for all, a list that every lane repeats, or such a list for each lane."""

KINDS = ("vector", "dict", "pixels")
PIXEL_SHAPE = (8, 8, 4)


def length_of(lengths: Lengths, lane: int, episode: int) -> int:
    """The length of that episode of that lane."""
    if isinstance(lengths, int):
        return lengths
    own = lengths if isinstance(lengths[0], int) else lengths[lane]
    return own[episode % len(own)]  # type: ignore[index, arg-type, return-value]


def counting_space(kind: str) -> gs.Space[Any]:
    """The observation space of that kind."""
    vector = gs.Box(-np.inf, np.inf, (3,), np.float32)
    if kind == "vector":
        return vector
    if kind == "dict":
        return gs.Dict({"count": vector, "inner": gs.Dict({"step": gs.Box(0, 2**31, (1,), np.int64)})})
    if kind == "pixels":
        return gs.Box(0, 255, PIXEL_SHAPE, np.uint8)
    raise ValueError(f"kind must be one of {KINDS}, got {kind!r}.")


def counting_observation(numbers: np.ndarray, kind: str) -> Any:
    """Numbers `[..., 3]` as an observation of that kind; `counted` in `swath.testing.checks` reads them again."""
    if kind == "vector":
        return numbers.astype(np.float32)
    if kind == "dict":
        return {"count": numbers.astype(np.float32), "inner": {"step": numbers[..., 2:].astype(np.int64)}}
    picture = np.zeros((*numbers.shape[:-1], *PIXEL_SHAPE), np.uint8)
    picture[..., :3] = numbers[..., None, None, :]
    return picture


class CountingGymEnv(gym.Env[Any, Any]):
    """The counting env as gymnasium has it: one lane.

    Args:
        lane: the first number of each observation.
        lengths: how long the episodes are.
        kind: "vector" observations, "dict" with the nested entries `count` and `("inner", "step")`, or "pixels".
        truncate: whether episodes are truncated rather than terminated.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium declares it so

    def __init__(self, lane: int = 0, lengths: Lengths = 5, kind: str = "vector", truncate: bool = False) -> None:
        self.lane, self.lengths, self.kind, self.truncate = lane, lengths, kind, truncate
        self.episode, self.count = -1, 0
        self.is_closed = False
        self.actions: list[Any] = []
        """Actions of the running episode."""
        self.observation_space = counting_space(kind)
        self.action_space = gs.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode."""
        super().reset(seed=seed)
        self.episode, self.count, self.actions = self.episode + 1, 0, []
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Count one step."""
        self.count += 1
        self.actions.append(action)
        over = self.count >= length_of(self.lengths, self.lane, self.episode)
        return self._observe(), float(self.count), over and not self.truncate, over and self.truncate, {}

    def close(self) -> None:
        """Remember that it was closed."""
        self.is_closed = True

    def _observe(self) -> Any:
        return counting_observation(np.array([self.lane, self.episode, self.count]), self.kind)


def counting_envs(lanes: int, **options: Any) -> list[Callable[[], CountingGymEnv]]:
    """Factories of counting envs, one per lane."""

    def factory(lane: int) -> Callable[[], CountingGymEnv]:
        return lambda: CountingGymEnv(lane, **options)

    return [factory(lane) for lane in range(lanes)]


class CountingVectorEnv(VectorEnv[Any, Any, Any]):
    """The counting env as a vector env that resets finished lanes in the next step, and in no other way.

    Its lanes are numbered in order; other arguments are those of `CountingGymEnv`.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - gymnasium declares it so

    def __init__(self, num_envs: int, lengths: Lengths = 5, kind: str = "vector", truncate: bool = False) -> None:
        self.num_envs, self.lengths, self.kind, self.truncate = num_envs, lengths, kind, truncate
        self.single_observation_space, self.single_action_space = counting_space(kind), gs.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._episode = np.full(num_envs, -1)
        self._count = np.zeros(num_envs, dtype=np.int64)
        self._ended = np.zeros(num_envs, dtype=bool)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode in all lanes."""
        self._ended[:] = True
        self._count_up()
        self._ended[:] = False
        return self._observe(), {}

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Count one step in each lane, or begin its next episode if the last step ended one."""
        self._count_up()
        lengths = [length_of(self.lengths, lane, int(self._episode[lane])) for lane in range(self.num_envs)]
        ended = self._ended = self._count >= lengths
        reward = self._count.astype(np.float64)
        return self._observe(), reward, ended & (not self.truncate), ended & self.truncate, {}

    def _count_up(self) -> None:
        self._count = np.where(self._ended, 0, self._count + 1)
        self._episode = self._episode + self._ended

    def _observe(self) -> Any:
        return counting_observation(np.stack([np.arange(self.num_envs), self._episode, self._count], -1), self.kind)


class CountingEnv(EnvBase):
    """The counting env as a custom env of any batch size, written with `_reset` and `_step`.

    Its lanes are numbered in order from `first_lane`; other arguments are those of `CountingGymEnv`.
    """

    def __init__(
        self, batch_size: Sequence[int] = (), lengths: Lengths = 5, truncate: bool = False, kind: str = "vector"
    ) -> None:
        super().__init__(counting_space(kind), gs.Discrete(2), batch_size=batch_size)
        self.lengths, self.kind, self.truncate = lengths, kind, truncate
        self._episode = torch.full((self.num_lanes,), -1, device="cpu")
        self._count = torch.zeros(self.num_lanes, dtype=torch.int64, device="cpu")

    @property
    def _lanes(self) -> range:
        return range(self.first_lane, self.first_lane + self.num_lanes)

    def _observe(self) -> dict[str, Any]:
        numbers = torch.stack([torch.tensor(self._lanes, device="cpu"), self._episode, self._count], -1)
        seen = counting_observation(numbers.view(*self.batch_size, 3).numpy(), self.kind)
        if self.kind == "dict":
            inner = {"step": torch.from_numpy(seen["inner"]["step"])}
            return {"count": torch.from_numpy(seen["count"]), "inner": inner}
        return {OBSERVATION: torch.from_numpy(seen)}

    def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        mask = tensordict.get(RESET, None)
        chosen = slice(None) if mask is None else mask.reshape(-1)
        self._episode[chosen] += 1
        self._count[chosen] = 0
        return TensorDict(self._observe(), batch_size=self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._count += 1
        lengths = [length_of(self.lengths, lane, int(n)) for lane, n in zip(self._lanes, self._episode, strict=True)]
        over = (self._count >= torch.tensor(lengths, device="cpu")).view(*self.batch_size, 1)
        flags = {TERMINATED: over & (not self.truncate), TRUNCATED: over & self.truncate}
        reward = self._count.float().view(*self.batch_size, 1)
        return TensorDict({**self._observe(), REWARD: reward, **flags}, batch_size=self.batch_size)
