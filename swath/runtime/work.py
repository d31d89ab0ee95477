"""Work: something for a worker of a pool to do, and what has become of it."""

from __future__ import annotations

from typing import TypeVar

from swath.runtime.columns import Place


class Work:
    """Something for one worker to do. What has not become of it yet is left to the class: there is one for each batch.

    Attributes:
        is_over: whether nothing more is to be waited for.
        is_lost: whether its worker was dropped before it was done, or it was given up.
        is_given_up: whether that was on purpose, as for a new seed.
    """

    ticket: int = 0
    receipt: object = None
    is_over = is_lost = is_given_up = False

    def __init__(self, index: int, request: object, place: Place | None = None) -> None:
        self.index, self.request, self.place = index, request, place


W = TypeVar("W", bound=Work)
