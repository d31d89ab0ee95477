"""Envs whose data prove that each frame is where it belongs.

An observation is `(lane, episode, step)`: which lane this is, how many episodes it had before, and how many steps of this
episode were made. The reward of a step is the number of the step. So every entry of a batch can be checked alone, and
against its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces as gs
from tensordict import TensorDict, TensorDictBase

from swath.envs import EnvBase
from swath.keys import OBSERVATION, RESET, REWARD, TERMINATED, TRUNCATED

Lengths = int | Sequence[int]
"""Episode lengths: one for all, or a list that is repeated."""

KINDS = ("vector", "dict", "pixels")
PIXEL_SHAPE = (8, 8, 4)


def length_of(lengths: Lengths, episode: int) -> int:
    """The length of that episode."""
    return lengths if isinstance(lengths, int) else lengths[episode % len(lengths)]


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
        """Count from episode 0."""
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, got {kind!r}.")
        self.lane, self.lengths, self.kind, self.truncate = lane, lengths, kind, truncate
        self.episode, self.count = -1, 0
        self.actions: list[Any] = []
        """Actions of the running episode."""
        vector = gs.Box(-np.inf, np.inf, (3,), np.float32)
        self.observation_space = {
            "vector": vector,
            "dict": gs.Dict({"count": vector, "inner": gs.Dict({"step": gs.Box(0, 2**31, (1,), np.int64)})}),
            "pixels": gs.Box(0, 255, PIXEL_SHAPE, np.uint8),
        }[kind]
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
        over = self.count >= length_of(self.lengths, self.episode)
        return self._observe(), float(self.count), over and not self.truncate, over and self.truncate, {}

    def _observe(self) -> Any:
        numbers = np.array([self.lane, self.episode, self.count], dtype=np.float32)
        if self.kind == "vector":
            return numbers
        if self.kind == "dict":
            return {"count": numbers, "inner": {"step": np.array([self.count])}}
        picture = np.zeros(PIXEL_SHAPE, np.uint8)
        picture[..., :3] = numbers.astype(np.uint8)
        return picture


def counting_envs(lanes: int, **options: Any) -> list[Callable[[], CountingGymEnv]]:
    """Factories of counting envs, one per lane."""

    def factory(lane: int) -> Callable[[], CountingGymEnv]:
        return lambda: CountingGymEnv(lane, **options)

    return [factory(lane) for lane in range(lanes)]


class CountingEnv(EnvBase):
    """The counting env as a custom env of any batch size, written with `_reset` and `_step`.

    Args:
        batch_size: the lanes, numbered in order.
        lengths: how long the episodes are: one number, a list that all lanes repeat, or one list per lane.
        truncate: whether episodes are truncated rather than terminated.
    """

    def __init__(
        self,
        batch_size: Sequence[int] = (),
        lengths: Lengths | Sequence[Sequence[int]] = 5,
        truncate: bool = False,
    ) -> None:
        """Count from episode 0 in all lanes."""
        super().__init__(gs.Box(-np.inf, np.inf, (3,), np.float32), gs.Discrete(2), batch_size=batch_size)
        self.lengths = lengths
        self.truncate = truncate
        self._episode = torch.full((self.num_lanes,), -1)
        self._count = torch.zeros(self.num_lanes, dtype=torch.int64)

    def _length(self, lane: int) -> int:
        lengths: Any = self.lengths
        if not isinstance(lengths, int) and not isinstance(lengths[0], int):
            lengths = lengths[lane]
        return length_of(lengths, int(self._episode[lane]))

    def _observe(self) -> torch.Tensor:
        numbers = torch.stack([torch.arange(self.num_lanes), self._episode, self._count], -1)
        return numbers.float().view(*self.batch_size, 3)

    def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        mask = tensordict.get(RESET, None)
        chosen = torch.ones(self.num_lanes, dtype=torch.bool) if mask is None else mask.reshape(-1)
        self._episode[chosen] += 1
        self._count[chosen] = 0
        return TensorDict({OBSERVATION: self._observe()}, batch_size=self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._count += 1
        lengths = torch.tensor([self._length(lane) for lane in range(self.num_lanes)])
        over = (self._count >= lengths).view(*self.batch_size, 1)
        never = torch.zeros_like(over)
        return TensorDict(
            {
                OBSERVATION: self._observe(),
                REWARD: self._count.float().view(*self.batch_size, 1),
                TERMINATED: never if self.truncate else over,
                TRUNCATED: over if self.truncate else never,
            },
            batch_size=self.batch_size,
        )
