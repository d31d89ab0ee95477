"""What is measured of collectors over many machines, the same for every contestant; all nodes are on this one.

W15 is W4's work given to 1, 2 and 4 nodes, with the time until they deliver. W16 asks what carrying a batch costs: its
env does nearly nothing, so that a batch of 16 or 1 MB is mostly on its way. W17 gives new weights to two nodes. Each is
measured for process groups (g), RPC (p) and Ray (y).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import policies
from benchmarks.figures import FRAMES, Figure
from benchmarks.processes.workloads import ProcessWorkload
from benchmarks.workloads import WORKLOADS as COLLECTING
from benchmarks.workloads import Workload

BACKENDS = {"g": "process groups (gloo)", "p": "RPC", "y": "Ray"}
NODES = (1, 2, 4)
MEGABYTES = (1, 16)
STEPS = 64
"""Frames in a batch of W16."""

_START = Figure("start_seconds", "seconds to the first batch", 2, less_is_better=True)
TRAINER_MS = Figure("trainer_ms", "ms of the trainer's processor per node and batch", 2, less_is_better=True)
BATCH_MS = Figure("ms_per_batch", "ms per batch", 2, less_is_better=True)
MB = Figure("mb_per_second", "MB/s")
_BYTES = Figure("bytes_per_frame", "bytes per frame on the wire")
CALL_MS = Figure("call_ms", "ms per call", 2, less_is_better=True)
_ARRIVAL_MS = Figure("arrival_ms", "ms until a batch of all nodes is made with them", 2, less_is_better=True)


class FrameEnv(gym.Env[Any, Any]):
    """An env that hands out arrays that it has, each again after two batches; their first number counts the steps."""

    def __init__(self, floats: int) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (floats,), np.float32)
        self.action_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self._frames, self._steps = np.zeros((2 * STEPS, floats), np.float32), 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._steps = -1
        return self.step(0)[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        frame = self._frames[self._steps % len(self._frames)]
        frame[0] = self._steps
        return frame, 1.0, False, False, {}


class Still(nn.Module):
    """What acts in `FrameEnv`, and costs as little."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(1))

    def forward(self, observation: Tensor) -> Tensor:
        return observation[..., :1] * self.factor


class LargeNet(nn.Module):
    """10 MB of parameters, nearly all of which cost nothing to act with."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2_560_000))
        self.head = policies.mlp(4, 2)

    def forward(self, observation: Tensor) -> Tensor:
        logits: Tensor = self.head(observation)
        return logits


LARGE: Workload = replace(COLLECTING["W2"], name="W17", frames_per_batch=64, make_net=LargeNet)


@dataclass(frozen=True)
class NodeWorkload(ProcessWorkload):
    """One setting; `workers` are nodes."""

    backend: str = "g"
    megabytes: int = 0
    """In a batch of W16."""

    @property
    def floats(self) -> int:
        """In an observation, of which each frame has two."""
        return self.megabytes * 2**20 // STEPS // 8


def _workloads(backend: str, name: str) -> list[NodeWorkload]:
    collect = f"W15, {name}: nodes of 8 CartPole-v1 envs, sync"
    batches = f"W16, {name}: batches of so many MB, one node"
    return [
        *(
            NodeWorkload(
                f"W15{backend}x{nodes}", f"CartPole-v1, {nodes} nodes of 8 envs, sync, {name}", "collect",
                (FRAMES, _START, TRAINER_MS), ("swath", "peer"), workers=nodes, family=collect, backend=backend,
            )
            for nodes in NODES
        ),
        *(
            NodeWorkload(
                f"W16{backend}x{megabytes}", f"batches of {megabytes} MB, one node, {name}", "batches",
                (BATCH_MS, MB, TRAINER_MS, _BYTES), ("swath", "swath_here", "engine", "peer"), workers=1,
                family=batches, backend=backend, megabytes=megabytes,
            )
            for megabytes in MEGABYTES
        ),
        NodeWorkload(
            f"W17{backend}", f"update_policy_weights_(), 10 MB of parameters, 2 nodes, {name}", "weights",
            (CALL_MS, _ARRIVAL_MS), ("swath", "peer"), one=LARGE, workers=2, backend=backend,
        ),
    ]  # fmt: skip


WORKLOADS: dict[str, NodeWorkload] = {w.name: w for key, name in BACKENDS.items() for w in _workloads(key, name)}
