"""Work: something for a worker of a pool to do, and what has become of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from swath.runtime.columns import Place


@dataclass(eq=False)
class Work:
    """Something for one worker to do."""

    index: int
    request: object
    place: Place | None = None
    ticket: int = 0
    receipt: object = None
    is_over: bool = False
    """Whether nothing more is to be waited for."""
    is_lost: bool = False
    """Whether its worker was dropped before it was done, or it was given up."""
    is_given_up: bool = False
    """Whether that was on purpose, as for a new seed."""


W = TypeVar("W", bound=Work)
