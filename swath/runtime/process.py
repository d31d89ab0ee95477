"""Starting worker processes, and ending them.

NOTE [Shutdown]: a worker is asked to end through its channel. One that does not end in time is terminated, and one that
does not even then is killed: the three steps together have a deadline, whatever the worker does. A worker that is
stopped (SIGSTOP) hears nothing, so that for it the first two steps are left out. Ending twice is harmless. What nobody
has ended is ended when the interpreter exits, and what the interpreter could not end, because it was killed, the system
does: see NOTE [Processes] and NOTE [Kin].

NOTE [Forks of the user's process]: a child that is forked there while another thread starts a worker would find a lock
that nobody releases, and would keep descriptors by which both sides tell that the other has ended. So a fork waits
until nothing is half started, which takes milliseconds. The child begins without servers and workers.
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
import warnings
import weakref
from collections.abc import Iterable
from multiprocessing import connection
from typing import Any

from swath.errors import ChannelClosedError
from swath.runtime import kin
from swath.runtime import server as server_module
from swath.runtime.channel import Channel, pack
from swath.runtime.child import Surroundings, Target, leave_behind, run
from swath.runtime.descriptors import Descriptor
from swath.runtime.interrupts import Section, undisturbed
from swath.runtime.liveness import state_of, watch

METHODS = ("forkserver", "spawn", "fork")
PRELOADED = ("swath.collectors",)
"""What workers need, and what takes seconds to import: named, not imported, as it stands above us."""
START_S = 300.0
"""How long a server may take to import torch, on a loaded machine, and a worker to be forked."""
ASK, TERMINATE = 0.6, 0.8
"""Up to which part of the time for shutting down workers are asked, and terminated; then they are killed."""


class Process:
    """A worker process, seen from the one that has started it. When it ends, its `sentinel` becomes readable."""

    def __init__(self, pid: int, channel: Channel, sentinel: Descriptor, *, is_own_child: bool) -> None:
        self.pid = pid
        self.channel = channel
        self._sentinel = sentinel
        self.exitcode: int | None = None
        self._has_ended = False
        self._is_own_child = is_own_child
        self._owner = os.getpid()
        self._asking = Section()
        _processes.add(self)

    @property
    def sentinel(self) -> int:
        """For `poll`; -1 once it is known how the process has ended."""
        return self._sentinel.fd

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
        sentinel = self.sentinel
        if sentinel >= 0 and not connection.wait([sentinel], timeout_s):  # else another thread has waited
            return False
        with self._asking:
            if not self._has_ended:  # another thread may have asked too
                self.exitcode = self._status()
                self._has_ended = True
                self._sentinel.release()
                if self._is_own_child or self.exitcode is None:  # otherwise its server has seen to that
                    with contextlib.suppress(OSError):
                        os.killpg(self.pid, signal.SIGKILL)
        return True

    def _status(self) -> int | None:
        if self._is_own_child:
            try:
                return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:  # somebody else has asked
                return None
        return _told(self._sentinel)

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended. A child of ours is killed together with what stems from it."""
        if self.is_alive:
            also = kin.descendants_of([self.pid]) if self._is_own_child and number == signal.SIGKILL else []
            for pid in (self.pid, *also):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def start(
    target: Target,
    method: str = "forkserver",
    threads: int = 1,
    warns_itself: bool = False,
    timeout_s: float = START_S,
) -> Process:
    """A process that runs `target` with its end of a channel, within `timeout_s` for its server to be ready.

    Both ends are closed with their processes.
    """
    packed = pack(target, by_value=True)  # first: if that cannot be, nothing is started
    if method not in METHODS:
        raise ValueError(f"The start method must be one of {METHODS}, got {method!r}.")
    if method == "fork" and threads > 1 and _may_have_used_openmp():
        warnings.warn(
            "A fork of a process that has used OpenMP waits for ever where it uses several threads. Workers have one "
            f"thread for torch, not {threads}: to give them more, leave mp_start_method at 'forkserver'.",
            stacklevel=2,
        )
        threads = 1
    process = _forked() if method == "fork" else _served(method, time.monotonic() + timeout_s, timeout_s)
    authkey = bytes(multiprocessing.current_process().authkey)
    surroundings = Surroundings(
        dict(os.environ), _here(), list(sys.path), list(sys.argv), authkey, threads, warns_itself
    )
    with contextlib.suppress(ChannelClosedError):  # whoever waits for its answer will see that it has ended
        process.channel.send(surroundings)
        process.channel.send_packed(packed)
    return process


