"""Rounds: nobody sleeps through one, nobody is woken for another's."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from swath.runtime import Event, Member, MemoryBlock, Rounds
from swath.runtime import rounds as module

pytestmark = pytest.mark.timeout(60)

Work = Callable[[Member, np.ndarray], int]


@contextmanager
def members(count: int, work: Work, spins: bool = False) -> Iterator[tuple[Rounds, np.ndarray]]:
    """Forked members that do `work` in each round, until they are killed; and memory that they share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "KEEPS_ORDER", spins)
        led, block = Rounds(count), MemoryBlock(8 * count)
    shared, never = block.array((count,), np.int64), os.pipe()
    pids = []
    for index in range(count):
        pid = os.fork()
        if not pid:
            member = led.member(index)
            member.attend(never[0])
            while member.wait():
                member.finish(work(member, shared))
            os._exit(0)
        pids.append(pid)
    try:
        yield led, shared
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for fd in never:
            os.close(fd)
        led.close()


def finish(led: Rounds) -> None:
    """Wait for the end of a round, as a leader does."""
    poll = select.poll()
    poll.register(led.fileno(), select.POLLIN)
    if led.spin():
        return
    led.lower()
    while not led.is_over():
        assert poll.poll(20_000), f"nobody has woken us, and {led.late()} have not finished"
        led.lower()


def count_up(member: Member, shared: np.ndarray) -> int:
    shared[member.index] += member.orders[0]
    return member.index


@pytest.mark.parametrize("spin_s", [0.0, 20e-6, 1e-3])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_everybody_takes_part_once(count: int, spin_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they sleep at once, at about the moment when they are called, or hardly ever."""
    monkeypatch.setattr(module, "SPIN_S", spin_s)
    chosen = np.random.default_rng(0)
    with members(count, count_up, spins=spin_s > 0) as (led, shared):
        expected = np.zeros(count, np.int64)
        for number in range(300):
            some = sorted(chosen.choice(count, chosen.integers(1, count + 1), replace=False).tolist())
            called = None if number % 3 else some
            led.orders[0] = number
            led.begin(called)
            finish(led)
            expected[slice(None) if called is None else called] += number
            assert shared.tolist() == expected.tolist()
            assert led.outcomes() == list(range(count) if called is None else called)
            assert led.late() == []


class Stop(BaseException):
    """What an interrupt raises."""


@pytest.mark.parametrize("called", [None, [0, 2]])
@pytest.mark.parametrize("at", range(8))
def test_an_interrupted_beginning_is_mended(at: int, called: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before or after any of the calls of the system that it is made of."""
    with members(3, count_up) as (led, shared):
        led.orders[0] = 1
        led.begin()
        finish(led)
        moments, plain = iter(range(100)), {name: getattr(Event, name) for name in ("lift", "lower")}

        def interrupted(name: str, *args: object) -> object:
            if next(moments) == at:
                raise Stop
            result = plain[name](*args)
            if next(moments) == at:
                raise Stop
            return result

        for name in plain:
            monkeypatch.setattr(Event, name, lambda *args, name=name: interrupted(name, *args))
        with contextlib.suppress(Stop):
            led.begin(called)
        monkeypatch.undo()
        led.mend()
        finish(led)
        once = shared.tolist()
        assert once in ([1, 1, 1], [2, 2, 2] if called is None else [2, 1, 2])
        for _ in range(3):
            led.begin()
            finish(led)
            led.begin([1])
            finish(led)
        assert shared.tolist() == [once[0] + 3, once[1] + 6, once[2] + 3]


def test_those_who_are_late_are_known() -> None:
    def slow(member: Member, shared: np.ndarray) -> int:
        if member.index == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return 0

    with members(3, slow) as (led, _):
        led.begin()
        poll = select.poll()
        poll.register(led.fileno(), select.POLLIN)
        assert not led.spin()
        while led.late() != [1]:
            os.sched_yield()
        assert not poll.poll(0)
        assert not led.is_over()


def test_an_event_counts() -> None:
    event, by_ones = Event(), Event(by_ones=True)
    for each in (event, by_ones):
        assert not each.lower()
        each.lift(2)
    assert [event.lower(), event.lower()] == [True, False]
    assert [by_ones.lower(), by_ones.lower(), by_ones.lower()] == [True, True, False]
    event.release()
    event.release()


def test_closing_leaves_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    led = Rounds(4)
    led.close()
    led.close()
    assert set(os.listdir("/proc/self/fd")) == before
