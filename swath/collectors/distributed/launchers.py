"""Launchers: how nodes get to where they run."""

from __future__ import annotations

from dataclasses import dataclass

from swath.collectors.distributed.node import serve
from swath.collectors.distributed.remote_config import DistributedConfig
from swath.collectors.distributed.wire import Launch, Meeting, Wire
from swath.runtime.carrier import Stop
from swath.runtime.channel import Channel
from swath.runtime.process import Process, end_all, start

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class LocalNode:
    """What the process of a node on this machine runs."""

    meeting: Meeting

    def __call__(self, channel: Channel) -> None:
        """Be the node, to the end of the process."""
        serve(self.meeting.of_node(channel, LOOPBACK))


class NodeProcess:
    """A node in a process on this machine."""

    where = ""  # on this machine

    def __init__(self, process: Process, meeting: Meeting) -> None:
        self._process, self._meeting = process, meeting

    def connect(self) -> Wire:  # noqa: D102 - see `Node`
        return self._meeting.of_trainer(self._process.channel, LOOPBACK)

    def pid(self) -> int:  # noqa: D102 - see `Node`
        return self._process.pid

    def exitcode(self, timeout_s: float) -> int | None:  # noqa: D102 - see `Node`
        self._process.wait(timeout_s)
        return self._process.exitcode

    def is_stopped(self) -> bool:  # noqa: D102 - see `Node`
        return self._process.is_stopped

    def kill(self) -> None:  # noqa: D102 - see `Node`
        self._process.signal(9)

    def end(self, timeout_s: float) -> None:  # noqa: D102 - see `Node`
        end_all([self._process], Stop(), timeout_s)


def launcher(config: DistributedConfig, meeting: Meeting) -> Launch:
    """How nodes are started."""
    import swath

    method, warns = config.mp_start_method or "forkserver", not swath.filter_warnings_subprocess

    def launch(index: int) -> NodeProcess:
        return NodeProcess(start(LocalNode(meeting), method, config.num_sub_threads, warns), meeting)

    return launch
