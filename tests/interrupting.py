"""A signal handler that raises, or calls something, at every instruction of ours in turn."""

from __future__ import annotations

import dis
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

LONG = bool(os.environ.get("SWATH_LONG"))
OURS = (os.sep + "swath" + os.sep, os.sep + "contextlib.py")
LOCKS = (os.sep + "threading.py",)
"""Where Python's own conditions and events are entered and left: an interrupt there leaves them locked."""
SIGNAL = signal.SIGUSR2


class Tick(KeyboardInterrupt):
    """What the handler raises."""


@contextmanager
def handled(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """A context in which our signal has that handler."""
    before = signal.signal(SIGNAL, handler)
    try:
        yield
    finally:
        signal.signal(SIGNAL, before)


def raise_tick(number: int, frame: FrameType | None) -> None:
    raise Tick


@functools.cache
def looks_before(code: CodeType) -> dict[int, bool]:
    """Of each instruction: whether the interpreter looks for signals just before it, so that something is raised there.

    It looks when a function begins, when a loop begins anew, and after calls. After the last call of a `with` block
    what is raised is still raised within it, which we cannot imitate.
    """
    found = list(dis.get_instructions(code))
    again = {one.argval for one in found if one.opname.startswith("JUMP_BACKWARD")}
    looks = {}
    for at, one in enumerate(found):
        before = found[at - 1].opname if at else ""
        rest = [other.argrepr for other in found[at : at + 5] if other.opname != "SWAP"]
        is_leaving = rest[:3] == ["None"] * 3
        looks[one.offset] = (before.startswith(("RESUME", "CALL")) or one.offset in again) and not is_leaving
    return looks


def at_instruction(number: int, do: Callable[[], object], files: tuple[str, ...] = OURS) -> bool:
    """Call `do`, in which our signal comes at the look of that number in these files; whether it came to it.

    The handler of that very moment is called as the interpreter would call it.
    """
    passed, came = 0, False

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal passed, came
        if not any(part in frame.f_code.co_filename for part in files):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and looks_before(frame.f_code)[frame.f_lasti]:
            passed += 1
            if passed == number and not came:
                came = True
                handler: Any = signal.getsignal(SIGNAL)
                handler(SIGNAL, frame)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    except Tick:
        pass
    finally:
        sys.settrace(before)
    return came


def at_every_instruction(
    do: Callable[[], object], check: Callable[[], object], step: int = 1, files: tuple[str, ...] = OURS
) -> int:
    """Interrupt `do` at each instruction in turn, or at every `step`-th; `check` must hold after each. How many."""
    number = 1
    with handled(raise_tick):
        while at_instruction(number, do, files):
            check()
            number += 1 if LONG else step
    return number // step
