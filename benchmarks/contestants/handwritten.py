"""The loop a careful author writes by hand for one project, and the measure of what a library adds.

Storage is allocated once as torch tensors and written through numpy views of them, which costs a
tenth of torch indexing; the rows of each step are cut out once, not per step. The network is called
directly, sampling is written out (`sampling.py`). It takes liberties that a library cannot: batches
share one storage, so each is overwritten by the next, and nothing is counted, named or checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.batch import Batch, Run
from benchmarks.sampling import Sampler
from benchmarks.workloads import Workload


class Storage:
    """Tensors `[time, envs, ...]` and the views to write them by, one batch large."""

    def __init__(self, workload: Workload, observation: NDArray[Any], shared: bool = False) -> None:
        steps, lanes = workload.steps, workload.num_envs
        shape, dtype = observation.shape[1:], torch.from_numpy(observation).dtype
        action_shape: tuple[int, ...] = () if workload.discrete else (1,)
        action_dtype = torch.int64 if workload.discrete else torch.float32
        self.tensors = {
            # one row more: what a step leads to is written straight into the next step's place
            "observation": torch.empty(steps + 1, lanes, *shape, dtype=dtype),
            "action": torch.empty(steps, lanes, *action_shape, dtype=action_dtype),
            "log_prob": torch.empty(steps, lanes),
            "next_observation": torch.empty(steps, lanes, *shape, dtype=dtype),
            "reward": torch.empty(steps, lanes),
            "terminated": torch.empty(steps, lanes, dtype=torch.bool),
            "truncated": torch.empty(steps, lanes, dtype=torch.bool),
        }
        if shared:  # before any view is cut: sharing moves the memory
            for tensor in self.tensors.values():
                tensor.share_memory_()
        self.arrays = {key: tensor.numpy() for key, tensor in self.tensors.items()}
        # the observation of step t as the network wants it: cut once, used in every batch
        self.observation_rows = list(self.tensors["observation"])

    def batch(self) -> Batch:
        """The content as `[envs, time, ...]`, without copying."""
        steps = self.tensors["reward"].shape[0]
        return {key: tensor[:steps].transpose(0, 1) for key, tensor in self.tensors.items()}


def build(
    workload: Workload,
    net: nn.Module | None = None,
    seed: int = 0,
    shared: bool = False,
    sample: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
    begun: Callable[[int], None] = lambda lane: None,
) -> Run:
    """The loop; in a worker, with the network that all share and batches in shared memory.

    `begun` is called with the lane of each episode that begins.
    """
    torch.manual_seed(seed)
    net = workload.make_net() if net is None else net
    sample = sample or Sampler(workload, net).sample
    envs = [workload.make_env() for _ in range(workload.num_envs)]
    start = np.stack([env.reset(seed=seed + lane)[0] for lane, env in enumerate(envs)])
    lanes = list(enumerate(envs))
    storage = Storage(workload, start, shared)
    observation_rows = storage.observation_rows
    observations, actions, log_probs, next_observations, rewards, terminateds, truncateds = storage.arrays.values()
    observations[-1] = start

    @torch.inference_mode()
    def collect() -> int:
        observations[0] = observations[-1]
        for t in range(workload.steps):
            action, log_prob = sample(observation_rows[t])
            actions[t] = chosen = action.numpy()
            log_probs[t] = log_prob.numpy()
            coming, following, reward = observations[t + 1], next_observations[t], rewards[t]
            terminated, truncated = terminateds[t], truncateds[t]
            for lane, env in lanes:
                seen, reward[lane], ended, cut, _ = env.step(chosen[lane])
                following[lane] = seen  # the true final observation, before any reset
                terminated[lane], truncated[lane] = ended, cut
                if ended or cut:
                    coming[lane] = env.reset()[0]
                    begun(lane)
                else:
                    coming[lane] = seen
        return workload.frames_per_batch

    return Run(collect, storage.batch, net)