def _may_have_used_openmp() -> bool:
    """Whether there are threads here that Python has not made; to whom they belong the system does not tell."""
    import torch

    try:
        return torch.get_num_threads() > 1 and len(os.listdir("/proc/self/task")) > threading.active_count()
    except OSError:
        return torch.get_num_threads() > 1


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # a directory that was removed
        return ""


def _served(method: str, deadline: float, timeout_s: float) -> Process:
    with _starting:  # see NOTE [Forks of the user's process]
        channel, end = Channel.pair()
        sentinel, status = map(Descriptor, os.pipe())
        try:
            server = _server(method)
            server.request(server_module.EXEC if method == "spawn" else server_module.FORK, [end.fileno(), status.fd])
        finally:
            end.close()
            status.release()
    if not connection.wait([sentinel.fd], max(0.0, deadline - time.monotonic())):
        sentinel.release()
        raise TimeoutError(
            f"The server that starts worker processes has not answered within start_timeout_s={timeout_s:g} s: it "
            "imports torch and swath first, and is slow in that, or it is stopped."
        )
    pid = _told(sentinel)
    if pid is None:
        was_killed = server.end() < 0
        if was_killed or server.has_served:  # perhaps for want of memory: another may fare better
            return _served(method, deadline, timeout_s)
        raise RuntimeError("The server that starts worker processes has ended: what it wrote to stderr tells why.")
    server.has_served = True
    if pid < 0:
        raise OSError(-pid, f"No worker process could be started: {os.strerror(-pid)}.")
    return Process(pid, channel, sentinel, is_own_child=False)


def _told(sentinel: Descriptor) -> int | None:
    """The next thing that a server tells of a worker; None if it has ended."""
    told = os.read(sentinel.fd, server_module.STATUS.size)
    return int(server_module.STATUS.unpack(told)[0]) if len(told) == server_module.STATUS.size else None


def _forked() -> Process:
    """A fork of this very process, with all that it has: for those who want that."""
    is_main = threading.current_thread() is threading.main_thread()
    parent = os.getpid()
    with _starting:
        channel, end = Channel.pair()
        sentinel, held = map(Descriptor, os.pipe())
        pid = os.fork()
        if pid:
            end.close()
            held.release()
    if not pid:
        try:
            # The system watches the thread that forks; others may end before the process does.
            leave_behind(parent if is_main else None)
            os.register_at_fork(after_in_child=held.release)
            run(end)
        finally:
            os._exit(1)
    with contextlib.suppress(OSError):  # where the system has no such thing, the pipe must do, whose end it holds
        sentinel = Descriptor(watch(pid))
    return Process(pid, channel, sentinel, is_own_child=True)


class _Server:
    """The server's handle: see NOTE [Processes]."""

    has_served = False

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
            cwd=None if _here() else "/",
            start_new_session=True,  # signals for the group of this process are not for it
        )
        theirs.close()

    def is_usable(self) -> bool:
        return self._owner == os.getpid() and self._popen.poll() is None and self._control.fileno() >= 0

    def request(self, kind: bytes, fds: list[int]) -> None:
        """Ask for a worker; the pipe for its status, among `fds`, tells whether the server has answered."""
        streams = [_stream(1), _stream(2)]
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._control, [kind], [*fds, *streams])
        for fd in streams:
            os.close(fd)

    def end(self) -> int:
        """Let it see that nobody is there any more, and wait; how it has ended.

        One that does not listen yet has no workers.
        """
        self.close()
        if not self.has_served:
            self._popen.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._popen.wait(1.0)
        return 0

    def close(self) -> None:
        self._control.close()


def _stream(fd: int) -> int:
    """A copy of stdout or stderr; of nothing, where it is closed."""
    try:
        return os.dup(fd)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


_servers: dict[str, _Server] = {}
_starting = threading.RLock()


def _server(method: str) -> _Server:
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
        connection.wait([fd for process in alive if (fd := process.sentinel) >= 0], min(left, 0.25))
        alive = [process for process in alive if process.is_alive]
    return alive


_processes: weakref.WeakSet[Process] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child has no part in its parent's workers."""
    for server in _servers.values():
        server.close()
    _servers.clear()
    _starting.release()


def _before_fork() -> None:
    undisturbed.__enter__()  # a handler that came in between would wait for a thread that waits for us
    _starting.acquire()


def _after_fork() -> None:
    _starting.release()
    undisturbed.__exit__()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forget_in_child)


@atexit.register
def _end_forgotten() -> None:
    """What nobody has ended by the time the interpreter exits."""
    own = [process for process in _processes if process._owner == os.getpid() and not process._has_ended]
    for process in own:
        process.signal(signal.SIGKILL)
    _remaining(own, time.monotonic() + 1.0)
    for server in _servers.values():
        server.end()
