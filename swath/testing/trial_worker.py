"""A worker for trials of carriers: what it does can be checked from outside."""

# ruff: noqa: D102 - what the methods of tasks and jobs do is told in `swath.runtime.carrier`

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from swath.runtime.carrier import Link, Ordered, Topic
from swath.runtime.snapshots import Snapshots


@dataclass(frozen=True)
class Trial:
    """Work: make so many steps, fill the place with `value`, and report; or fail."""

    steps: int = 1
    value: int = 0
    reports: bool = True
    fails: bool = False


@dataclass(frozen=True)
class TrialTask:
    """What the worker is started for."""

    name: str = "trial"
    fails: bool = False

    def begin(self, link: Link) -> TrialJob:
        if self.fails:
            raise LookupError("it cannot be made")
        return TrialJob(self.name, link)


class TrialJob:
    """Counts, fills and tells."""

    def __init__(self, name: str, link: Link) -> None:
        self._name, self._link = name, link
        self._done: list[int] = []
        self._snapshots: Snapshots | None = None

    def describe(self) -> object:
        return self._name

    def work(self, order: Ordered, has_questions: Callable[[], bool]) -> object:
        """Do a trial; the receipt tells how many steps were made, and whether weights were whole in all of them."""
        trial, steps, is_whole = order.request, 0, True
        assert isinstance(trial, Trial)
        while steps < trial.steps:
            steps += 1
            weights = self._weights()
            is_whole = is_whole and weights.get("first") == weights.get("second")
            if self._link.beat(order.ticket):
                break
        if trial.fails:
            raise ValueError(f"it failed in order {order.ticket}")
        if order.place is not None:
            for tensor in self._link.memory(order.place).tensors.values():
                tensor.fill_(trial.value)
        self._done.append(order.ticket)
        if trial.reports:
            self._link.report({"orders": len(self._done), "last": order.ticket})
        return steps, is_whole

    def _weights(self) -> dict[str, Any]:
        newest = {} if self._snapshots is None or self._snapshots.version < 0 else self._snapshots.snapshot()
        return {name: v.unique().tolist() if isinstance(v, torch.Tensor) else v for name, v in newest.items()}

    def answer(self, request: object) -> object:
        """What was done, and the newest weights; other questions are errors."""
        return {"done": self._done, "weights": self._weights()}[request]  # type: ignore[index]

    def idle(self) -> None:
        """Do nothing."""

    def subscribe(self, topic: Topic, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

    def stop(self) -> None:
        """There is nothing to free."""
