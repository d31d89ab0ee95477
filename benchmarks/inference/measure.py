"""One contestant, one number of clients: called by `benchmarks.measure` in a process of its own."""

from __future__ import annotations

import multiprocessing
import threading
from importlib import import_module
from types import ModuleType

import numpy as np

from benchmarks.inference.asking import Serving, ask, ask_and_tell
from benchmarks.inference.workloads import InferenceWorkload

LONGEST_S = 150.0


def measure(workload: InferenceWorkload, contestant: str, seconds: float) -> dict[str, float]:
    module = import_module(f"benchmarks.inference.contestants.{contestant}")
    taken = _in_processes(module, workload, seconds) if workload.in_processes else _threads(module, workload, seconds)
    p50, p95 = np.percentile(taken, [50, 95]) * 1e3
    return {"requests_per_second": len(taken) / seconds, "p50_ms": float(p50), "p95_ms": float(p95)}


def _threads(module: ModuleType, workload: InferenceWorkload, seconds: float) -> list[float]:
    made: Serving = module.serving(workload)
    gate, taken, errors = threading.Barrier(workload.clients), list[float](), list[BaseException]()

    def run(number: int) -> None:
        try:
            taken.extend(ask(made.clients[number], number, seconds, gate))
        except BaseException as error:
            gate.abort()
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(workload.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_S)
    made.close()
    if errors:
        raise errors[0]
    return taken


def _in_processes(module: ModuleType, workload: InferenceWorkload, seconds: float) -> list[float]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.inference.asking", *module.PRELOADED])
    made: Serving = module.serving(workload)
    gate, results = context.Barrier(workload.clients), context.Queue()
    processes = [
        context.Process(target=ask_and_tell, args=(client, number, seconds, gate, results), daemon=True)
        for number, client in enumerate(made.clients)
    ]
    for process in processes:
        process.start()
    taken: list[float] = []
    try:
        for _ in processes:
            found = results.get(timeout=LONGEST_S)
            if isinstance(found, str):
                raise RuntimeError(found)
            taken.extend(found)
    finally:
        for process in processes:
            process.join(5)
            process.kill()
        made.close()
    return taken
