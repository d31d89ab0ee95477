"""A batch takes the steps that docs/design.md draws, in that order, in one process and in many."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from common import buffer
from kinds import ASYNC_HERE, SINGLE, SYNC_HERE, Kind, Make, over
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from swath.collectors import Collector
from swath.envs import GymEnv

MADE = [("session.py", "perform"), ("worker.py", "work"), ("engine.py", "collect"), ("loop.py", "collect")]
ORDERED = [("pool.py", "issue"), ("pool.py", "attend"), ("local.py", "let_work"), *MADE, ("pool.py", "finish")]
WAYS = {
    SINGLE.name: [("direct.py", "next"), ("pool.py", "do"), *MADE, ("surface.py", "_assemble")],
    SYNC_HERE.name: [("delivery.py", "next"), *ORDERED, ("multi.py", "_assemble")],
    ASYNC_HERE.name: [("first_come.py", "next"), *ORDERED, ("surface.py", "_assemble")],
}
"""(file, function) of each step that can be seen in this process."""


def calls_during(do: Any) -> list[tuple[str, str]]:
    seen: list[tuple[str, str]] = []

    def watch(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and "swath" in path.parts:
            seen.append((path.name, frame.f_code.co_name))

    sys.setprofile(watch)
    try:
        do()
    finally:
        sys.setprofile(None)
    return seen


@over([SINGLE, SYNC_HERE, ASYNC_HERE])
def test_a_batch_takes_the_steps_of_the_design_in_order(make: Make, kind: Kind) -> None:
    collector = make()
    calls = calls_during(collector.next)
    place = 0
    for step in WAYS[kind.name]:
        assert step in calls[place:], f"{step} is not met after {calls[place - 1] if place else 'the beginning'}"
        place = calls.index(step, place) + 1


MANY = {"batch": 66, "buffer": 90}
"""Calls of functions, for a batch of one step of one lane. They were 250."""


def cartpole_actor() -> Any:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    kind = {"distribution_class": Categorical, "return_log_prob": True}
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], **kind),
    )


@pytest.mark.parametrize("into", MANY)
def test_a_batch_of_one_step_takes_few_calls(into: str) -> None:
    """What a batch costs beside its steps, in calls of functions of ours: times would depend on the machine."""
    to = {"replay_buffer": buffer()} if into == "buffer" else {}
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    with Collector(env, cartpole_actor(), frames_per_batch=1, total_frames=-1, **to) as collector:
        stream = iter(collector)
        for _ in range(3):
            next(stream)
        calls = calls_during(lambda: next(stream))
    assert len(calls) <= MANY[into], f"{len(calls)} calls: {calls}"


@pytest.mark.parametrize(
    "step", sorted({step for way in WAYS.values() for step in way if not step[1].startswith("_")}), ids=":".join
)
def test_the_design_page_names_each_step(step: tuple[str, str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
    file, function = step
    assert f"{Path(file).stem}." in page
    assert f".{function}" in page
