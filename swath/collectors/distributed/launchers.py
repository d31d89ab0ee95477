"""Launchers: how nodes get to where they run."""

# ruff: noqa: D102 - what the methods of nodes do is told in `wire`

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from swath.collectors.distributed.meeting import Invitation, Meeting
from swath.collectors.distributed.node import serve
from swath.collectors.distributed.remote_config import DistributedConfig
from swath.collectors.distributed.wire import NODE, TRAINER, Launch, Wire, WireKind
from swath.errors import ChannelClosedError
from swath.runtime.carrier import Stop
from swath.runtime.channel import Channel
from swath.runtime.child import Surroundings
from swath.runtime.process import Process, end_all, start

LOOK_S = 5.0
"""How often it is looked at the least whether a node that is waited for has ended."""
COME = 0.9
"""The part of `start_timeout_s` within which a node must have come: so the error tells that it was this."""


@dataclass(frozen=True)
class NodeProgram:
    """What the process of a node runs."""

    kind: WireKind

    def __call__(self, channel: Channel) -> None:
        """Be the node, to the end of the process."""
        serve(self.kind(channel, NODE))


# -- on this machine -----------------------------------------------------------------------------------------------


class NodeProcess:
    """A node in a process on this machine."""

    where = ""  # on this machine

    def __init__(self, process: Process, kind: WireKind) -> None:
        self._process, self._kind = process, kind

    def connect(self) -> Wire:
        return self._kind(self._process.channel, TRAINER)

    def pid(self) -> int:
        return self._process.pid

    def exitcode(self, timeout_s: float) -> int | None:
        self._process.wait(timeout_s)
        return self._process.exitcode

    def is_stopped(self) -> bool:
        return self._process.is_stopped

    def kill(self) -> None:
        self._process.signal(9)

    def end(self, timeout_s: float) -> None:
        end_all([self._process], Stop(), timeout_s)


# -- elsewhere -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launched:
    """What was started for a node elsewhere, as far as it can be seen from here."""

    describe: Callable[[], str]
    """What it is and how it is doing, in words."""
    exitcode: Callable[[float], int | None] = lambda timeout_s: None
    """How it has ended, if that becomes known in time."""
    kill: Callable[[], None] = lambda: None


class DistantNode:
    """A node that comes to the trainer's meeting by itself."""

    def __init__(self, kind: WireKind, surroundings: Surroundings, come_s: float) -> None:
        self.launched = Launched(lambda: "not started yet")
        self._kind, self._surroundings, self._come_s = kind, surroundings, come_s
        self._channel: Channel | None = None
        self._host, self._pid = "a machine that is not known yet", 0
        self._is_over, self._changed = False, threading.Event()

    def come(self, channel: Channel, host: str, pid: int) -> None:
        self._host, self._pid, self._channel = host, pid, channel
        self._changed.set()
        if self._is_over:
            channel.end()

    @property
    def where(self) -> str:
        return f"{self._host}, as {self.launched.describe()}"

    def connect(self) -> Wire:
        deadline, pause = time.monotonic() + self._come_s, 0.5
        while not self._changed.wait(min(pause, max(0.0, deadline - time.monotonic()))):
            if self.launched.exitcode(0.0) is not None:
                raise ChannelClosedError("It has never come to its trainer.")
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"No node has come within {self._come_s:.0f} s: it is {self.launched.describe()}. If it may take "
                    "longer, raise start_timeout_s=; if it cannot reach this machine, give another address=."
                )
            pause = min(LOOK_S, 2 * pause)
        if self._is_over or self._channel is None:
            raise ChannelClosedError("It is not waited for any more.")
        self._channel.send(self._surroundings)
        self._channel.send(NodeProgram(self._kind), by_value=True)
        return self._kind(self._channel, TRAINER)

    def pid(self) -> int:
        return self._pid

    def exitcode(self, timeout_s: float) -> int | None:
        return self.launched.exitcode(timeout_s)

    def is_stopped(self) -> bool:
        return False

    def kill(self) -> None:
        self._is_over = True
        self._changed.set()
        if self._channel is not None:
            self._channel.end()  # it is seen there, wherever that is
        self.launched.kill()

    def end(self, timeout_s: float) -> None:
        if self._channel is None or self.launched.exitcode(timeout_s) is None:
            self.kill()


Way = tuple[Meeting, Callable[[Invitation], Launched], Callable[[], None]]
"""Where nodes come to, what starts one of them, and what to do when there are no more."""


def by_command(run: Callable[[int, list[str]], subprocess.Popen[bytes]], invitation: Invitation) -> Launched:
    """A node that a user's function starts by a command, on another machine."""
    place = (invitation.address, invitation.port, invitation.index, invitation.generation)
    process = run(invitation.index, [sys.executable, "-m", __name__.rpartition(".")[0], *map(str, place)])
    if process.stdin is None:
        process.kill()
        raise ValueError("The function that is given as launcher= must start its process with stdin=subprocess.PIPE.")
    with suppress(BrokenPipeError):  # it has ended already, which will be seen
        process.stdin.write(invitation.secret.hex().encode() + b"\n")  # everybody can read command lines
        process.stdin.close()

    def exitcode(timeout_s: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        return process.poll()

    def kill() -> None:
        process.kill()
        exitcode(1.0)

    return Launched(lambda: f"what the command with pid {process.pid} on this machine has started", exitcode, kill)


def way_of(config: DistributedConfig) -> Way:
    """How nodes are started elsewhere."""
    from swath.collectors.distributed import ranks, slurm_jobs  # which know what is above

    if config.launcher == "torchrun":
        return ranks.become(config)
    address, port = config.address or socket.gethostbyname(socket.gethostname()), int(config.tcp_port or 0)
    if callable(run := config.launcher):
        return Meeting(address, port), lambda invitation: by_command(run, invitation), lambda: None
    if config.launcher == "submitit_delayed":
        return slurm_jobs.delayed(config.workers, address, port)
    return slurm_jobs.jobs(config.slurm_kwargs or {}, address, port)


def launcher(config: DistributedConfig, kind: WireKind) -> Launch:
    """How nodes are started whose wires are of that kind."""
    import swath

    threads, warns = config.num_sub_threads, not swath.filter_warnings_subprocess
    if config.launcher == "mp" or (config.launcher is None and not shutil.which("sbatch")):
        method = config.mp_start_method or "forkserver"
        options = (method, threads, warns, config.start_timeout_s)
        return Launch(lambda index: NodeProcess(start(NodeProgram(kind), *options), kind))
    meeting, begin, finish = way_of(config)
    surroundings = Surroundings({}, "", sys.path, sys.argv, b"", threads, warns, is_elsewhere=True)

    def launch(index: int) -> DistantNode:
        node = DistantNode(kind, surroundings, COME * config.start_timeout_s)
        node.launched = begin(meeting.expect(index, node.come))
        return node

    def close() -> None:
        meeting.close()
        finish()

    return Launch(launch, meeting.address, close)
