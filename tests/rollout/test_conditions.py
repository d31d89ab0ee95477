"""What holds while a policy acts ends with it, wherever it is interrupted."""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from tensordict.nn import InteractionType

from swath.modules.exploration import exploration_type as interaction_type
from swath.rollout import conditions
from swath.rollout.conditions import Conditions


def test_conditions_hold_and_end_and_hold_again() -> None:
    under = Conditions(InteractionType.MEAN)
    before = interaction_type()
    for _ in range(2):
        with under:
            assert (interaction_type(), torch.is_grad_enabled()) == (InteractionType.MEAN, False)
        assert (interaction_type(), torch.is_grad_enabled()) == (before, True)


def test_without_a_kind_the_callers_counts() -> None:
    before = interaction_type()
    with Conditions(None):
        assert (interaction_type(), torch.is_grad_enabled()) == (before, False)


def test_an_interrupt_while_they_begin_leaves_nothing() -> None:
    before = interaction_type()
    for stop in range(1, 8):
        seen = 0

        def trace(frame: FrameType, event: str, argument: Any, stop: int = stop) -> Any:
            nonlocal seen
            if (frame.f_code.co_filename, frame.f_code.co_name) != (conditions.__file__, "__enter__"):
                return None
            if event == "line":
                seen += 1
                if seen == stop:
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        with contextlib.suppress(KeyboardInterrupt), Conditions(InteractionType.MEAN):
            pass
        sys.settrace(None)
        assert (interaction_type(), torch.is_grad_enabled()) == (before, True), f"at line {stop}"
    assert seen < stop, "not all lines were met"


def test_an_interrupt_while_they_end_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before, set_grad = interaction_type(), torch._C._set_grad_enabled

    def set_and_interrupt(is_on: bool) -> None:
        set_grad(is_on)
        if is_on:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch._C, "_set_grad_enabled", set_and_interrupt)
    with pytest.raises(KeyboardInterrupt), Conditions(InteractionType.MEAN):
        pass
    monkeypatch.undo()
    assert (interaction_type(), torch.is_grad_enabled()) == (before, True)


def test_what_a_policy_raises_ends_them() -> None:
    before = interaction_type()
    with pytest.raises(ZeroDivisionError), Conditions(InteractionType.MEAN):
        raise ZeroDivisionError
    assert (interaction_type(), torch.is_grad_enabled()) == (before, True)
