"""One contestant, one workload of envs at their own pace: called by `benchmarks.measure` in a process of its own."""

from __future__ import annotations

import time

from benchmarks.pace import contestants
from benchmarks.pace.contestants import PaceRun
from benchmarks.pace.workloads import PaceWorkload

WARM_UP_SECONDS = 0.5


def measure(workload: PaceWorkload, contestant: str, seconds: float) -> dict[str, float]:
    """Check what is delivered, warm up, then collect whole batches for about `seconds`."""
    run: PaceRun = getattr(contestants, contestant)(workload)
    try:
        _check(run, workload)
        deadline = time.perf_counter() + WARM_UP_SECONDS
        while time.perf_counter() < deadline:
            run.batch()
        frames = 0
        start = now = time.perf_counter()
        while now - start < seconds:
            frames += len(run.batch()[0])
            now = time.perf_counter()
        rate = frames / (now - start)
        found = {"frames_per_second": rate, "frames": frames, "seconds": now - start, "batch_fill": run.fill()}
        return found if workload.limit is None else {**found, "share_of_limit": rate / workload.limit}
    finally:
        run.close()


def _check(run: PaceRun, workload: PaceWorkload) -> None:
    """Over two batches, the steps of each env follow each other, as far as a contestant delivers them in order."""
    last: dict[int, float] = {}
    for _ in range(2):
        observations, lanes = run.batch()
        if len(observations) < workload.frames_per_batch:
            raise ValueError(f"a batch of {len(observations)} frames, not of {workload.frames_per_batch}")
        for lane, step in zip(lanes.tolist(), observations[:, 1].tolist(), strict=True):
            if lane in last and step not in (last[lane] + 1, 0.0):
                raise ValueError(f"step {step:.0f} of env {lane:.0f} came after step {last[lane]:.0f}")
            last[lane] = step
    if len(last) < workload.envs / 2:
        raise ValueError(f"frames of {len(last)} of {workload.envs} envs only")
