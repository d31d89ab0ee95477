"""One contestant, one workload of several processes: called by `benchmarks.measure` in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from statistics import median
from types import ModuleType

import psutil
import torch

from benchmarks.batch import check
from benchmarks.processes import stepping
from benchmarks.processes.parts import Collecting, Stepper, Weights
from benchmarks.processes.workloads import ProcessWorkload
from benchmarks.replay.measure import Clock, train_beside
from benchmarks.workloads import get_workload

WARM_UP_SECONDS = 0.5
CAPACITY = 100_000
LEAST_UPDATES = 20
BATCHES_TO_ARRIVE = 20
"""New weights must have come through within so many batches, those under way included."""


def measure(workload: ProcessWorkload, contestant: str, seconds: float) -> dict[str, float]:
    module = import_module(f"benchmarks.processes.contestants.{contestant}")
    if workload.one.name == "W6":
        get_workload("W6")  # registers the env
    return _KINDS[workload.kind](module, workload, seconds)


def _collect(module: ModuleType, workload: ProcessWorkload, seconds: float) -> dict[str, float]:
    started = time.perf_counter()
    made: Collecting = module.collect(workload)
    try:
        made.run()
        start = time.perf_counter() - started
        check(made.run, made.batch, made.joined)
        return {**_rate(made.run, seconds), "start_seconds": start}
    finally:
        made.run.close()


def _step(module: ModuleType, workload: ProcessWorkload, seconds: float) -> dict[str, float]:
    started = time.perf_counter()
    made: Stepper = module.stepper(workload)
    try:
        start = time.perf_counter() - started
        stepping.check(made, workload.workers)
        return {**_rate(stepping.endless(made, workload.workers), seconds), "start_seconds": start}
    finally:
        made.close()


def _rate(run: Callable[[], int], seconds: float) -> dict[str, float]:
    """Whole batches for about `seconds`, after a warm-up."""
    deadline = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < deadline:
        run()
    frames = 0
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    cpu = _cpu_seconds(processes)
    start = now = time.perf_counter()
    while now - start < seconds:
        frames += run()
        now = time.perf_counter()
    cpu = _cpu_seconds(processes) - cpu
    return {
        "frames_per_second": frames / (now - start),
        "frames_per_cpu_second": frames / max(cpu, 0.01),
        "frames": frames,
        "seconds": now - start,
        "cores_used": cpu / (now - start),
    }


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    """Of all of them so far; they count in hundredths."""
    times = [process.cpu_times() for process in processes]
    return sum(t.user + t.system for t in times)


def _background(module: ModuleType, workload: ProcessWorkload, seconds: float) -> dict[str, float]:
    rates = train_beside(module.background(CAPACITY), workload.pause_s, seconds, workload.workers, Clock())
    return {figure.key: rate for figure, rate in zip(workload.figures, rates, strict=True)}


def _start(module: ModuleType, workload: ProcessWorkload, seconds: float) -> dict[str, float]:
    """Twice in one process: whatever can be kept for the second one may be."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        made: Collecting = module.collect(workload)
        try:
            made.run()
            times.append(time.perf_counter() - started)
            check(made.run, made.batch, made.joined)
        finally:
            made.run.close()
    return {"first_seconds": times[0], "second_seconds": times[1]}


def _weights(module: ModuleType, workload: ProcessWorkload, seconds: float) -> dict[str, float]:
    figures = {}
    for key, sync in (("sync_ms", True), ("async_ms", False)):
        made: Weights = module.weights(replace(workload, sync=sync))
        try:
            _check_arrival(made)
            figures[key] = 1e3 * _update_seconds(made, seconds / 2)
        finally:
            made.close()
    return figures


def _check_arrival(made: Weights) -> None:
    """Each action in turn becomes the only one that the policy takes."""
    for wanted in (0, 1):
        with torch.no_grad():
            bias = list(made.net.parameters())[-1]
            bias.fill_(-1e3)
            bias[wanted] = 1e3
        made.update()
        for _ in range(BATCHES_TO_ARRIVE):
            if bool((made.actions() == wanted).all()):
                break
        else:
            raise ValueError("the new weights did not reach the workers")


def _update_seconds(made: Weights, seconds: float) -> float:
    """The median over updates of changed weights, a batch between two of them."""
    times: list[float] = []
    parameters = list(made.net.parameters())
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times) < LEAST_UPDATES:
        made.actions()
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(0.999)
        start = time.perf_counter()
        made.update()
        times.append(time.perf_counter() - start)
    return median(times)


_KINDS: dict[str, Callable[[ModuleType, ProcessWorkload, float], dict[str, float]]] = {
    "collect": _collect,
    "step": _step,
    "background": _background,
    "start": _start,
    "weights": _weights,
}
