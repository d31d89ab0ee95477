"""An env with images and numbers, and the loop by hand over several of it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from benchmarks import pixels
from benchmarks.batch import Run
from benchmarks.cliffs.actors import PixelsAndState, chosen_from
from benchmarks.workloads import Workload

ENV_ID = "SwathBenchDict-v0"
SPACE = gym.spaces.Dict(
    {"pixels": pixels.PixelEnv.observation_space, "state": gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)}
)


class DictEnv(gym.ObservationWrapper[Any, Any, Any]):
    """The images of `PixelEnv`, and four numbers."""

    def __init__(self) -> None:
        super().__init__(pixels.PixelEnv())
        self.observation_space, self._state = SPACE, np.zeros(4, np.float32)

    def observation(self, observation: Any) -> Any:
        self._state = self._state + 1.0
        return {"pixels": observation, "state": self._state}


def workload(name: str, title: str, envs: int, frames: int) -> Workload:
    """So many of them, with a network for both."""
    if ENV_ID not in gym.registry:
        gym.register(ENV_ID, entry_point=f"{__name__}:{DictEnv.__name__}")
    return Workload(name, title, ENV_ID, envs, frames, PixelsAndState)


def by_hand(workload: Workload, net: nn.Module) -> Run:
    """Tensors `[time, envs, ...]` for each entry, and one row more of what is seen."""
    steps, lanes = workload.steps, workload.num_envs
    envs = [workload.make_env() for _ in range(lanes)]
    leaves = {key: torch.as_tensor(space.sample()) for key, space in SPACE.items()}
    seen = {key: torch.zeros(steps + 1, lanes, *one.shape, dtype=one.dtype) for key, one in leaves.items()}
    after = {key: torch.zeros(steps, lanes, *one.shape, dtype=one.dtype) for key, one in leaves.items()}
    actions, log_probs = torch.zeros(steps, lanes, dtype=torch.int64), torch.zeros(steps, lanes)
    rewards, flags = torch.zeros(steps, lanes).numpy(), torch.zeros(2, steps, lanes, dtype=torch.bool).numpy()
    views = [(key, seen[key].numpy(), after[key].numpy()) for key in leaves]
    for lane, env in enumerate(envs):
        first, _ = env.reset(seed=lane)
        for key, coming, _ in views:
            coming[-1, lane] = first[key]
    acted, scored = actions.numpy(), log_probs.numpy()

    @torch.inference_mode()
    def collect() -> int:
        for _, coming, _ in views:
            coming[0] = coming[-1]
        for t in range(steps):
            action, log_prob = chosen_from(net(seen["pixels"][t], seen["state"][t]))
            acted[t] = chosen = action.numpy()
            scored[t] = log_prob.numpy()
            for lane, env in enumerate(envs):
                answer, rewards[t, lane], ended, cut, _ = env.step(chosen[lane])
                flags[0, t, lane], flags[1, t, lane] = ended, cut
                begun = env.reset()[0] if ended or cut else answer
                for key, coming, following in views:
                    following[t, lane] = answer[key]
                    coming[t + 1, lane] = begun[key]
        return workload.frames_per_batch

    return Run(collect)
