"""What the stress draws for a round: a collector, and what is done to it."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from swath import collectors
from swath.collectors import BaseCollector, PolicyVersion, distributed
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.keys import ACTION, OBSERVATION
from swath.testing.counting import CountingEnv
from swath.testing.stress import ACTS, NODES
from swath.testing.stress_checks import ACTED


class StressEnv(CountingEnv):
    """A counting env whose steps take some time, and which can be asked something."""

    def __init__(self, batch_size: tuple[int, ...], lengths: tuple[int, ...], pace_s: float) -> None:
        super().__init__(batch_size, lengths)
        self.pace_s = pace_s

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.pace_s:
            time.sleep(random.uniform(0.0, self.pace_s))
        return super()._step(tensordict)

    def size_of(self, data: bytes) -> int:
        """How much it was given."""
        return len(data)


class Witness(nn.Module):
    """Tells the least and the greatest of its weights, which should all be the same."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(size, device="cpu"))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """An action, and the weights."""
        shape, acted = (*observation.shape[:-1], 2), torch.stack([self.value.min(), self.value.max()])
        return torch.tensor([1.0, 0.0], device="cpu").expand(shape).clone(), acted.expand(shape).clone()


@dataclass(frozen=True)
class Plan:
    """What is drawn for a round."""

    kind: str
    mode: str
    ending: str
    seconds: float
    workers: int
    lanes: int
    lengths: tuple[int, ...]
    pace_s: float
    size: int
    """Of the weights."""
    threads: int
    acts: tuple[str, ...]
    options: dict[str, Any]

    @staticmethod
    def draw(kind: str, own: random.Random, acts: Sequence[str]) -> Plan:
        """A plan for that kind of collector."""
        draw, options = own.choice, dict[str, Any]()
        mode = draw(("iterate", "iterate", "buffer", "start"))
        ending = draw(("spent", "spent", "shutdown", "thread", "interrupt", "forget", "checkpoint", "checkpoint"))
        workers = 1 if kind in ("Collector", "AsyncCollector") else draw((1, 2, 2, 2, 3))
        lanes, steps = 0 if kind == "AsyncBatchedCollector" else draw((0, 1, 3)), draw((1, 5, 20, 50))
        options["max_frames_per_traj"] = draw((None, None, None, 4, 11))
        options["trajs_per_batch"] = draw((None, None, None, 1, 3))
        options["track_policy_version"] = PolicyVersion() if kind == "Collector" else True
        if mode == "iterate" and options["trajs_per_batch"]:
            options["traj_format"] = draw(("padded", "cat"))
        if kind != "Collector":
            failure = draw(("raise", "restart", "restart", "drop" if workers > 1 else "restart"))
            options.update(on_worker_failure=failure, max_restarts=1000)
        is_sync = draw((True, False)) if kind in NODES else kind in ("MultiSyncCollector", "AsyncBatchedCollector")
        if kind == "AsyncBatchedCollector":
            options["env_backend"] = draw(("threading", "multiprocessing", "multiprocessing"))
            options["stack_envs"] = draw((True, False, False)) and failure != "drop"
        elif kind != "Collector":
            options["debug"] = mode == "iterate" and not own.randrange(8)
            if not is_sync:
                options.update(slots_per_worker=draw((1, 2, 4)), max_staleness=draw((None, None, 1)))
        if kind in NODES:
            options["sync"] = is_sync
            if not own.randrange(5) and not options["debug"]:
                options.update(collector_class=draw(("sync", "async")), num_workers_per_collector=2)
        part = max(1, lanes) * workers
        options["frames_per_batch"] = steps * (part if is_sync else max(1, lanes))
        is_endless = mode == "iterate" and ending not in ("spent", "checkpoint")
        seconds, pace_s = own.uniform(2.0, 6.0), draw((0.0, 0.0, 0.0005, 0.003))
        most = int(seconds * draw((0.2, 0.5, 1.0)) / (0.0003 + pace_s))  # steps that it can make in that time
        most = max(1, min(most, 500 * steps))
        options["total_frames"] = -1 if is_endless else part * most
        return Plan(
            kind=kind,
            mode=mode,
            ending=ending,
            seconds=seconds,
            workers=workers,
            lanes=lanes,
            lengths=tuple(draw((1, 2, 5, 9, 30, 100)) for _ in range(4)),
            pace_s=pace_s,
            size=draw((10, 30_000)),
            threads=draw((1, 2, 3)),
            acts=tuple(act for act in ACTS if draw((True, True, False)) and act in acts),
            options=options,
        )

    def __str__(self) -> str:
        given = {**asdict(self), **self.options}
        return " ".join(f"{name}={value}" for name, value in given.items() if name not in ("kind", "options"))

    def buffer(self) -> ReplayBuffer | None:
        """A replay buffer, if there is one, that has room for all."""
        storage = LazyTensorStorage(3 * abs(self.options["total_frames"]))
        return None if self.mode == "iterate" else ReplayBuffer(storage=storage, batch_size=16)

    def collector(self, buffer: ReplayBuffer | None) -> BaseCollector:
        """The collector."""
        options = {**self.options, "replay_buffer": buffer}
        env: Any = functools.partial(StressEnv, (self.lanes,) if self.lanes else (), self.lengths, self.pace_s)
        if self.kind in ("DistributedCollector", "RPCCollector"):
            options["launcher"] = "mp"
        elif self.kind == "RayCollector":
            options["ray_init_config"] = {"num_cpus": 8, "object_store_memory": 200 * 2**20, "log_to_driver": False}
        of = getattr(distributed if self.kind in NODES else collectors, self.kind)
        policy = TensorDictModule(Witness(self.size), in_keys=[OBSERVATION], out_keys=[ACTION, ACTED])
        made: BaseCollector = of([env] * self.workers, policy, **options)
        return made
