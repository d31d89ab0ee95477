"""One contestant, one workload of nodes: called by `benchmarks.measure` in a process of its own."""

from __future__ import annotations

import os
import secrets
import time
from itertools import count
from statistics import median

import torch

from benchmarks.batch import check
from benchmarks.contestants._tensordict import run_collector
from benchmarks.nodes import contestants
from benchmarks.nodes.contestants import NodeRun
from benchmarks.nodes.engine import engine
from benchmarks.nodes.workloads import STEPS, NodeWorkload

WARM_UP_SECONDS = 0.5
LEAST_UPDATES = 10
BATCHES_TO_ARRIVE = 20


def measure(workload: NodeWorkload, contestant: str, seconds: float) -> dict[str, float]:
    if workload.backend == "y":  # Ray reads it when it is imported, which contestants do at different times
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_USAGE_STATS_ENABLED="0")
    started = time.perf_counter()
    run: NodeRun = (engine if contestant == "engine" else getattr(contestants, contestant))(workload)
    try:
        if workload.kind == "weights":
            return _weights(run, seconds)
        run.prepare()
        run.batch()
        start = time.perf_counter() - started
        if workload.kind == "collect":
            assert run.net is not None
            tested = run_collector((run.batch() for _ in count()), run.net, run.close)
            check(tested, workload.whole, run.keeps_order or workload.workers == 1)
        elif contestant != "engine":
            _check_frames(run)
        elapsed, cpu = _rate(run, seconds)
        found = {"start_seconds": start, "trainer_ms": 1e3 * cpu / workload.workers, "ms_per_batch": 1e3 * elapsed}
        if workload.kind == "collect":
            return {**found, "frames_per_second": workload.whole.frames_per_batch / elapsed}
        rate = workload.megabytes * 2**20 / 1e6 / elapsed
        return {**found, "mb_per_second": rate, "bytes_per_frame": run.sent() / STEPS}
    finally:
        run.close()


def _rate(run: NodeRun, seconds: float) -> tuple[float, float]:
    """Seconds per batch, and those of this process's processor, after a warm-up."""
    batches, elapsed, cpu = 0, 0.0, 0.0
    begin, end = time.perf_counter() + WARM_UP_SECONDS, time.perf_counter() + WARM_UP_SECONDS + seconds
    while time.perf_counter() < end or not batches:
        run.prepare()
        start, busy = time.perf_counter(), time.process_time()
        run.batch()
        if start > begin:
            batches += 1
            elapsed += time.perf_counter() - start
            cpu += time.process_time() - busy
    return elapsed / batches, cpu / batches


def _check_frames(run: NodeRun) -> None:
    """Over two batches, each frame is the next step."""
    counted = []
    for _ in range(2):
        batch = run.batch()
        counted += [batch["observation"][..., 0].reshape(-1), batch["next", "observation"][..., 0].reshape(-1)]
    steps, following = torch.cat(counted[::2]), torch.cat(counted[1::2])
    if len(steps) != 2 * STEPS or bool((steps.diff() != 1).any()) or bool((following != steps + 1).any()):
        raise ValueError("frames are not what was asked for")


def _weights(run: NodeRun, seconds: float) -> dict[str, float]:
    """Medians over updates, each of which makes another action the only one that the policy takes."""
    assert run.net is not None
    bias, calls, arrivals = list(run.net.parameters())[-1], list[float](), list[float]()
    deadline, wanted = time.perf_counter() + seconds, 0
    while time.perf_counter() < deadline or len(calls) < LEAST_UPDATES:
        wanted = 1 - wanted
        with torch.no_grad():
            bias.fill_(-1e3)
            bias[wanted] = 1e3
        start = time.perf_counter()
        run.update()
        calls.append(time.perf_counter() - start)
        for _ in range(BATCHES_TO_ARRIVE):
            if bool((run.batch()["action"] == wanted).all()):
                break
        else:
            raise ValueError("the new weights did not reach the nodes")
        arrivals.append(time.perf_counter() - start)
    return {"call_ms": 1e3 * median(calls), "arrival_ms": 1e3 * median(arrivals)}
