"""Conditions: what holds while a policy acts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict.nn import InteractionType

from swath.modules.exploration import ExploringHere, exploring
from swath.rollout.randomness import Randomness


class Conditions:
    """No gradients, one way to explore, and the random numbers of a loop; it may be entered again once it was left.

    One context for all three: a slot may be a single step, of which each by itself would take its part.
    """

    def __init__(self, kind: InteractionType | None, randomness: Randomness) -> None:
        """Explore like `kind`, or as whoever calls says."""
        self._kind, self._randomness = kind, randomness
        self.exploring: AbstractContextManager[Any] = nullcontext() if kind is None else exploring(kind)
        """The second alone."""
        self._lent: AbstractContextManager[None] | None = None
        self._had_grad = True

    def move_to_background(self) -> None:
        """Leave alone what belongs to the whole process."""
        if self._kind is not None:
            self.exploring = ExploringHere(self._kind)
        self._randomness.stand_alone()

    def __enter__(self) -> None:
        self.exploring.__enter__()
        try:
            if self._randomness.is_lent:
                self._lent = self._randomness.applied()
                self._lent.__enter__()
            self._had_grad = torch.is_grad_enabled()
            torch._C._set_grad_enabled(False)  # `torch.no_grad()` in a quarter of its time
        except BaseException:
            self.exploring.__exit__(None, None, None)
            raise

    def __exit__(self, *exc: object) -> None:
        torch._C._set_grad_enabled(self._had_grad)
        self.exploring.__exit__(None, None, None)
        if self._lent is not None:
            lent, self._lent = self._lent, None
            lent.__exit__(None, None, None)
