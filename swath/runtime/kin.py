"""All that stems from a process: what an env has started ends with its worker.

NOTE [Kin]: an env may start processes of its own: a simulator, a pool of `multiprocessing` and what keeps track of it.
Each worker leads a session, so that signals for the group of the user's program reach neither it nor them. A worker
that ends in order kills what is left of its kin itself. If it was killed, they become children of the server, which has
asked the system for that, and kills them; if the user's process has ended, the server kills all that stems from it.
A worker with `mp_start_method="fork"` has no server: if it dies, only its group is found, and if the user's process is
killed, nobody is there to end what its envs have started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from swath.runtime.liveness import birth_of

PR_SET_CHILD_SUBREAPER = 36
TRACKER = b"multiprocessing.resource_tracker"
"""It ends by itself when those have ended whom it works for, and removes what they have left behind."""
TRACKER_S, LONGEST_S = 0.3, 0.6
"""How long it may take for that, and how long it may take the system to end all."""


def adopt_orphans() -> None:
    """Become the parent of all who stem from this process and lose their own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int) -> list[int]:
    """The processes that `pid` has started, or adopted, and that have not been reaped."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended, or the system does not tell
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def descendants_of(pids: Iterable[int]) -> list[int]:
    """Children, their children, and so on, without `pids` themselves."""
    found = [child for pid in pids for child in children_of(pid)]
    return found + descendants_of(found) if found else []


def end(find: Callable[[], list[int]]) -> None:
    """Kill whom `find` finds, until there is nobody: those who are killed may have started others."""
    begun = time.monotonic()
    while alive := [pid for pid in find() if birth_of(pid) is not None]:
        taken = time.monotonic() - begun
        if taken > LONGEST_S:
            return
        for pid in alive:
            if taken > TRACKER_S or not is_tracker(pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def is_tracker(pid: int) -> bool:
    """Whether it is what `multiprocessing` starts to remove what is left behind."""
    try:
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
