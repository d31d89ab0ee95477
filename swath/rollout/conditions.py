"""Conditions: what holds while a policy acts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict.nn import InteractionType

from swath.modules.exploration import ExploringHere, exploring


class Conditions:
    """No gradients, and one way to explore: one context for both, as a slot may be a single step.

    It may be entered again once it was left, and left again. What is interrupted in the middle of entering is undone;
    an interrupt that comes just when it is to be left keeps it from being left, so leave it once more behind it.
    """

    def __init__(self, kind: InteractionType | None) -> None:
        """Explore like `kind`, or as whoever calls says."""
        self._kind = kind
        self._had_grad: bool | None = None
        """Whether there were gradients before; None if it is not entered."""
        self._more: AbstractContextManager[Any] | None = None
        self.exploring: AbstractContextManager[Any] = nullcontext() if kind is None else exploring(kind)
        """The second alone."""

    def move_to_background(self) -> None:
        """Leave alone what belongs to the whole process."""
        if self._kind is not None:
            self.exploring = ExploringHere(self._kind)

    def __enter__(self) -> None:
        self._had_grad = torch.is_grad_enabled()
        try:
            self.exploring.__enter__()
            torch._C._set_grad_enabled(False)  # `torch.no_grad()` in a quarter of its time
        except BaseException:
            self.__exit__()
            raise

    def enter(self, more: AbstractContextManager[Any]) -> None:
        """Enter `more` as well, which is left when this is, and may be left before it was entered."""
        self._more = more
        more.__enter__()

    def __exit__(self, *exc: object) -> None:
        if self._had_grad is None:
            return
        try:
            if self._more is not None:
                self._more.__exit__(None, None, None)
                self._more = None
        finally:
            try:
                torch._C._set_grad_enabled(self._had_grad)
            finally:
                self.exploring.__exit__(None, None, None)
                self._had_grad = None
