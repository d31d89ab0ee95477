"""Rollouts leave the threads of numpy and torch alone: on a busy machine, the smallest of work would wait for them."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policy_zoo import CHOICES, DOUBLE, VECTOR, WaveEnv, assert_agrees, discrete, mlp, module, stages_after, stages_of
from torch import nn

from swath.collectors import Collector


def wide(hidden: int) -> nn.Module:
    return nn.Sequential(mlp(hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, CHOICES))


def run_times() -> dict[str, int]:
    """How long each thread of this process has run, in nanoseconds, as the system knows it."""
    return {task.name: int((task / "schedstat").read_text().split()[0]) for task in Path("/proc/self/task").iterdir()}


def ran_since(before: dict[str, int]) -> set[str]:
    return {name for name, time in run_times().items() if time != before.get(name)}


@pytest.mark.parametrize(
    ("lanes", "hidden", "kind"), [(16, 256, "f4"), (12, 300, "f8"), (301, 60, "f4"), (1, 800, "f4")]
)
def test_a_rollout_stays_in_its_thread(lanes: int, hidden: int, kind: str) -> None:
    torch.set_num_threads(2)
    net = wide(hidden).double() if kind == "f8" else wide(hidden)
    policy = module(net) if kind == "f8" else discrete(net=net)
    env = WaveEnv(observation_space=DOUBLE if kind == "f8" else VECTOR, lengths=[50] * lanes)
    collector = Collector(env, policy, frames_per_batch=100 * lanes)
    collector.next()
    assert stages_of(collector)[0] == "MLPStage"
    in_all = set(run_times())
    for _ in range(5):  # the threads of an earlier product look for more work for a while before they sleep
        before = run_times()
        for _ in range(10):  # long enough for the system to count: it does so every few milliseconds
            collector.next()
        in_all &= ran_since(before)
    before, large = run_times(), torch.ones(1500, 1500)
    large.numpy().dot(large.numpy())
    large.mm(large).log_softmax(-1)
    of_others = ran_since(before) - {str(threading.get_native_id())}
    torch.set_num_threads(1)
    before = run_times()
    time.sleep(0.5)
    assert not in_all & of_others - ran_since(before)  # without those that run by themselves, as other libraries have


@pytest.mark.parametrize("kind", ["f4", "f8"])
@pytest.mark.parametrize(("lanes", "hidden"), [(16, 256), (6, 300), (3, 500), (40, 130), (301, 60), (1, 700)])
def test_products_that_are_done_in_blocks_are_right(lanes: int, hidden: int, kind: str) -> None:
    net = wide(hidden).double() if kind == "f8" else wide(hidden)
    env = WaveEnv(observation_space=DOUBLE if kind == "f8" else VECTOR, lengths=[50] * lanes)
    collector = Collector(env, module(net), frames_per_batch=3 * lanes)
    batch: Any = collector.next()
    assert stages_of(collector) == ("MLPStage",)
    assert_agrees(collector.policy, batch)


def test_a_product_that_cannot_be_done_in_blocks_is_left_to_torch() -> None:
    lanes, inputs = 300, 1000
    space = type(VECTOR)(-1.0, 1.0, (inputs,), np.float32)
    env = WaveEnv(observation_space=space, lengths=[5] * lanes)
    assert stages_after(module(nn.Linear(inputs, CHOICES)), env) == ("TorchStage",)
