"""One thread does it for all, whatever becomes of that thread."""

from __future__ import annotations

import threading

import pytest

from swath.runtime.turns import Turns


class InterruptedLock:
    """Raises an interrupt when it is taken for the second time: when a turn is about to be given back."""

    def __init__(self) -> None:
        self.lock, self.times = threading.RLock(), 0

    def __enter__(self) -> None:
        self.times += 1
        if self.times == 2:
            raise KeyboardInterrupt
        self.lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self.lock.release()


def test_a_turn_is_told_from_a_call_within_it() -> None:
    turns, told = Turns(), list[tuple[bool, bool]]()

    def do(is_first: bool) -> None:
        told.append((is_first, turns.is_mine))
        if is_first:
            turns.take(do, 1.0)

    turns.take(do, 1.0)
    turns.take(do, 1.0)
    assert told == [(True, True), (False, True)] * 2
    assert not turns.is_mine


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_turn_that_an_interrupt_has_torn_away_is_taken_by_the_next(elsewhere: bool) -> None:
    turns, told = Turns(InterruptedLock()), list[bool]()  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt) as interrupt:
        turns.take(told.append, 1.0)
    assert not turns.is_mine
    if elsewhere:
        thread = threading.Thread(target=turns.take, args=(told.append, 1.0))
        thread.start()
        thread.join(10.0)
    else:
        turns.take(told.append, 1.0)
    assert told == [True, True]
    assert interrupt.tb is not None, "what was interrupted is still referred to"


def test_others_wait_for_the_end_of_a_turn() -> None:
    turns, begun, may_end, told = Turns(), threading.Event(), threading.Event(), list[bool]()

    def do(is_first: bool) -> None:
        told.append(is_first)
        begun.set()
        may_end.wait(10.0)

    first = threading.Thread(target=turns.take, args=(do, 10.0))
    first.start()
    assert begun.wait(10.0)
    other = threading.Thread(target=turns.take, args=(told.append, 10.0))
    other.start()
    other.join(0.05)
    assert other.is_alive()
    may_end.set()
    for thread in (first, other):
        thread.join(10.0)
        assert not thread.is_alive()
    assert told == [True], "who has waited leaves it at that"
