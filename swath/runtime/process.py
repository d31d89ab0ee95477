"""Starting worker processes, and ending them.

NOTE [Shutdown]: a worker is asked to end through its channel. One that does not end in time is terminated, and one that
does not even then is killed: the three steps together have a deadline, whatever the worker does. A worker that is
stopped (SIGSTOP) hears nothing, so that for it the first two steps are left out. Ending twice is harmless. What nobody
has ended is ended when the interpreter exits, and what the interpreter could not end, because it was killed, the system
does: see NOTE [Processes].
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from multiprocessing import connection
from typing import Any

from swath.errors import ChannelClosedError
from swath.runtime import server as server_module
from swath.runtime.channel import Channel, pack
from swath.runtime.child import Surroundings, Target, die_with_parent, run
from swath.runtime.interrupts import Section
from swath.runtime.liveness import state_of

METHODS = ("forkserver", "spawn", "fork")
PRELOADED = ("swath.collectors",)
"""What workers need, and what takes seconds to import: named, not imported, as it stands above us."""
START_S = 60.0
"""How long a server may take to import torch, on a loaded machine, and a worker to be forked."""
ASK, TERMINATE = 0.6, 0.8
"""Up to which part of the time for shutting down workers are asked, and terminated; then they are killed."""


class Process:
    """A worker process, seen from the one that has started it. When it ends, its `sentinel` becomes readable."""

    def __init__(self, pid: int, channel: Channel, sentinel: int, *, is_own_child: bool) -> None:
        self.pid = pid
        self.channel = channel
        self.sentinel = sentinel
        self.exitcode: int | None = None
        self._has_ended = False
        self._is_own_child = is_own_child
        self._owner = os.getpid()
        self._asking = Section()
        _processes.add(self)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended yet, as far as we know."""
        return not self._has_ended and not self.wait(0.0)

    @property
    def is_stopped(self) -> bool:
        """Whether the system says that it was stopped, as by SIGSTOP or a debugger."""
        try:
            return state_of(self.pid)[0] in "tT"
        except (OSError, IndexError):
            return False

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, within `timeout_s`; then `exitcode` tells how."""
        if self._has_ended or os.getpid() != self._owner:
            return True
        if not connection.wait([self.sentinel], timeout_s):
            return False
        with self._asking:
            if not self._has_ended:  # another thread may have asked too
                self.exitcode = self._status()
                self._has_ended = True
                os.close(self.sentinel)
        return True

    def _status(self) -> int | None:
        if self._is_own_child:
            try:
                return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:  # somebody else has asked
                return None
        status = os.read(self.sentinel, server_module.STATUS.size)
        return None if len(status) < server_module.STATUS.size else int(server_module.STATUS.unpack(status)[0])

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def start(target: Target, method: str = "forkserver", threads: int = 1, warns_itself: bool = False) -> Process:
    """A process that runs `target` with its end of a channel. Both ends are closed with their processes."""
    packed = pack(target, by_value=True)  # first: if that cannot be, nothing is started
    if method not in METHODS:
        raise ValueError(f"The start method must be one of {METHODS}, got {method!r}.")
    channel, end = Channel.pair()
    process = _forked(channel, end) if method == "fork" else _served(channel, end, method)
    authkey = bytes(multiprocessing.current_process().authkey)
    surroundings = Surroundings(
        dict(os.environ), _here(), list(sys.path), list(sys.argv), authkey, threads, warns_itself
    )
    with contextlib.suppress(ChannelClosedError):  # whoever waits for its answer will see that it has ended
        process.channel.send(surroundings)
        process.channel.send_packed(packed)
    return process


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # a directory that was removed
        return ""


def _served(channel: Channel, end: socket.socket, method: str) -> Process:
    sentinel, status = os.pipe()
    try:
        request = server_module.EXEC if method == "spawn" else server_module.FORK
        _server(method).request(request, [end.fileno(), status])
    finally:
        end.close()
        os.close(status)
    pid = _pid(sentinel)
    return Process(pid, channel, sentinel, is_own_child=False)


def _pid(sentinel: int) -> int:
    told = os.read(sentinel, server_module.STATUS.size) if connection.wait([sentinel], START_S) else b""
    if len(told) < server_module.STATUS.size:
        os.close(sentinel)
        raise RuntimeError(
            "The server that starts worker processes has ended, or does not answer: what it wrote to stderr tells why."
        )
    pid = int(server_module.STATUS.unpack(told)[0])
    if pid < 0:
        os.close(sentinel)
        raise OSError(-pid, f"No worker process could be started: {os.strerror(-pid)}.")
    return pid


def _forked(channel: Channel, end: socket.socket) -> Process:
    """A fork of this very process, with all that it has: for those who want that."""
    is_main = threading.current_thread() is threading.main_thread()
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        try:
            if is_main:  # the system watches the thread that forks; others may end before the process does
                die_with_parent(parent)
            run(end)
        finally:
            os._exit(1)
    end.close()
    return Process(pid, channel, os.pidfd_open(pid), is_own_child=True)


class _Server:
    """The server's handle: see NOTE [Processes]."""

    def __init__(self, preloaded: Iterable[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._control, self._owner = ours, os.getpid()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from swath.runtime.server import main; "
            f"main({theirs.fileno()}, {list(preloaded)!r})"
        )
        # One thread for what reads it when it is loaded; workers get the environment that their parent has then.
        single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._popen = subprocess.Popen(
            [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code],  # type: ignore[attr-defined]
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **single},
        )
        theirs.close()

    def is_usable(self) -> bool:
        return self._owner == os.getpid() and self._popen.poll() is None and self._control.fileno() >= 0

    def request(self, kind: bytes, fds: list[int]) -> None:
        """Ask for a worker; the pipe for its status, among `fds`, tells whether the server has answered."""
        streams = [_stream(1), _stream(2)]
        with contextlib.suppress(BrokenPipeError):
            socket.send_fds(self._control, [kind], [*fds, *streams])
        for fd in streams:
            os.close(fd)

    def end(self) -> None:
        """Let it see that nobody is there any more."""
        self.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(1.0)

    def close(self) -> None:
        self._control.close()


