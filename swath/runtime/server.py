"""The process that workers are forked from.

NOTE [Processes]: workers are not forked from the user's process, whose threads, locks and devices a fork would leave in
an unknown state, and they do not start from nothing, which takes seconds. They are forked from a server: a process with
one thread that has imported torch and swath and does nothing but fork, started once, with the first worker. The user's
script is not imported again: what a worker is made for comes through its channel, by value.

Everything between the processes is a socket or pipe without a name. The server ends when its socket says that the
user's process has ended, however it ended, and kills the workers, also in the middle of a long step; if it is killed
itself, the system does (`die_with_parent`). A worker that ends is reaped by the server, which tells how it ended
through a pipe: the worker's sentinel. What signals the user's process ignores, blocks or gets with its group (Ctrl-C, a
scheduler's SIGTERM, a terminal's SIGHUP) concerns neither server nor workers: they end when that process wants it, or
has ended. See also NOTE [Kin].
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
from collections.abc import Iterable
from typing import Any

from swath.runtime import kin

STATUS = struct.Struct("<q")
FORK, EXEC = b"f", b"x"
FDS = 4
"""Per request: the worker's end of its channel, the pipe for its status, and its stdout and stderr."""
LOOK_S = 1.0
"""How often it is looked for processes that have lost their parent while its worker lives."""
EXECUTED = """import sys; sys.path[:] = {path!r}
import os, socket; from swath.runtime.child import run
os.set_inheritable({fd}, False)
run(socket.socket(fileno={fd}))"""


def main(control: int, preloaded: list[str]) -> None:
    """Serve the process at the other end of the socket `control`, until it ends; import `preloaded` before."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the thread that has started us may have blocked some
    kin.adopt_orphans()
    if preloaded:
        preload(preloaded)
    _Forker(control).serve()


class _Forker:
    def __init__(self, control: int) -> None:
        self._control = socket.socket(fileno=control)
        self._workers: dict[int, int] = {}
        """The pipes for the status of each."""
        self._adopted: set[int] = set()
        """Processes that belong to living workers, although none of them is their parent."""
        self._woken, wakes = os.pipe()
        for fd in (self._woken, wakes):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wakes = wakes

    def serve(self) -> None:
        poll = select.poll()  # not `select`, which knows no descriptor above 1,023
        for fd in (self._control.fileno(), self._woken):
            poll.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll(LOOK_S * 1000 if self._workers else None)]
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    while os.read(self._woken, 512):
                        pass
            self._reap()
            if self._control.fileno() in ready:
                request, fds, _, _ = socket.recv_fds(self._control, 1, FDS, socket.MSG_CMSG_CLOEXEC)
                if not request:
                    kin.end(lambda: kin.descendants_of([os.getpid()]))
                    os._exit(0)
                self._start(request, fds)

    def _reap(self) -> None:
        ended: dict[int, int] = {}
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] in self._workers:
                    ended[found[0]] = found[1]
        pipes = {pid: self._workers.pop(pid) for pid in ended}
        if ended:
            kin.end(lambda: self._orphans(ended))
            for pid in ended:  # where the system does not tell whose children there are
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
        self._adopted = set(kin.children_of(os.getpid())) - set(self._workers)
        for pid, pipe in pipes.items():
            _tell(pipe, os.waitstatus_to_exitcode(ended[pid]))
            os.close(pipe)

    def _orphans(self, ended: Iterable[int]) -> list[int]:
        """What is left of workers that have ended: in the session of one, or just become our child."""
        found = []
        for pid in set(kin.children_of(os.getpid())) - set(self._workers):
            with contextlib.suppress(OSError):
                session = os.getsid(pid)
                is_new = session not in self._workers and (pid not in self._adopted or not self._workers)
                if session in ended or is_new:
                    found.append(pid)
        return found + kin.descendants_of(found)

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
            self._workers[pid] = status
        for fd in (channel, out, err, *([status] if pid < 0 else [])):
            os.close(fd)

    def _become_worker(self, request: bytes, channel: int, streams: tuple[int, int], server: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for fd in (self._woken, self._wakes, *self._workers.values()):
            os.close(fd)
        for target, fd in zip((1, 2), streams, strict=True):
            os.dup2(fd, target, inheritable=True)
            os.close(fd)
        from swath.runtime.child import leave_behind, run

        leave_behind(server)
        if request == EXEC:
            os.set_inheritable(channel, True)
            code = EXECUTED.format(path=sys.path, fd=channel)
            os.execv(sys.executable, [sys.executable, "-c", code])
        run(socket.socket(fileno=channel))


def _tell(pipe: int, value: int) -> None:
    with contextlib.suppress(OSError):  # nobody wants to know
        os.write(pipe, STATUS.pack(value))


def preload(names: list[str]) -> None:
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
