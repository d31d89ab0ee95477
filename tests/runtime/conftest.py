"""Carriers whose workers, and what they had open, must be gone after the test."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from children import is_gone
from jobs import until

from swath.runtime.process import start
from swath.runtime.processes import ProcessCarrier

Start = Callable[..., ProcessCarrier]


@pytest.fixture
def start_workers() -> Iterator[Start]:
    """Makes carriers with a worker for each task."""
    made: list[ProcessCarrier] = []
    pids: list[int] = []

    def carrier_of(*tasks: Any, workers: int = 0, **options: Any) -> ProcessCarrier:
        carrier = ProcessCarrier(max(workers, len(tasks)), **options)
        made.append(carrier)
        for index, task in enumerate(tasks):
            carrier.start(index, task)
            pids.append(carrier.pid(index))
        return carrier

    start(lambda channel: None).channel.close()  # the server stays
    time.sleep(0.1)
    before = len(os.listdir("/proc/self/fd"))
    yield carrier_of
    for carrier in made:
        carrier.shutdown(0.5)  # some of them sleep, and do not hear
    made.clear()
    until(lambda: all(map(is_gone, pids)), 5)
    assert len(os.listdir("/proc/self/fd")) <= before
