"""Every test of faults makes its collectors with `make`, and leaves no process, descriptor or name behind."""

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from children import is_gone
from common import until
from fault_tools import build, descendants, memory_names, open_descriptors
from inside import server_pids
from kinds import SYNC, Kind, Make


@pytest.fixture(scope="session", autouse=True)
def _server() -> None:
    """The server that workers are forked from stays, and is nothing that a test has left behind."""
    build(SYNC).shutdown()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    descriptors, names, threads = open_descriptors(), memory_names(), threading.active_count()
    known = server_pids()
    before = {pid for pid in descendants() if pid not in known}

    def left() -> dict[str, int]:
        return {sort: count for sort, count in open_descriptors().items() if count > descriptors.get(sort, 0)}

    yield
    # Gloo waits for a node that was killed while they met, five times FORM_S, and cannot be stopped.
    until(lambda: not any(thread.name == "swath group" for thread in threading.enumerate()), 60)
    # What is left of the test, such as a buffer that prefetches, may be garbage.
    until(lambda: threading.active_count() <= threads or (gc.collect() and threading.active_count() <= threads), 5)
    until(lambda: set(descendants()) <= before | server_pids(), 5)
    if server_pids() == known and left():
        # What is left of the test may be garbage, and threads that were told to end may hold some of it until they do.
        until(lambda: gc.collect() >= 0 and not left(), 5)
    assert not {name for name in memory_names() - names if "swath" in name}


@pytest.fixture
def make(kind: Kind) -> Iterator[Make]:
    """Makes collectors of the kind, and shuts them down after the test: their processes must be gone then."""
    made: list[Any] = []

    def of_kind(*args: Any, **options: Any) -> Any:
        made.append(build(kind, *args, **options))
        return made[-1]

    yield of_kind
    for collector in made:
        pids = collector.worker_pids
        collector.shutdown(raise_on_error=False)
        until(lambda pids=pids: all(is_gone(pid) for pid in pids if pid != os.getpid()), 5)
    made.clear()
