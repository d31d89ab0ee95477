"""Every test of faults makes its collectors with `make`, and leaves no process, descriptor or name behind."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fault_tools import Make, build, descendants, is_gone, memory_names, open_descriptors, until

from swath.collectors import MultiCollector
from swath.runtime import process


@pytest.fixture(scope="session", autouse=True)
def _server() -> None:
    """The server that workers are forked from stays, and is nothing that a test has left behind."""
    build("sync").shutdown()


def servers() -> set[int]:
    return {server._popen.pid for server in process._servers.values()}


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    descriptors, names, threads = open_descriptors(), memory_names(), threading.active_count()
    known = servers()
    before = {pid for pid in descendants() if pid not in known}
    yield
    if open_descriptors() != descriptors:
        gc.collect()
    until(lambda: set(descendants()) <= before | servers(), 5)
    until(lambda: threading.active_count() <= threads, 5)
    if servers() == known:
        left = {sort: count for sort, count in open_descriptors().items() if count > descriptors.get(sort, 0)}
        assert not left, f"more descriptors are open than before: {left}, of {descriptors}"
    assert not {name for name in memory_names() - names if "swath" in name}


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes collectors by kind, and shuts them down after the test: their processes must be gone then."""
    made: list[MultiCollector] = []

    def of_kind(kind: str, *args: Any, **options: Any) -> MultiCollector:
        made.append(build(kind, *args, **options))
        return made[-1]

    yield of_kind
    for collector in made:
        pids = collector.worker_pids
        collector.shutdown(raise_on_error=False)
        until(lambda pids=pids: all(map(is_gone, pids)), 5)
    made.clear()
