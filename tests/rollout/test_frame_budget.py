"""FrameBudget against stepping one step at a time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from swath.rollout.budget import FrameBudget


@settings(max_examples=200, deadline=None)
@given(total=st.integers(1, 100), lanes=st.integers(1, 7), wanted=st.integers(1, 9), idle=st.lists(st.integers(0, 20)))
def test_steps_are_those_made_until_the_total_is_reached(total: int, lanes: int, wanted: int, idle: list[int]) -> None:
    """Some frames of a batch may turn out not to count: they are made up for."""
    budget, spent = FrameBudget(total, lanes), 0
    while not budget.is_spent:
        steps, plain = budget.steps(wanted), spent
        made = 0
        while made < wanted and plain < total:  # the plain way: step after step until there is enough
            plain, made = plain + lanes, made + 1
        assert steps == made > 0
        frames = max(0, steps * lanes - (idle.pop() if idle else 0))
        budget.spend(frames)
        spent += frames
        assert budget.spent == spent
    assert budget.steps(wanted) == 0
    assert total <= spent < total + lanes


@given(wanted=st.integers(1, 9), frames=st.integers(0, 10**12))
def test_an_endless_budget_is_never_spent(wanted: int, frames: int) -> None:
    budget = FrameBudget(-1, 3)
    budget.spend(frames)
    assert budget.is_endless
    assert not budget.is_spent
    assert budget.steps(wanted) == wanted
