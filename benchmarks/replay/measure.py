"""One contestant, one W9 workload: called by `benchmarks.measure` in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import numpy as np

from benchmarks.replay import frames, peer_tree
from benchmarks.replay.parts import Background
from benchmarks.replay.workloads import BATCH, ROWS, ReplayWorkload

WARM_UP_SECONDS = 0.5
FIRST_FRAMES = 2_000
"""Collected before the trainer begins; then everybody has compiled and allocated what it needs."""
READY_SECONDS = 120.0


def measure(workload: ReplayWorkload, contestant: str, seconds: float) -> dict[str, float]:
    if workload.kind == "prioritized":
        peer_tree.offer()
    module = import_module(f"benchmarks.replay.contestants.{contestant}")
    started = time.perf_counter()
    clock = Clock()
    rates = _KINDS[workload.kind](module, workload, seconds, clock)
    named = {figure.key: rate for figure, rate in zip(workload.figures, rates, strict=True)}
    return {**named, "cpu_share": clock.cpu / clock.wall, "seconds": time.perf_counter() - started}


class Clock:
    """Adds up the time that was measured, and how much of a processor the process had meanwhile."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def time(self, work: Callable[[], None]) -> float:
        """The seconds that `work` takes."""
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        elapsed = time.perf_counter() - wall
        self.wall += elapsed
        self.cpu += time.process_time() - cpu
        return elapsed


def _background(module: ModuleType, workload: ReplayWorkload, seconds: float, clock: Clock) -> list[float]:
    (capacity,) = workload.capacities
    return train_beside(module.background(capacity), workload.pause_s, seconds, 1, clock)


def train_beside(run: Background, pause_s: float, seconds: float, writers: int, clock: Clock) -> list[float]:
    """Frames collected and batches sampled per second, while `writers` of them collect."""
    run.start()
    try:
        _wait_for_frames(run)
        _check_count(run, writers)
        _check_collected(run)
        _train(run, pause_s, WARM_UP_SECONDS)
        collected, batches = run.frames(), [0]

        def work() -> None:
            batches[0] = _train(run, pause_s, seconds)

        elapsed = clock.time(work)
        return [(run.frames() - collected) / elapsed, batches[0] / elapsed]
    finally:
        run.stop()


def _wait_for_frames(run: Background) -> None:
    deadline = time.perf_counter() + READY_SECONDS
    while run.frames() < FIRST_FRAMES:
        if time.perf_counter() > deadline:
            raise TimeoutError(f"{run.frames()} frames collected in {READY_SECONDS:.0f} s")
        run.between(0.01)


def _check_count(run: Background, writers: int) -> None:
    """What a contestant says that it has collected is what is in its buffer, batches under way apart."""
    before, held, after = run.frames(), run.held(), run.frames()
    if not before - writers * ROWS <= held <= after + writers * ROWS:
        raise ValueError(f"{before} to {after} frames were counted, and the buffer holds {held}")


def _check_collected(run: Background) -> None:
    """CartPole moves its cart by a fiftieth of its speed: true of whole frames only."""
    content = run.content(run.sample())
    seen, coming = (np.asarray(content[key]) for key in ("observation", "next_observation"))
    if seen.shape != (BATCH, 4):
        raise ValueError(f"sampled observations are {seen.shape}, expected {(BATCH, 4)}")
    if not np.allclose(coming[:, 0], seen[:, 0] + 0.02 * seen[:, 1], atol=1e-5):
        raise ValueError("observation and next observation are not of one step")


def _train(run: Background, pause_s: float, seconds: float) -> int:
    """Take batches when they are due; one that is late does not make the next ones come faster."""
    start = now = due = time.perf_counter()
    batches = 0
    while now - start < seconds:
        run.between(due - now)
        run.sample()
        batches += 1
        now = time.perf_counter()
        due = max(due + pause_s, now - pause_s)
    return batches


def _buffer(module: ModuleType, workload: ReplayWorkload, seconds: float, clock: Clock) -> list[float]:
    (capacity,) = workload.capacities
    buffer = module.buffer(capacity, workload.pixels)
    frames.check(buffer.content(buffer.sample()))
    share = seconds / len(workload.operations)
    per_frame = frames.observed_bytes(frames.make(1, True)) / 1e9 if workload.pixels else 1
    rates = []
    for operation in workload.operations:
        call, size = (buffer.extend, ROWS) if operation == "extend" else (buffer.sample, BATCH)
        rates.append(_repeat(call, share, clock) * size * per_frame)
    frames.check(buffer.content(buffer.sample()))
    return rates


def _prioritized(module: ModuleType, workload: ReplayWorkload, seconds: float, clock: Clock) -> list[float]:
    rates = []
    for capacity in workload.capacities:
        run = module.prioritized(capacity)
        if run.content is not None:
            frames.check(run.content(run.turn()))
        rates.append(_repeat(run.turn, seconds / len(workload.capacities), clock) * BATCH)
    return rates


def _repeat(call: Callable[[], object], seconds: float, clock: Clock) -> float:
    """Calls per second."""
    _calls(call, WARM_UP_SECONDS)
    count = [0]

    def work() -> None:
        count[0] = _calls(call, seconds)

    elapsed = clock.time(work)
    return count[0] / elapsed


def _calls(call: Callable[[], object], seconds: float) -> int:
    deadline = time.perf_counter() + seconds
    count = 0
    while time.perf_counter() < deadline:
        call()
        count += 1
    return count


_KINDS: dict[str, Callable[[ModuleType, ReplayWorkload, float, Clock], list[float]]] = {
    "background": _background,
    "buffer": _buffer,
    "prioritized": _prioritized,
}
