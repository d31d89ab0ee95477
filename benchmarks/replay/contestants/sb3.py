"""Stable-Baselines3's ReplayBuffer.

It is written one step of all envs at a time, so 200 frames are 25 calls for 8 envs, and it keeps less
than the others: no ids and no flags beside one `done`. It has no background collection, and no
priorities. In W9a and W9b one thread does both: it steps the envs until a batch is due, and at least
once between two batches. Its own rollout loop does the same with callbacks and loggers in it; here the
loop is written out, with the network and the sampling of the hand-written loop.
"""

from __future__ import annotations

import time
from itertools import cycle
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.figures import NotAvailableError
from benchmarks.replay import frames
from benchmarks.replay.parts import Background, Buffer, Content
from benchmarks.replay.workloads import BATCH, COLLECT, ENVS, ROWS
from benchmarks.sampling import Sampler

try:
    from stable_baselines3.common.buffers import ReplayBuffer
    from stable_baselines3.common.vec_env import DummyVecEnv
except ImportError:
    raise NotAvailableError("not installed") from None

_NO_INFOS: list[dict[str, Any]] = [{} for _ in range(ENVS)]


def background(capacity: int) -> Background:
    torch.manual_seed(0)
    envs = DummyVecEnv([COLLECT.make_env] * ENVS)
    buffer = ReplayBuffer(capacity, envs.observation_space, envs.action_space, device="cpu", n_envs=ENVS)
    stepper = _Stepper(envs, buffer)
    return Background(
        start=stepper.step,
        frames=lambda: stepper.frames,
        held=lambda: int(buffer.size()) * ENVS,
        sample=lambda: buffer.sample(BATCH),
        content=_content,
        stop=envs.close,
        between=stepper.step_until,
    )


class _Stepper:
    """The rollout loop, one step of all envs at a time."""

    def __init__(self, envs: DummyVecEnv, buffer: ReplayBuffer) -> None:
        self.envs = envs
        self.buffer = buffer
        self.frames = 0
        self._choose = Sampler(COLLECT, COLLECT.make_net()).sample
        self._observation: Any = envs.reset()

    @torch.inference_mode()
    def step(self) -> None:
        action = self._choose(torch.from_numpy(self._observation))[0].numpy()
        coming, reward, done, infos = self.envs.step(action)
        following = coming
        if done.any():
            following = coming.copy()  # at the end of an episode `coming` is the next one's first
            for lane in done.nonzero()[0]:
                following[lane] = infos[lane]["terminal_observation"]
        self.buffer.add(self._observation, following, action, reward, done, infos)
        self._observation = coming
        self.frames += ENVS

    def step_until(self, seconds: float) -> None:
        deadline = time.perf_counter() + seconds
        self.step()
        while time.perf_counter() < deadline:
            self.step()


def buffer(capacity: int, pixels: bool) -> Buffer:
    made = _make(capacity, pixels)
    batches = cycle([_steps(ROWS, pixels, ROWS * n) for n in range(8)])
    for first in range(0, capacity, ROWS):
        _extend(made, _steps(ROWS, pixels, first))
    return Buffer(lambda: _extend(made, next(batches)), lambda: made.sample(BATCH), _content)


def _make(capacity: int, pixels: bool) -> ReplayBuffer:
    example = frames.make(1, pixels)[("observation",)]
    space = gym.spaces.Box(0, 255, example.shape[1:], example.dtype.type)
    return ReplayBuffer(capacity, space, gym.spaces.Discrete(frames.ACTIONS), device="cpu", n_envs=ENVS)


def _steps(count: int, pixels: bool, first: int) -> list[tuple[NDArray[Any], ...]]:
    """The frames as one step of all envs after another."""
    made = frames.make(count, pixels, first)
    wanted = (("observation",), ("next", "observation"), ("action",), ("next", "reward"), ("next", "done"))
    columns = [made[key] for key in wanted]
    columns[-2:] = [column.squeeze(-1) for column in columns[-2:]]
    return [tuple(column[at : at + ENVS] for column in columns) for at in range(0, count, ENVS)]


def _extend(made: ReplayBuffer, steps: list[tuple[NDArray[Any], ...]]) -> None:
    for step in steps:
        made.add(*step, _NO_INFOS)


def _content(batch: Any) -> Content:
    action = np.asarray(batch.actions)
    return {"observation": batch.observations, "next_observation": batch.next_observations, "action": action}
