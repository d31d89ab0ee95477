"""The stages of a plan: what is done in each step, on rows, in order.

A stage is bound to rows once. `begin` is called before each slot and may draw or fetch what all its steps need, `run`
is called every step, and `finish` may compute, for the whole slot at once, what no step needs.

NOTE [Some lanes]: lanes need not act together. `run_on` does for some of them what `run` does for all: it reads and
writes their rows alone, each lane at a time index of its own. What is drawn for a slot belongs to a lane and a time
index, so the same seed gives the same actions however the lanes were grouped. Only modules that draw by themselves, in
the order in which they are called, cannot keep that promise, nor those whose rows depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from swath.envs.rows import Rows
from swath.envs.spaces import ActionCodec
from swath.keys import Key
from swath.modules.call_context import CallContext
from swath.modules.thread_choice import ThreadChoice
from swath.runtime.columns import writable

Filled = tuple[slice, slice] | np.ndarray
"""Which steps `[N, T]` of a slot are valid, as an index for its columns: all lanes up to one step, or a mask."""


class StageName(str):
    """The name of a stage, which is shown with the reason where a module has to be called."""

    reason: str
    """Which module it is, and why it is not run by arithmetic on rows; empty for what is quick."""

    def __new__(cls, name: str, reason: str = "") -> StageName:
        """The name, and the reason."""
        told = super().__new__(cls, name)
        told.reason = reason
        return told

    def __repr__(self) -> str:
        """The name as it is, and the reason behind it."""
        return f"{super().__repr__()} ({self.reason})" if self.reason else super().__repr__()


class Stage:
    """One part of a policy. Most have nothing to do before or after the steps, and nothing that is late."""

    late: tuple[Key, ...] = ()
    """Keys that no step writes: their columns are filled when the slot is complete."""

    reason = ""
    """Why a module is called where arithmetic on rows would be quicker; empty for stages that are quick."""

    only_reads = False
    """Whether what it calls leaves alone what it is given, and does not keep it, so that it need not get copies."""

    needs_conditions = True
    """Whether the way to explore has to be set while it acts, as for what is called: not for mere arithmetic."""

    infers = False
    """Whether it runs in inference mode: torch is quicker there, but no tensor of this can be trained with later."""

    threads: ThreadChoice | None = None
    """What chooses how many it has, where there is a choice."""

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Make ready for `steps` steps."""

    def run(self, t: int) -> None:
        """Do the work of step `t`, for all lanes."""
        raise NotImplementedError

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """Do the work of step `times[i]` for lane `lanes[i]`, for all `i`; see NOTE [Some lanes]."""
        raise NotImplementedError

    def run_first(self, count: int, t: int) -> None:
        """Do the work of step `t` for the first `count` lanes."""
        self.run_on(np.arange(count), np.full(count, t))

    def finish(self, columns: Mapping[Key, Any], filled: Filled) -> None:
        """Fill the stage's late entries, given all columns `[N, T, ...]`, where they are valid: arrays, on the CPU."""


def in_turn(stages: Iterable[Stage], name: str = "run") -> list[Callable[..., object]]:
    """What runs `stages` one after the other; inference mode is entered once for all that follow each other there."""
    runs: list[Callable[..., object]] = []
    for infers, some in groupby(stages, attrgetter("infers")):
        runs += CallContext(one_thread=False, infers=infers).of([getattr(stage, name) for stage in some])
    return runs


class RandomStage(Stage):
    """Actions drawn from the action space for a whole slot at once."""

    needs_conditions = False

    def __init__(self, codec: ActionCodec, outputs: Rows) -> None:
        """Draw into the action entries of `outputs`, encoded as these are."""
        self._codec = codec
        self._outputs = outputs
        self._leaves = {key: outputs.leaf(key) for key in codec.leaves}
        self._steps = -1
        """For which `_draw` does: for none yet."""
        self._drawn: list[tuple[Any, Any]] = []

    def begin(self, steps: int, generator: torch.Generator | None) -> None:
        """Draw the actions of all steps."""
        if steps != self._steps:
            self._steps, self._draw = steps, self._codec.drawer(self._leaves, steps, self._outputs.lanes)
        arrays, flat = self._outputs.arrays, self._outputs.flat
        self._drawn = [  # [N, ...], [T, N, ...]
            (arrays[key], values.numpy())
            if key in arrays
            else (writable(flat(key)), writable(values.to(flat(key).device)))
            for key, values in self._draw(generator).items()
        ]

    def run(self, t: int) -> None:
        """Take the actions of step `t`."""
        for target, drawn in self._drawn:
            target[...] = drawn[t]

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """Take the actions of some lanes."""
        for target, drawn in self._drawn:
            target[lanes] = drawn[times, lanes]


class RangeStage(Stage):
    """Refuses integers that name no action. For the first slot: whoever numbers them wrongly does so from the start."""

    def __init__(self, codec: ActionCodec, outputs: Rows) -> None:
        """Look at the action entries of `outputs`."""
        limits = codec.index_limits({key: outputs.leaf(key) for key in codec.leaves})
        self._codec, self._all = codec, np.arange(outputs.lanes)
        self._limits = [(key, outputs.flat(key), limit.to(outputs.flat(key).device)) for key, limit in limits.items()]

    def run(self, t: int) -> None:
        """Look at all lanes."""
        self.run_on(self._all, self._all)

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """Look at some lanes."""
        for key, rows, limit in self._limits:
            outside = ((rows[lanes] < 0) | (rows[lanes] >= limit)).reshape(len(lanes), -1).any(1)
            if bool(outside.any()):
                lane = int(lanes[int(outside.nonzero()[0])])
                raise ValueError(
                    f"The policy gave {key!r} = {rows[lane].tolist()} in lane {lane}, which is not in the env's action "
                    f"space {self._codec.space}: actions are numbered from 0, up to {(limit - 1).tolist()}."
                )


class EchoStage(Stage):
    """What is present, as it is: for observations that a policy writes over, when it does not act."""

    def __init__(self, present: Rows, outputs: Rows, keys: Sequence[Key]) -> None:
        """Copy `keys`, as far as the policy leaves them their shape."""
        pairs = [(outputs.flat(key), present.flat(key)) for key in keys]
        self._pairs = [(target, source) for target, source in pairs if target.shape == source.shape]

    def run(self, t: int) -> None:
        """Copy."""
        for target, source in self._pairs:
            target.copy_(source)

    def run_on(self, lanes: np.ndarray, times: np.ndarray) -> None:
        """Copy some lanes."""
        for target, source in self._pairs:
            writable(target)[lanes] = writable(source[lanes])
