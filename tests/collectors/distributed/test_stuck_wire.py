"""A wire whose receiving never ends, as Ray's may not where Ray is shut down meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from common import until

from swath.collectors.distributed import remote
from swath.collectors.distributed.remote import RemoteCarrier
from swath.collectors.distributed.wire import Launch
from swath.errors import ChannelClosedError
from swath.runtime.carrier import Ended


class StuckNode:
    """Both a node and the wire to it."""

    where = ""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def connect(self) -> Any:
        return self

    def send(self, *parcel: Any) -> None:
        raise ChannelClosedError("It was shut down.")

    def receive(self) -> bytes:
        self.may_end.wait()
        raise ChannelClosedError("It was shut down.")

    def exitcode(self, timeout_s: float) -> int | None:
        return None

    def is_stopped(self) -> bool:
        return False

    def pid(self) -> int:
        return 1

    def close(self) -> None:
        pass

    def end(self, timeout_s: float) -> None:
        pass

    kill = close


def test_the_end_of_a_node_is_told_although_receiving_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "STUCK_S", 0.3)
    node, told = StuckNode(), list[Any]()
    carrier = RemoteCarrier(1, (), Launch(lambda index: node), 60.0)  # type: ignore[arg-type]
    carrier.start(0, None)  # type: ignore[arg-type]
    until(lambda: told.extend(carrier.receive()) or told)
    assert [type(news) for _, news in told] == [Ended]
    node.may_end.set()
    carrier.shutdown(5.0)
    assert not carrier.receive(), "it is told once"
