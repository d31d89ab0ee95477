"""Who takes part with envs at their own pace. Each is a function that gives a `PaceRun`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks.pace.workloads import PaceWorkload

CONTESTANTS: dict[str, str] = {
    "swath": "swath's AsyncBatchedCollector, each env in a thread; with 256 envs in processes of 64 threads each",
    "swath_processes": "swath's AsyncBatchedCollector, each env in a process of its own; with 256 envs 8 share one",
    "swath_lockstep": "swath's Collector over ParallelEnv, which steps all envs together",
    "peer_threads": "TorchRL's AsyncBatchedCollector, each env in a thread (its default)",
    "peer_processes": "TorchRL's AsyncBatchedCollector, each env in a process; with 256 envs 8 share one",
    "handwritten": "a thread for each env, queues between them and the loop that calls the network, frames in arrays",
}


@dataclass
class PaceRun:
    """Call it for one batch; it returns the observations `[frames, 4]` and which env each is of."""

    batch: Callable[[], tuple[Any, Any]]
    fill: Callable[[], float]
    """For how many envs the network was called at a time."""
    close: Callable[[], None]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


def policy() -> TensorDictModule:
    return TensorDictModule(network(), in_keys=["observation"], out_keys=["action"])


def _run(collector: Any, fill: Callable[[], float]) -> PaceRun:
    batches: Iterator[Any] = iter(collector)

    def batch() -> tuple[Any, Any]:
        td = next(batches)
        return td["observation"].reshape(-1, 4), td["observation"][..., 0].reshape(-1)

    return PaceRun(batch, fill, collector.shutdown)


def _swath(workload: PaceWorkload, **options: Any) -> PaceRun:
    from swath.collectors import AsyncBatchedCollector

    collector = AsyncBatchedCollector(
        [partial(workload.env, lane) for lane in range(workload.envs)],
        policy(),
        frames_per_batch=workload.frames_per_batch,
        total_frames=-1,
        **options,
    )
    return _run(collector, lambda: collector.server_stats()["avg_batch_size"])


def swath(workload: PaceWorkload) -> PaceRun:
    if workload.envs <= 64:
        return _swath(workload)
    return _swath(workload, env_backend="multiprocessing", envs_per_worker=64)


def swath_processes(workload: PaceWorkload) -> PaceRun:
    return _swath(workload, env_backend="multiprocessing", envs_per_worker=1 if workload.envs <= 64 else 8)


def swath_lockstep(workload: PaceWorkload) -> PaceRun:
    from swath.collectors import Collector
    from swath.envs import GymEnv, ParallelEnv

    env = ParallelEnv(workload.envs, [lambda lane=lane: GymEnv(workload.env(lane)) for lane in range(workload.envs)])
    collector = Collector(env, policy(), frames_per_batch=workload.frames_per_batch, total_frames=-1)
    return _run(collector, lambda: float(workload.envs))


def _wrapped(kind: Any, lane: int) -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(kind(lane))


def _peer(workload: PaceWorkload, **options: Any) -> PaceRun:
    from torchrl.collectors import AsyncBatchedCollector

    collector = AsyncBatchedCollector(
        create_env_fn=[partial(_wrapped, workload.env, lane) for lane in range(workload.envs)],
        policy=policy(),
        frames_per_batch=workload.frames_per_batch,
        total_frames=-1,
        max_batch_size=workload.envs,
        **options,
    )
    return _run(collector, lambda: float(collector.server_stats().get("avg_batch_size", float("nan"))))


def peer_threads(workload: PaceWorkload) -> PaceRun:
    return _peer(workload, env_backend="threading")


def peer_processes(workload: PaceWorkload) -> PaceRun:
    return _peer(workload, env_backend="multiprocessing", envs_per_worker=1 if workload.envs <= 64 else 8)


class _Handwritten:
    """What a careful user writes: threads, two kinds of queues, and arrays that are filled as results come."""

    def __init__(self, workload: PaceWorkload) -> None:
        self._net, self._frames = network(), workload.frames_per_batch
        self._ready: queue.SimpleQueue[tuple[int, Any, float, bool]] = queue.SimpleQueue()
        self._orders: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(workload.envs)]
        self._seen: list[Any] = [None] * workload.envs
        self.calls = self.acted = 0
        lanes = range(workload.envs)
        self._threads = [threading.Thread(target=self._step, args=(workload.env(lane), lane)) for lane in lanes]
        for thread in self._threads:
            thread.start()
        self._waiting = [self._ready.get() for _ in range(workload.envs)]

    def _step(self, env: Any, lane: int) -> None:
        observation, _ = env.reset()
        self._ready.put((lane, observation, 0.0, False))
        while (action := self._orders[lane].get()) is not None:
            observation, reward, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                observation, _ = env.reset()
            self._ready.put((lane, observation, reward, terminated or truncated))

    def batch(self) -> tuple[Any, Any]:
        observations, lanes = np.zeros((self._frames, 4), np.float32), np.zeros(self._frames)
        rewards, dones = np.zeros(self._frames, np.float32), np.zeros(self._frames, bool)
        filled = 0
        while filled < self._frames:
            ready = self._waiting or [self._ready.get()]
            self._waiting = []
            while not self._ready.empty():
                ready.append(self._ready.get())
            with torch.no_grad():
                actions = self._net(torch.from_numpy(np.stack([seen for _, seen, _, _ in ready]))).numpy()
            self.calls += 1
            self.acted += len(ready)
            for (lane, observation, reward, done), action in zip(ready, actions, strict=True):
                if self._seen[lane] is not None and filled < self._frames:
                    observations[filled], lanes[filled] = self._seen[lane], lane
                    rewards[filled], dones[filled] = reward, done
                    filled += 1
                self._seen[lane] = observation
                self._orders[lane].put(action)
        return torch.from_numpy(observations), torch.from_numpy(lanes)

    def close(self) -> None:
        for orders in self._orders:
            orders.put(None)
        for thread in self._threads:
            thread.join()


def handwritten(workload: PaceWorkload) -> PaceRun:
    made = _Handwritten(workload)
    return PaceRun(made.batch, lambda: made.acted / made.calls, made.close)
