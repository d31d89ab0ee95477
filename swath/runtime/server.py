"""The process that workers are forked from.

NOTE [Processes]: workers are not forked from the user's process, whose threads, locks and devices a fork would leave in
an unknown state, and they do not start from nothing, which takes seconds. They are forked from a server: a process with
one thread that has imported torch and swath and does nothing but fork, started once, with the first worker. The user's
script is not imported again: what a worker is made for comes through its channel, by value.

Everything between the processes is a socket or pipe without a name. The server ends when its socket says that the
user's process has ended, however it ended; the system then kills the workers (`die_with_parent`), also in the middle of
a long step. A worker that ends is reaped by the server, which tells how it ended through a pipe: the worker's sentinel.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import socket
import struct
import sys
from typing import Any

STATUS = struct.Struct("<q")
FORK, EXEC = b"f", b"x"
FDS = 4
"""Per request: the worker's end of its channel, the pipe for its status, and its stdout and stderr."""
EXECUTED = """import sys; sys.path[:] = {path!r}
import os, socket; from swath.runtime.child import run
os.set_inheritable({fd}, False)
run(socket.socket(fileno={fd}))"""


def main(control: int, preloaded: list[str]) -> None:
    """Serve the process at the other end of the socket `control`, until it ends; import `preloaded` before."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if preloaded:
        _preload(preloaded)
    _Forker(control).serve()


class _Forker:
    def __init__(self, control: int) -> None:
        self._control = socket.socket(fileno=control)
        self._children: dict[int, int] = {}
        """The pipes for the status of each."""
        self._woken, wakes = os.pipe()
        for fd in (self._woken, wakes):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wakes = wakes

    def serve(self) -> None:
        while True:
            ready, _, _ = select.select([self._control.fileno(), self._woken], [], [])
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    while os.read(self._woken, 512):
                        pass
            self._reap()
            if self._control.fileno() in ready:
                request, fds, _, _ = socket.recv_fds(self._control, 1, FDS, socket.MSG_CMSG_CLOEXEC)
                if not request:
                    os._exit(0)
                self._start(request, fds)

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self._children:
                pipe = self._children.pop(pid)
                _tell(pipe, os.waitstatus_to_exitcode(status))
                os.close(pipe)

    def _start(self, request: bytes, fds: list[int]) -> None:
        channel, status, out, err = fds
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or 1)
        if not pid:
            try:
                os.close(status)  # ours alone: it must end with us, whoever is forked from a worker
                self._become_worker(request, channel, (out, err), server)
            finally:
                os._exit(1)
        _tell(status, pid)
        if pid > 0:
            self._children[pid] = status
        for fd in (channel, out, err, *([status] if pid < 0 else [])):
            os.close(fd)

    def _become_worker(self, request: bytes, channel: int, streams: tuple[int, int], server: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for fd in (self._woken, self._wakes, *self._children.values()):
            os.close(fd)
        for target, fd in zip((1, 2), streams, strict=True):
            os.dup2(fd, target, inheritable=True)
            os.close(fd)
        from swath.runtime.child import die_with_parent, run

        die_with_parent(server)
        if request == EXEC:
            os.set_inheritable(channel, True)
            code = EXECUTED.format(path=sys.path, fd=channel)
            os.execv(sys.executable, [sys.executable, "-c", code])
        run(socket.socket(fileno=channel))


def _tell(pipe: int, value: int) -> None:
    with contextlib.suppress(OSError):  # nobody wants to know
        os.write(pipe, STATUS.pack(value))


def _preload(names: list[str]) -> None:
    """Import what workers need, without torch's compiler: that takes as long as all the rest, and few need it."""
    import torch.compiler

    deferred: list[tuple[str, Any]] = []
    originals = {name: getattr(torch.compiler, name) for name in ("assume_constant_result", "allow_in_graph")}

    def later(name: str) -> Any:
        def mark(function: Any) -> Any:
            deferred.append((name, function))
            return function

        return mark

    for name in originals:
        setattr(torch.compiler, name, later(name))
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        for name, original in originals.items():
            setattr(torch.compiler, name, original)
    with contextlib.suppress(Exception):  # tensordict imports it, if it is there, when a policy is called first:
        importlib.import_module("h5py")  # half of what a worker would do to start
    from swath.runtime import compiler

    compiler.marks.extend(deferred)
