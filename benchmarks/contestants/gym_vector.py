"""The hand-written loop over gymnasium's own vector env.

The vector env steps the same eight envs in a Python loop of its own and stacks what they return; in
"same step" mode a finished env is reset at once and its final observation comes in the info. (The
default mode spends a whole step on each reset, which would put frames into the batch that are
none.) CartPole's entry point written for numpy vectors is another environment and is not used.
"""

from __future__ import annotations

import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from benchmarks.batch import Run
from benchmarks.contestants.handwritten import Storage
from benchmarks.sampling import Sampler
from benchmarks.workloads import Workload


def build(workload: Workload) -> Run:
    torch.manual_seed(0)
    net = workload.make_net()
    sample = Sampler(workload, net).sample
    # copy=False: what the vector env returns is copied into the storage at once, so it may be its
    # buffer
    envs = SyncVectorEnv([workload.make_env] * workload.num_envs, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    start, _ = envs.reset(seed=0)
    storage = Storage(workload, start)
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
            coming, rewards[t], terminateds[t], truncateds[t], info = envs.step(chosen)
            observations[t + 1] = next_observations[t] = coming
            if "final_obs" in info:
                final = info["final_obs"]
                for lane in info["_final_obs"].nonzero()[0]:
                    next_observations[t, lane] = final[lane]
        return workload.frames_per_batch

    return Run(collect, storage.batch, net, envs.close)
