"""Processes that a test starts by itself, and what they say."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FORK = multiprocessing.get_context("fork")
ANSWER_S = 30.0
"""How long a process may take to say something, or to end."""


@contextlib.contextmanager
def child(target: Callable[..., None], *args: Any, context: Any = FORK) -> Iterator[tuple[Any, Any]]:
    """A process that runs `target(pipe, *args)`, and our end of the pipe; it never outlives the context."""
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(ANSWER_S)
        ours.close()


def importing_env(**more: str) -> dict[str, str]:
    """An environment for programs that shall be able to import what this process can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def hear(pipe: Any) -> Any:
    assert pipe.poll(ANSWER_S), "the other process said nothing"
    return pipe.recv()


def until(condition: Callable[[], Any], seconds: float = ANSWER_S) -> None:
    """Wait until `condition` holds; fails if that takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for has not come"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Whether there is no such process, or only what is left of it until its parent looks.

    One whose main thread has ended holds its files until the others have ended, too.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z" and len(list(Path(f"/proc/{pid}/task").iterdir())) == 1
    except OSError:
        return True
