"""What a collector and its workers tell each other. See also `swath.weights.TakeFrom` and `swath.runtime.Goodbye`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swath.collectors.config import CollectorConfig
from swath.envs.registry import Registered
from swath.envs.rows import Leaf
from swath.keys import Key
from swath.runtime import Block, Failure
from swath.weights import Layout, TakeFrom


@dataclass(frozen=True)
class Task:
    """What a worker is made for."""

    index: int
    number: int
    """Part of the ids of its trajectories, which no other worker has or had."""
    create_env_fn: Any
    policy: Any
    config: CollectorConfig
    init_fn: Callable[[], Any] | None
    registered: Registered
    """Envs that only the parent may know."""
    board: Any
    stores: list[TakeFrom]
    seed: tuple[int, bool] | None = None


# -- to a worker: work ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlotMemory:
    """Rows of columns in a block of shared memory, for `steps` steps."""

    number: int
    rows: int
    first_row: int
    steps: int
    block: Block | None
    """Only with the first mention."""


@dataclass(frozen=True)
class Collect:
    """Fill the memory."""

    ticket: int
    memory: SlotMemory
    random: bool
    forget: tuple[int, ...] = ()
    """Slots that are no longer used."""


@dataclass(frozen=True)
class Fill:
    """Collect so many steps into the replay buffer."""

    ticket: int
    steps: int


@dataclass(frozen=True)
class RunFree:
    """Collect into the replay buffer until the budget is spent, or something comes."""

    budget: Any


# -- to a worker: control ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """Call the method (or get the attribute) at `path`, from the worker's collector."""

    number: int
    path: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    clears: bool = False
    """Whether work that waits is to be forgotten before."""


@dataclass(frozen=True)
class Rest:
    """Answer when nothing is being collected, and collect nothing until `GoOn`."""

    number: int


@dataclass(frozen=True)
class GoOn:
    """End a rest."""


# -- from a worker -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """A worker's first message: what its batches look like."""

    leaves: dict[Key, Leaf]
    delivered: list[Key]
    batch_size: tuple[int, ...]
    env: str
    policy: Layout | None
    """Of the policy, if it has weights."""


@dataclass(frozen=True)
class Collected:
    """A slot is full, or a batch is written."""

    ticket: int
    steps: int
    frames: int
    version: int


@dataclass(frozen=True)
class Answer:
    """To `Call` and `Rest`."""

    number: int
    packed: bytes | None = None
    """What was asked for, pickled by value: whether it can be read here concerns only whoever has asked."""
    failure: Failure | None = None
    ticket: int = 0
    """Of the last work that was done before."""


@dataclass(frozen=True)
class Spent:
    """A worker that runs free has nothing more to collect."""


@dataclass(frozen=True)
class Failed:
    """A worker cannot go on; it ends after this."""

    failure: Failure
    doing: str
