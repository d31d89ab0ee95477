"""Daemons that a test starts, and that never outlive it.

A command is run by a process of its own, the warden, which adopts all that the command leaves behind, and all that
comes of it. When the warden's input ends, because the test is over or because its process is gone in whatever way, it
kills them, and tidies up.

This file is the warden's program, too. It imports little, to start at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
START_S = 60.0
"""How long a command may take to start its daemons, on a loaded machine."""
STOP_S = 30.0


class Warden:
    """Runs `command`, and holds what it leaves behind until `close`.

    Args:
        command: Starts daemons, and ends well when they are there, for which `ready` waits.
        log: What the command and its daemons print goes to the end of this file.
        tidy: What a shell shall do when all of them are dead.
        env: Their environment; ours, if not given.
    """

    def __init__(self, command: Sequence[str], log: Path, tidy: str = "", env: Mapping[str, str] | None = None) -> None:
        self._command = " ".join(command)
        self._log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, tidy, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env=env,
                start_new_session=True,  # Ctrl-C is for the test
            )

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Whether the command has ended."""
        return bool(select.select([self._process.stdout], [], [], within_s)[0])

    def ready(self) -> None:
        """Wait until the command has ended well."""
        assert self._process.stdout is not None
        code = int(self._process.stdout.readline()) if self.has_ended(START_S) else f"nothing in {START_S} s"
        if code != 0:
            raise RuntimeError(f"{self._command}\nended with {code}, and said\n{self._log.read_text(errors='replace')}")

    def close(self) -> None:
        """Kill everything, and wait until it is gone."""
        with contextlib.suppress(BrokenPipeError, ValueError):  # it is gone already
            self._process.communicate(b"\n", timeout=STOP_S)  # a line, since a fork of ours may hold the pipe, too

    def pids(self) -> set[int]:
        """The processes that it holds."""
        return descendants(self._process.pid)


def descendants(of: int) -> set[int]:
    """Children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry))
    found: set[int] = set()
    todo = [of]
    while todo:
        new = children.get(todo.pop(), [])
        found.update(new)
        todo.extend(new)
    return found


def reap(options: int = 0) -> tuple[int, int]:
    """Number and exit code of a child that has ended; the number is 0 if none has, and -1 if there is no child."""
    try:
        pid, status = os.waitpid(-1, options)
    except ChildProcessError:
        return -1, 0
    return pid, os.waitstatus_to_exitcode(status)


def watch(tidy: str, *command: str) -> None:
    """Be the warden."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    main = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    while 0 not in select.select([0, woken], [], [])[0]:  # readable: we shall end
        os.read(woken, 4096)
        while (ended := reap(os.WNOHANG))[0] > 0:
            if ended[0] == main.pid:
                with contextlib.suppress(BrokenPipeError):
                    print(ended[1], flush=True)
    # In rounds: what was forked while the others were killed is found in the next one.
    gone = False
    while not gone:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        gone = reap()[0] == -1
    signal.set_wakeup_fd(-1)
    subprocess.run(["sh", "-c", tidy], check=False)


if __name__ == "__main__":
    watch(*sys.argv[1:])
