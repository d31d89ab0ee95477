"""What a collector was given is found on it by the same name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from common import buffer, net
from kinds import ALL, EVERY, SINGLE, SYNC_HERE, Kind, Make, over

from swath.modules import ExplorationType

GIVEN: dict[str, Any] = {
    "total_frames": 400,
    "max_frames_per_traj": 7,
    "init_random_frames": 20,
    "exploration_type": ExplorationType.MODE,
    "split_trajs": True,
    "reset_at_each_iter": True,
    "progress": False,
    "postproc": None,
}


@over(EVERY)
def test_arguments_are_attributes(make: Make, kind: Kind) -> None:
    policy = net()
    collector = make(None, policy, **GIVEN)
    for name, value in GIVEN.items():
        assert getattr(collector, name) == value, name
    for field in fields(collector.config):
        if field.name != "worker_idx":  # which raises if there is none
            assert hasattr(collector, field.name), field.name
            assert field.name in dir(collector)
    assert collector.policy is policy
    assert not hasattr(collector, "totl_frames")


@over(EVERY)
def test_an_argument_cannot_be_changed_afterwards(make: Make) -> None:
    """Nobody would look at the new value."""
    collector = make(total_frames=400)
    with pytest.raises(AttributeError, match=r"total_frames=800.*make another"):
        collector.total_frames = 800
    assert collector.total_frames == 400


@over([SINGLE, SYNC_HERE])
def test_devices_are_told_as_they_were_understood(make: Make, kind: Kind) -> None:
    """As TorchRL tells them: one of each, or a list with one for each worker."""
    collector, cpu = make(device="cpu"), torch.device("cpu")
    for name in ("storing_device", "policy_device", "env_device"):
        assert getattr(collector, name) == ([cpu, cpu] if kind.workers else cpu)
        assert getattr(make(), name) == ([None, None] if kind.workers else None)
    assert make(env_device="cpu", policy_device="cpu").storing_device == collector.storing_device


def test_the_steps_of_a_batch_are_what_they_are_in_torchrl(make: Make) -> None:
    collector = make(lanes=4, frames_per_batch=40)
    assert (collector.frames_per_batch, collector.requested_frames_per_batch) == (10, 40)


@over(ALL, needs="write_there")
def test_the_buffer_is_the_one_that_was_given(make: Make) -> None:
    kept = buffer()
    assert make(replay_buffer=kept).replay_buffer is kept
