"""Who takes part: swath's Collector as the setting asks for it, and what it is held against."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict.nn import InteractionType, set_interaction_type

from benchmarks.batch import Run
from benchmarks.cliffs import dict_env, episodes_by_hand, tensor_env
from benchmarks.cliffs.actors import POLICIES
from benchmarks.cliffs.actors_by_hand import Remembering, is_called, sampler
from benchmarks.cliffs.workloads import Cliff
from benchmarks.contestants import handwritten as by_hand

CONTESTANTS: dict[str, str] = {
    "swath": "swath's Collector over GymEnv",
    "handwritten": "a careful loop over gymnasium envs for exactly this setting; into a ring of arrays for a buffer",
    "swath_plain": "swath's Collector without what the setting adds",
    "peer": "TorchRL's Collector over its SerialEnv, or one env",
}
CAPACITY = 100_000


# -- swath -----------------------------------------------------------------------------------------------------------


def swath(cliff: Cliff) -> Run:
    from swath.collectors import Collector
    from swath.data import LazyTensorStorage, ReplayBuffer
    from swath.envs import GymEnv, SerialEnv

    torch.manual_seed(0)
    workload, options = cliff.collected, dict(cliff.options)
    make = partial(GymEnv, workload.env_id, categorical_action_encoding=True)
    env: Any
    if cliff.env == "tensor":
        env = tensor_env.own_env(cliff.envs)
    elif cliff.env == "vector":
        env = GymEnv(tensor_env.make_vector(cliff.envs), categorical_action_encoding=True)
    else:
        env = make() if cliff.envs == 1 else SerialEnv(cliff.envs, make)
    if cliff.into == "buffer":
        options["replay_buffer"] = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=32)
    policy = POLICIES[cliff.policy](workload.make_net())
    collector = Collector(env, policy, frames_per_batch=cliff.frames, total_frames=-1, **options)
    return _over(iter(collector), cliff, collector.shutdown)


def swath_plain(cliff: Cliff) -> Run:
    policy = "plain_value" if cliff.policy == "foreign_value" else cliff.policy
    return swath(replace(cliff, options={}, policy=policy))


def _over(batches: Iterator[Any], cliff: Cliff, close: Callable[[], None]) -> Run:
    last: list[Any] = []
    frames, has_all_frames = cliff.frames, cliff.has_all_frames

    def collect() -> int:
        last.clear()
        last.append(next(batches))
        if last[0] is None or has_all_frames:
            return frames
        mask = last[0].get(("collector", "mask"), None)
        return int(last[0].numel()) if mask is None else int(np.count_nonzero(mask.numpy()))

    return Run(collect, close=close)


# -- by hand ---------------------------------------------------------------------------------------------------------


def handwritten(cliff: Cliff) -> Run:
    torch.manual_seed(0)
    workload = cliff.collected
    net = workload.make_net()
    if cliff.options.get("compile_policy"):
        net = torch.compile(net)  # in the first call, before the clock starts
    if cliff.env == "dict":
        return dict_env.by_hand(workload, net)
    sample = sampler(cliff, net)
    if cliff.env != "gym":
        build = tensor_env.by_hand if cliff.env == "tensor" else tensor_env.vector_by_hand
        return build(cliff, sample)
    begun = sample.forget if isinstance(sample, Remembering) else lambda lane: None
    run = by_hand.build(workload, net, sample=sample, begun=begun)
    if is_called(cliff):  # tensordict's actors take the most likely action if they are not told to draw one
        run = replace(run, collect=set_interaction_type(InteractionType.RANDOM)(run.collect))
    if (count := cliff.options.get("trajs_per_batch")) is not None:
        return episodes_by_hand.whole_episodes(run, count)
    if cliff.options.get("split_trajs"):
        return episodes_by_hand.split_batches(run)
    return run if cliff.into == "batch" else _into_ring(run, cliff)


def _into_ring(run: Run, cliff: Cliff) -> Run:
    """Each batch is copied into a ring of arrays, env by env, with the version of each frame's trajectory left out."""
    assert run.last_batch is not None
    run()
    rows = cliff.frames if cliff.options.get("extend_buffer", True) else cliff.envs
    ring = {
        key: np.zeros((CAPACITY, *tensor.shape[2:]), tensor.numpy().dtype) for key, tensor in run.last_batch().items()
    }
    places = itertools.cycle(range(0, CAPACITY - rows, rows))

    def collect() -> int:
        frames = run()
        batch = {key: tensor.numpy() for key, tensor in run.last_batch().items()}  # type: ignore[misc]
        for first in range(0, frames, rows):
            at = next(places)
            steps = slice(first // cliff.envs, (first + rows) // cliff.envs)
            for key, values in batch.items():
                ring[key][at : at + rows] = values[:, steps].reshape(rows, *values.shape[2:])
        return frames

    return Run(collect)


# -- the peer --------------------------------------------------------------------------------------------------------


def peer(cliff: Cliff) -> Run:
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv, SerialEnv

    torch.manual_seed(0)
    workload = cliff.collected
    make = partial(GymEnv, workload.env_id, categorical_action_encoding=True)
    env = make() if cliff.envs == 1 else SerialEnv(cliff.envs, make)
    policy = POLICIES[cliff.policy](workload.make_net())
    collector = Collector(env, policy, frames_per_batch=cliff.frames, total_frames=10**12, use_buffers=False)
    return _over(iter(collector), cliff, collector.shutdown)
