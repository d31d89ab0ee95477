"""FrameBudget: how many frames there are still to collect."""

from __future__ import annotations


class FrameBudget:
    """Counts frames against `total` (negative: endless).

    Exact: what is collected is `total`, rounded up only to whole steps of all lanes.
    """

    def __init__(self, total: int, lanes: int, unit: int = 1) -> None:
        self.total = total
        self.spent = 0
        self.lanes = lanes
        """Frames in a step."""
        self.unit = unit
        """The smallest number that can be collected at a time, where a step is less."""

    @property
    def is_endless(self) -> bool:
        """Whether there is no limit."""
        return self.total < 0

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return 0 <= self.total <= self.spent

    def steps(self, wanted: int, lanes: int | None = None, begun: int = 0) -> int:
        """How many of `wanted` steps, of all lanes or so many, may still be made; `begun` frames are under way."""
        if self.is_endless:
            return wanted
        left = -(-(self.total - self.spent - begun) // self.unit) * self.unit
        return min(wanted, max(0, -(-left // (lanes or self.lanes))))

    def spend(self, frames: int) -> None:
        """Count `frames` as collected."""
        self.spent += frames
