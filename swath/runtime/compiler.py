"""Marks for torch's compiler that were put off when a worker's server imported what makes them."""

from __future__ import annotations

from typing import Any

marks: list[tuple[str, Any]] = []
"""(function of `torch.compiler`, what it is to be called with)"""


def make_ready() -> None:
    """Make the marks: to be called before anything is compiled."""
    import torch.compiler

    while marks:
        name, function = marks.pop()
        getattr(torch.compiler, name)(function)
