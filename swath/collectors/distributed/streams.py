"""Streams: what the workers of a node have made, on its way to the trainer; see NOTE [Inner collectors]."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from swath.collectors.delivery import Part
from swath.keys import DONE, TRAJ_IDS, Key, after


@dataclass
class Stream:
    """What one worker has made and the trainer has not got: its steps in order, without a gap."""

    parts: deque[Part] = field(default_factory=deque)
    taken: int = 0
    """Steps of the first part that the trainer has got."""
    running: set[int] = field(default_factory=set)
    """Trajectories that the trainer has got frames of, and no end."""

    @property
    def steps(self) -> int:
        """How many there are."""
        return sum(part.collected.steps for part in self.parts) - self.taken

    @property
    def version(self) -> int:
        """Of the weights that have made the next step."""
        return self.parts[0].collected.version

    def _next(self) -> tuple[Part, dict[Key, Tensor]]:
        """The part that comes next, and the worker's rows of its slot."""
        part = self.parts[0]
        assert part.slot is not None
        assert part.place is not None
        return part, part.slot.memory.part(part.place.first_row, part.place.first_row + part.place.rows).tensors

    def go_on(self) -> set[int]:
        """The trajectories that run before the next step: with a new part, none that was cut off meanwhile."""
        if not self.taken:
            part, tensors = self._next()
            ran = tensors[TRAJ_IDS][:, 0] if part.collected.running is None else part.collected.running
            self.running &= set(ran.tolist())
        return self.running

    def pour(self, steps: int, rows: Mapping[Key, Tensor], follows_ids: bool) -> None:
        """Move so many steps to `rows` `[lanes, T]`; if `follows_ids`, with a look at which trajectories run."""
        at = 0
        while at < steps:
            if follows_ids:
                self.go_on()
            (part, tensors), first = self._next(), self.taken
            self.taken = min(part.collected.steps, first + steps - at)
            end = at + self.taken - first
            for key, column in rows.items():
                column[:, at:end] = tensors[key][:, first : self.taken]
            if follows_ids:
                ids = rows[TRAJ_IDS][:, at:end]
                self.running |= set(ids[ids >= 0].tolist())
                self.running -= set(ids[rows[after(DONE)][:, at:end, 0]].tolist())
            if self.taken == part.collected.steps:
                self.parts.popleft()
                self.taken = 0
            at = end
