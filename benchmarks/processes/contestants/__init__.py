"""Who takes part with several processes: one module each.

A module has those of `collect(workload)`, `stepper(workload)`, `background(capacity)` and `weights(workload)` that its
workloads ask for; see `parts.py` for what they return. What a worker needs is made by functions of a module, by name,
so that it can be sent to a process that begins with nothing.
"""

from __future__ import annotations

CONTESTANTS: dict[str, str] = {
    "swath": "swath's MultiSyncCollector and MultiAsyncCollector, each worker a SerialEnv; stepping: ParallelEnv, one "
    "process per env, by the rows that a collector steps it by",
    "swath_single": "swath's Collector in one process with the envs of one worker; in the background, its thread",
    "swath_packed": "the same ParallelEnv with two processes that share the envs",
    "swath_tensordict": "the same ParallelEnv, one process per env, by `step_and_maybe_reset` on TensorDicts",
    "swath_collector": "swath's Collector over the same ParallelEnv, random actions drawn and all frames stored",
    "peer_default": "TorchRL as its documentation shows it: SerialEnv in each worker; stepping: ParallelEnv of GymEnv",
    "peer_fastest": "TorchRL with the fastest settings found: a wrapped vector env in each worker; stepping: two "
    "processes that share the envs in such vector envs",
    "peer_fork": "TorchRL's default with the start method 'fork', which is the fastest that it has",
    "handwritten": "the hand-written loop in two processes, batches in shared memory, a pipe to say go",
    "gym_async": "gymnasium's AsyncVectorEnv, finished envs reset in the same step, nothing copied",
    "sb3": "Stable-Baselines3's SubprocVecEnv",
    "puffer": "PufferLib's Multiprocessing backend, the envs in as many processes as there are cores beside the "
    "trainer's; a step that only resets is not counted as a frame",
    "memcpy": "one copy of the parameters' bytes from one tensor to another, between the batches of swath's workers",
}