def _stream(fd: int) -> int:
    """A copy of stdout or stderr; of nothing, where it is closed."""
    try:
        return os.dup(fd)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


_servers: dict[str, _Server] = {}
_starting = threading.Lock()


def _server(method: str) -> _Server:
    with _starting:
        found = _servers.get(method)
        if found is None or not found.is_usable():
            found = _servers[method] = _Server(PRELOADED if method == "forkserver" else ())
        return found


def end_all(processes: Iterable[Process], goodbye: Any, timeout_s: float) -> None:
    """End `processes` within `timeout_s`, whatever they do: see NOTE [Shutdown]."""
    alive = [process for process in processes if process.is_alive]
    begun = time.monotonic()
    try:
        for process in alive:
            with contextlib.suppress(OSError, struct.error):  # it has ended, or takes no messages
                process.channel.send(goodbye, timeout_s=0.0)
        alive = _remaining(alive, begun + ASK * timeout_s, unless_stopped=True)
        for process in alive:
            process.signal(signal.SIGTERM)
        alive = _remaining(alive, begun + TERMINATE * timeout_s, unless_stopped=True)
    finally:  # an interrupt must not leave them running
        for process in alive:
            process.signal(signal.SIGKILL)
        _remaining(alive, max(time.monotonic() + 0.5, begun + timeout_s))
        for process in processes:
            process.channel.close()


def _remaining(processes: list[Process], deadline: float, unless_stopped: bool = False) -> list[Process]:
    """Those that have not ended when the deadline comes."""
    alive = [process for process in processes if process.is_alive]
    while alive and (left := deadline - time.monotonic()) > 0:
        if unless_stopped and all(process.is_stopped for process in alive):
            break
        connection.wait([process.sentinel for process in alive], min(left, 0.25))
        alive = [process for process in alive if process.is_alive]
    return alive


_processes: weakref.WeakSet[Process] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child has no part in its parent's workers."""
    for server in _servers.values():
        server.close()
    _servers.clear()


os.register_at_fork(after_in_child=_forget_in_child)


@atexit.register
def _end_forgotten() -> None:
    """What nobody has ended by the time the interpreter exits."""
    own = [process for process in _processes if process._owner == os.getpid() and not process._has_ended]
    for process in own:
        process.signal(signal.SIGKILL)
    _remaining(own, time.monotonic() + 1.0)
    for server in _servers.values():
        server.end()
