"""Moments that nothing disturbs, and what an interrupt at any instruction leaves behind: nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType

import pytest
from interrupting import SIGNAL, Tick, at_every_instruction, handled, raise_tick

from swath.runtime import MemoryBlock, ProcessLock, Section, interrupts, undisturbed

WAIT_S = 10.0


def may_enter(context: Section | ProcessLock) -> bool:
    """Whether another thread can enter it at once."""
    entered: list[bool] = []

    def enter() -> None:
        if isinstance(context, ProcessLock):
            context.acquire(WAIT_S)
            context.release()
        else:
            with context:
                pass
        entered.append(True)

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return bool(entered)


def test_an_interrupt_waits_until_it_may_come() -> None:
    done = []

    def interrupted() -> None:
        with undisturbed, undisturbed:
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    assert done == [True, True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with undisturbed:
        pass


def test_handlers_of_all_signals_wait_and_each_comes() -> None:
    heard: list[int] = []

    def hear(number: int, _: FrameType | None) -> None:
        heard.append(number)

    with handled(hear), undisturbed:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(SIGNAL)
        assert heard == []
        with pytest.raises(KeyboardInterrupt):
            undisturbed.breathe()
        undisturbed.breathe()
        assert heard == [SIGNAL]


def test_each_comes_although_another_raises() -> None:
    """Later its handler may be gone, and the signal would end the process."""
    heard: list[int] = []

    def interrupted() -> None:
        with undisturbed:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(SIGNAL)

    with handled(lambda number, _: heard.append(number)):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert heard == [SIGNAL]


def test_another_thread_that_enters_loses_no_interrupt() -> None:
    def enter() -> None:
        with undisturbed:
            pass

    def interrupted() -> None:
        with undisturbed:
            signal.raise_signal(signal.SIGINT)
            thread = threading.Thread(target=enter)
            thread.start()
            thread.join()

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_nothing_is_held_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "LONGEST_S", 0.0)
    with undisturbed, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("kind", ["section", "lock"])
@pytest.mark.parametrize("waits", [False, True])
def test_what_begins_late_is_not_disturbed(monkeypatch: pytest.MonkeyPatch, kind: str, waits: bool) -> None:
    """As within a long restart of a worker, or when another thread had to be waited for."""
    context = Section() if kind == "section" else ProcessLock(MemoryBlock(8))
    monkeypatch.setattr(interrupts, "LONGEST_S", 0.15)
    heard, held = list[int](), threading.Event()

    def hold() -> None:
        with context:
            held.set()
            time.sleep(0.2)

    other = threading.Thread(target=hold)
    with handled(lambda number, _: heard.append(number)), contextlib.nullcontext() if waits else undisturbed:
        if waits:
            other.start()
            held.wait(WAIT_S)
        else:
            time.sleep(0.2)
        with context:
            signal.raise_signal(SIGNAL)
            assert heard == []
    assert heard == [SIGNAL]
    if waits:
        other.join(WAIT_S)


def test_handlers_that_were_replaced_meanwhile_are_left_alone() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with undisturbed:
            signal.raise_signal(signal.SIGINT)
            assert heard == []
        assert heard == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with undisturbed:
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_forked_child_is_in_no_moment() -> None:
    with handled(raise_tick), undisturbed:
        child = os.fork()
        if not child:
            code = 1
            try:
                signal.raise_signal(SIGNAL)
            except Tick:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("slow", [False, True])
def test_a_section_is_left_wherever_an_interrupt_comes(monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    section = Section()
    if slow:  # no handler waits any longer, but for those that come on the way in and out
        monkeypatch.setattr(interrupts, "LONGEST_S", 1e-9)
    before = signal.getsignal(signal.SIGINT)

    def enter() -> None:
        with section, section:
            pass

    def check() -> None:
        monkeypatch.undo()
        assert may_enter(section)
        enter()
        assert signal.getsignal(SIGNAL) is raise_tick
        assert signal.getsignal(signal.SIGINT) is before

    assert at_every_instruction(enter, check) > 15


@pytest.mark.parametrize("slow", [False, True])
def test_a_shared_lock_is_given_back_wherever_an_interrupt_comes(monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    lock = ProcessLock(MemoryBlock(8))

    def take() -> None:
        with lock, lock:
            pass

    def check() -> None:
        monkeypatch.undo()
        assert may_enter(lock)
        if slow:
            monkeypatch.setattr(interrupts, "LONGEST_S", 0.0)

    check()
    assert at_every_instruction(take, check) > 15


def test_waiting_for_a_shared_lock_can_be_interrupted() -> None:
    block = MemoryBlock(8)
    lock, other = ProcessLock(block), ProcessLock(block)
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with other:
            is_held.set()
            is_over.wait(WAIT_S)

    threads = [threading.Thread(target=hold), threading.Timer(0.1, os.kill, (os.getpid(), SIGNAL))]
    threads[0].start()
    assert is_held.wait(WAIT_S)
    with handled(raise_tick):
        threads[1].start()
        with pytest.raises(Tick):
            lock.acquire(WAIT_S)
    is_over.set()
    for thread in threads:
        thread.join()
    assert may_enter(lock)
