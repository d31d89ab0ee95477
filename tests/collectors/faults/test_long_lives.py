"""What only shows when collectors live long, or are used in odd ways: each was a defect once."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from fault_tools import buffer_of, counting, net, until
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn

from swath.collectors import (
    Collector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
    WorkerRestartedWarning,
)
from swath.errors import EndlessError
from swath.runtime import WorkerDiedError

BOTH = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])


def kill(collector: MultiCollector, worker: int) -> None:
    os.kill(collector.worker_pids[worker], signal.SIGKILL)


def test_many_threads_may_make_the_first_collector_of_a_program() -> None:
    program = """
import threading
from swath.collectors import MultiSyncCollector
from swath.testing import CountingEnv
def collect():
    for _ in MultiSyncCollector([CountingEnv], frames_per_batch=8, total_frames=16):
        pass
threads = [threading.Thread(target=collect) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("done")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.stdout == "done\n", ended.stderr


def explode() -> None:
    if os.environ.get("SWATH_TEST_PARENT"):
        raise ModuleNotFoundError("No module named 'simulator'")


class Unreadable:
    """Can be pickled by a worker, and not be read by the parent."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return explode, ()


class Odd(gym.Env[Any, Any]):
    """An env with an attribute that only its own process can have."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)
    unreadable = Unreadable()
    step_s = 0.0

    def draw(self) -> np.ndarray:
        return np.array([np.random.rand(), random.random(), float(torch.rand(()))], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self.draw(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(self.step_s)
        return self.draw(), 0.0, False, False, {}


class Slow(Odd):
    step_s = 0.05


def test_an_answer_that_cannot_be_read_concerns_only_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with MultiAsyncCollector([Odd] * 2, frames_per_batch=8) as collector:
        collector.next()
        monkeypatch.setenv("SWATH_TEST_PARENT", "1")
        for _ in range(5):
            with pytest.raises(ModuleNotFoundError, match="simulator"):
                collector.getattr_env("gym_envs[0].unreadable")
            for _ in range(4):
                collector.next()


def test_a_large_message_need_not_wait_for_the_end_of_a_batch() -> None:
    policy = TensorDictModule(nn.Sequential(nn.Linear(3, 1200), nn.Linear(1200, 1200), nn.Linear(1200, 2)),
                              in_keys=["observation"], out_keys=["action"])  # fmt: skip
    with MultiAsyncCollector([Slow], policy, frames_per_batch=60) as collector:
        state = collector.state_dict()
        batches = iter(collector)
        waiting = threading.Thread(target=lambda: next(batches))
        waiting.start()
        until(lambda: collector.stats("per_worker")["worker_0/steps"] > 2)
        begun = time.monotonic()
        channel = collector._workers._crew.processes[0].channel
        channel.send(("a large message that is not understood", bytes(20_000_000)), timeout_s=20)
        assert time.monotonic() - begun < 2.5  # a batch takes at least 3 s
        waiting.join()
        assert state["frames"] == 0
        os.kill(collector.worker_pids[0], signal.SIGKILL)


class Scaled(nn.Module):
    """Acts by a buffer that it does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("scale", torch.zeros(()), persistent=False)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.linear(observation) * 0 + self.scale


def test_buffers_that_are_not_saved_are_published() -> None:
    policy = TensorDictModule(Scaled(), in_keys=["observation"], out_keys=["action"])
    with MultiSyncCollector([Odd] * 2, policy, frames_per_batch=8) as collector:
        for value in (0.0, 1.0, 2.0):
            policy.module.scale.fill_(value)
            collector.update_policy_weights_()
            batch = collector.next()
            assert batch is not None
            assert bool((batch["action"] == value).all())


@pytest.mark.filterwarnings("ignore::swath.collectors.WorkerRestartedWarning")
@pytest.mark.parametrize("on_failure", ["restart", "drop"])
def test_what_a_dead_worker_had_claimed_is_collected_by_others(on_failure: str) -> None:
    buffer = buffer_of()
    with MultiAsyncCollector(
        [Odd, Slow], frames_per_batch=100, total_frames=200, replay_buffer=buffer, on_worker_failure=on_failure
    ) as collector:
        collector.start()
        until(lambda: collector.stats("per_worker")["worker_0/reported"] >= 100)  # the quick one has its share
        kill(collector, 1)
        until(lambda: not collector.is_running())
        assert buffer.write_count == 200
        assert collector.stats()["frames"] == 200


def test_a_seed_decides_all_that_workers_draw() -> None:
    drawn = []
    for _ in range(2):
        with MultiSyncCollector([Odd] * 2, frames_per_batch=8) as collector:
            collector.set_seed(3)
            batch = collector.next()
            assert batch is not None
            drawn.append(batch["observation"].clone())
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0][0], drawn[0][1])


@pytest.mark.filterwarnings("ignore::swath.collectors.WorkerRestartedWarning")
def test_a_hook_that_was_set_later_is_called_by_new_workers_too(tmp_path: Path) -> None:
    def hook(batch: Any) -> None:
        (tmp_path / f"{os.getpid()}").touch()

    with MultiSyncCollector(counting(), net(), frames_per_batch=8, on_worker_failure="restart") as collector:
        collector.set_post_collect_hook(hook)
        assert collector.post_collect_hook is hook
        collector.next()
        kill(collector, 1)
        collector.next()
        assert {path.name for path in tmp_path.iterdir()} >= {str(pid) for pid in collector.worker_pids}


def test_an_unanswerable_question_is_not_asked_again_of_a_new_worker() -> None:
    lock = threading.Lock()
    with MultiSyncCollector(counting(), net(), frames_per_batch=8, on_worker_failure="restart") as collector:
        with pytest.raises(RuntimeError, match="lock"):
            collector.set_post_collect_hook(lambda batch: lock.acquire())
        kill(collector, 1)
        with pytest.warns(WorkerRestartedWarning):
            collector.next()
        assert not collector._workers._asked
        assert not collector._workers._answers


def test_a_buffer_takes_frames_of_all_collectors() -> None:
    buffer = buffer_of()
    make = counting(1)[0]
    for _ in Collector(make, net(), frames_per_batch=10, total_frames=20, replay_buffer=buffer):
        pass
    for _ in MultiAsyncCollector([make], net(), frames_per_batch=10, total_frames=20, replay_buffer=buffer):
        pass
    assert buffer.write_count == 40


@BOTH
def test_thousands_of_batches_may_be_kept(kind: type[MultiCollector]) -> None:
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 120, most))
    try:
        with kind(counting(), net(), frames_per_batch=2, total_frames=1200) as collector:
            kept = list(collector)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
    assert len(kept) == 600
    assert len({batch["observation"].data_ptr() for batch in kept}) == 600


@BOTH
def test_the_state_can_be_had_when_all_is_collected(kind: type[MultiCollector]) -> None:
    with kind(counting(), net(), frames_per_batch=8, total_frames=32) as first:
        for _ in first:
            pass
        state = first.state_dict()
    assert state["frames"] == 32
    with kind(counting(), net(), frames_per_batch=8, total_frames=64) as second:
        second.load_state_dict(state)
        assert sum(batch.numel() for batch in second) == 32


@pytest.mark.filterwarnings("ignore::swath.collectors.WorkerRestartedWarning")
def test_a_collector_goes_on_without_a_worker_that_was_dropped() -> None:
    policy = net()
    with MultiSyncCollector(counting(3), policy, frames_per_batch=12, on_worker_failure="drop") as collector:
        collector.next()
        kill(collector, 1)
        batch = collector.next()
        assert batch is not None
        assert batch.shape == (2, 4)
        collector.update_policy_weights_(policy, worker_ids=[0, 1])
        assert collector.num_lanes == 2
        assert collector.requested_frames_per_batch == 8
        state = collector.state_dict()
    with MultiSyncCollector(counting(3), net(), frames_per_batch=12) as whole:
        whole.load_state_dict(state)
        batch = whole.next()
        assert batch is not None
        assert batch.shape == (3, 4)


def test_a_worker_that_makes_no_step_for_too_long_is_a_failure() -> None:
    class Stuck(Odd):
        step_s = 100.0

    with (
        MultiSyncCollector([Odd, Stuck], frames_per_batch=8, stall_timeout_s=1.0, stall_warning_s=50.0) as collector,
        pytest.raises(WorkerDiedError, match="no step for stall_timeout_s=1 s") as caught,
    ):
        collector.next()
    assert caught.value.index == 1
    assert "memory" not in repr(caught.value), "the usual cause of a SIGKILL is not this one's"


@pytest.mark.parametrize("dim", [-3, 2])
def test_a_dimension_that_batches_have_not_is_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=f"cat_results={dim}"):
        MultiSyncCollector(counting(), net(), frames_per_batch=8, cat_results=dim)


def test_how_many_batches_of_different_sizes_there_will_be_is_not_known() -> None:
    with (
        MultiAsyncCollector(counting(), net(), frames_per_batch=[6, 10], total_frames=64) as collector,
        pytest.raises(EndlessError),
    ):
        len(collector)


@pytest.mark.parametrize("name", ["collector_class", "weight_sync_schemes", "weight_updater"])
def test_arguments_without_effect_say_so(name: str) -> None:
    with pytest.warns(UserWarning, match=f"{name}=.*no effect"):
        MultiSyncCollector(counting(), net(), frames_per_batch=8, **{name: object}).shutdown()
