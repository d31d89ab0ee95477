"""What a workload is judged by: one rate, or two where one side could starve the other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One column of the table."""

    key: str
    """Its name in what a measurement prints and in `results.json`."""
    heading: str
    digits: int = 0
    less_is_better: bool = False
    """For times; then a ratio is turned round, so that more than 1 always means faster."""

    def show(self, value: float) -> str:
        return f"{value:,.{self.digits}f}"


FRAMES = Figure("frames_per_second", "frames/s")


class NotAvailableError(RuntimeError):
    """A contestant cannot take part here, for a reason that is not its failure."""
