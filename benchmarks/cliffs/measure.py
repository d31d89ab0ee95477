"""One contestant, one cliff: called by `benchmarks.measure` in a process of its own."""

from __future__ import annotations

import multiprocessing
import time

from benchmarks.cliffs import contestants
from benchmarks.cliffs.workloads import Cliff

WARM_UP_SECONDS = 1.0


def _keep_busy() -> None:
    while True:
        pass


def measure(cliff: Cliff, contestant: str, seconds: float) -> dict[str, float]:
    """Collect for about `seconds`, with torch's own number of threads."""
    run = getattr(contestants, contestant)(cliff)
    beside = multiprocessing.get_context("spawn").Process(target=_keep_busy, daemon=True)
    if cliff.is_busy:
        beside.start()
    try:
        deadline = time.perf_counter() + WARM_UP_SECONDS
        while time.perf_counter() < deadline:
            run()
        frames, start = 0, time.perf_counter()
        while (now := time.perf_counter()) - start < seconds:
            frames += run()
        return {"frames_per_second": frames / (now - start), "frames": frames, "seconds": now - start}
    finally:
        if cliff.is_busy:
            beside.kill()
        run.close()
