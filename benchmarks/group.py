"""A command with all the processes that it starts: when it is over, none of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

GRACE = 5.0
"""Seconds for helpers that end a moment after the process that they belong to."""


def run_group(
    command: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float, grace: float = GRACE
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run`, in a group of its own; what outlives the command is reported and killed."""
    # files, not pipes: a pipe would stay open as long as any process that has been left behind
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, env=env, cwd=cwd, stdout=out, stderr=err, start_new_session=True)
        over = False
        try:
            process.wait(timeout)
            over = True
        finally:
            if not over:
                _kill(process.pid)
                process.wait()
            elif not _ends(process.pid, grace):
                print(f"left processes behind: {' '.join(command[-5:])}", file=sys.stderr, flush=True)
                _kill(process.pid)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())


def _ends(group: int, grace: float) -> bool:
    """Whether all processes of the group end by themselves soon."""
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
