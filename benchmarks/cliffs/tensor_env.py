"""CartPole in torch, for any number of lanes at once: as an env of one's own, and as a loop by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from benchmarks.batch import Run
from benchmarks.cliffs.workloads import Cliff
from benchmarks.contestants.handwritten import Storage

LONGEST = 500
Sample = Callable[[Tensor], tuple[Tensor, Tensor]]


def begin(lanes: int) -> Tensor:
    """First observations `[N, 4]`."""
    return torch.rand(lanes, 4) * 0.1 - 0.05


def advance(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """The next observations, and which poles have fallen: the equations of gymnasium's CartPole."""
    x, speed, angle, turn = state.unbind(-1)
    force = action * 20.0 - 10.0
    cos, sin = angle.cos(), angle.sin()
    push = (force + 0.05 * turn.square() * sin) / 1.1
    turning = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos.square() / 1.1))
    moving = push - 0.05 * turning * cos / 1.1
    state = torch.stack([x + 0.02 * speed, speed + 0.02 * moving, angle + 0.02 * turn, turn + 0.02 * turning], -1)
    return state, (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.2095)


def own_env(lanes: int) -> Any:
    """The simple way: `_reset` and `_step`."""
    from swath.envs import EnvBase  # not for those who do without

    class TensorCartPole(EnvBase):
        def __init__(self) -> None:
            space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
            super().__init__(space, gym.spaces.Discrete(2), batch_size=[lanes], categorical_action_encoding=True)
            self._age = torch.zeros(lanes, dtype=torch.int64)

        def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
            begun = tensordict.get("_reset", None)
            self._age = torch.zeros_like(self._age) if begun is None else self._age.masked_fill(begun[:, 0], 0)
            return TensorDict({"observation": begin(self.num_lanes)}, batch_size=self.batch_size)

        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            state, fallen = advance(tensordict["observation"], tensordict["action"])
            self._age += 1
            answer = {"observation": state, "reward": torch.ones(self.num_lanes, 1), "terminated": fallen.unsqueeze(-1)}
            return TensorDict(answer | {"truncated": (self._age >= LONGEST).unsqueeze(-1)}, batch_size=self.batch_size)

    return TensorCartPole()


def by_hand(cliff: Cliff, sample: Sample) -> Run:
    """The same in a loop of its own, with tensors all the way."""
    return _loop(cliff, sample, *_tensors(cliff.envs))


def _tensors(lanes: int) -> tuple[Tensor, Callable[[Tensor, Tensor], tuple[Any, ...]]]:
    ages = [torch.zeros(lanes, dtype=torch.int64)]
    ones = torch.ones(lanes)

    def step(state: Tensor, action: Tensor) -> tuple[Any, ...]:
        after, fallen = advance(state, action)
        late = (ages[0] + 1) >= LONGEST
        ended = fallen | late
        ages[0] = (ages[0] + 1).masked_fill(ended, 0)
        return after, ones, fallen, late, torch.where(ended.unsqueeze(-1), begin(lanes), after)

    return begin(lanes), step


def vector_by_hand(cliff: Cliff, sample: Sample) -> Run:
    """A loop over gymnasium's own vectorised CartPole, which begins anew in the step after the last."""
    envs = make_vector(cliff.envs)

    def step(state: Tensor, action: Tensor) -> tuple[Any, ...]:
        after, reward, terminated, truncated, _ = envs.step(action.numpy())
        return after, reward, terminated, truncated, after

    return _loop(cliff, sample, torch.from_numpy(envs.reset(seed=0)[0]), step)


def make_vector(lanes: int) -> Any:
    return gym.make_vec("CartPole-v1", num_envs=lanes, vectorization_mode="vector_entry_point")


def _loop(cliff: Cliff, sample: Sample, start: Tensor, step: Callable[..., tuple[Any, ...]]) -> Run:
    storage = Storage(cliff.collected, start.numpy())
    observations, actions, log_probs, following, rewards, terminateds, truncateds = storage.tensors.values()
    observations[-1] = start

    @torch.inference_mode()
    def collect() -> int:
        observations[0] = observations[-1]
        for t in range(cliff.collected.steps):
            action, log_prob = sample(observations[t])
            actions[t], log_probs[t] = action, log_prob
            results = step(observations[t], action)
            after, reward, terminated, truncated, coming = map(torch.as_tensor, results)
            following[t], rewards[t], terminateds[t], truncateds[t] = after, reward, terminated, truncated
            observations[t + 1] = coming
        return cliff.frames

    return Run(collect, storage.batch)
