"""What a contestant hands over to be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.batch import Run
from benchmarks.workloads import Workload

Actions = NDArray[Any]
"""One action for each env."""


@dataclass
class Collecting:
    """A collector with its workers."""

    run: Run
    batch: Workload
    """What a batch of it holds."""
    joined: bool = True
    """Whether a batch begins where the last one ended; not where each worker delivers by itself."""


@dataclass
class Stepper:
    """Envs that have been reset, to be stepped without a policy; finished ones are reset on the way."""

    step: Callable[[Any], int]
    """Takes prepared actions; returns how many frames came of it."""
    observation: Callable[[], NDArray[Any]]
    """What the next step begins from, `[envs, ...]`."""
    close: Callable[[], None]
    prepare: Callable[[Actions], Any] = lambda actions: actions
    """Actions as `step` wants them; done before the clock starts."""
    steps: int = 1
    """Steps that one call makes; more than one where a collector draws its own actions."""


@dataclass
class Weights:
    """A collector whose policy gets new weights."""

    net: nn.Module
    actions: Callable[[], Tensor]
    """Those of the next batch."""
    update: Callable[[], Any]
    close: Callable[[], None]
