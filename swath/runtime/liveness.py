"""Whether a process is still the one it was."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

PIDFD_OPEN = 434
"""The number of the system call, the same on all machines."""
UNKNOWN = 0
"""The birth of a process where the system does not tell."""


def watch(pid: int) -> int:
    """A descriptor that becomes readable when the process `pid` ends; OSError where the system has no such thing.

    Some interpreters were built where there was none, and run where there is.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    fd = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_OPEN, pid, 0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.set_inheritable(fd, False)
    return int(fd)


def state_of(pid: int) -> list[str]:
    """What the system tells of a process behind its name: first how it is, as a letter."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def birth_of(pid: int) -> int | None:
    """When the process `pid` began, in the system's own ticks; None if there is none, or it has ended."""
    try:
        fields = state_of(pid)
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else UNKNOWN
    except OSError:  # it ended while we read
        return None
    state, started = fields[0], int(fields[19])
    return None if state in "ZX" else started


def own_birth() -> int:
    """When this process began. Together with its id it names the process for ever, as ids are given out again."""
    return birth_of(os.getpid()) or UNKNOWN


def is_alive(pid: int, birth: int) -> bool:
    """Whether the process `pid` that began at `birth` still runs (or is stopped, but not dead)."""
    return birth_of(pid) == birth
