"""One contestant, one workload, one process: `python -m benchmarks.measure W2 swath`.

Prints a single line of JSON. `run.py` starts it again for every figure, so that no contestant
inherits another's warm caches, memory, imports or settings.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings

WARM_UP_SECONDS = 0.5


def measure(workload_name: str, contestant: str, seconds: float) -> dict[str, float]:
    """The figures of one contestant, measured for about `seconds`."""
    import torch

    from benchmarks.cliffs.workloads import WORKLOADS as CLIFFS

    if workload_name in CLIFFS:  # with as many threads as users have
        from benchmarks.cliffs.measure import measure as measure_cliff

        return measure_cliff(CLIFFS[workload_name], contestant, seconds)
    torch.set_num_threads(1)
    from benchmarks.replay.workloads import WORKLOADS as REPLAYING

    if workload_name in REPLAYING:
        from benchmarks.replay.measure import measure as measure_replay

        return measure_replay(REPLAYING[workload_name], contestant, seconds)
    from benchmarks.processes.workloads import WORKLOADS as PROCESSES

    if workload_name in PROCESSES:
        from benchmarks.processes.measure import measure as measure_processes

        return measure_processes(PROCESSES[workload_name], contestant, seconds)
    from benchmarks.inference.workloads import WORKLOADS as INFERENCE

    if workload_name in INFERENCE:
        from benchmarks.inference.measure import measure as measure_inference

        return measure_inference(INFERENCE[workload_name], contestant, seconds)
    from benchmarks.pace.workloads import WORKLOADS as PACES

    if workload_name in PACES:
        from benchmarks.pace.measure import measure as measure_pace

        return measure_pace(PACES[workload_name], contestant, seconds)
    from benchmarks.nodes.workloads import WORKLOADS as NODES

    if workload_name in NODES:
        from benchmarks.nodes.measure import measure as measure_nodes

        return measure_nodes(NODES[workload_name], contestant, seconds)
    return _measure_collecting(workload_name, contestant, seconds)


def _measure_collecting(workload_name: str, contestant: str, seconds: float) -> dict[str, float]:
    """Build, check what is delivered, warm up, then collect whole batches for about `seconds`."""
    from benchmarks.batch import check
    from benchmarks.contestants import build
    from benchmarks.workloads import get_workload

    workload = get_workload(workload_name)
    started = time.perf_counter()
    run = build(contestant, workload)
    check(run, workload)
    ready = time.perf_counter() - started

    deadline = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < deadline:
        run()

    frames = 0
    cpu = time.process_time()
    start = now = time.perf_counter()
    while now - start < seconds:
        frames += run()
        now = time.perf_counter()
    elapsed, cpu = now - start, time.process_time() - cpu
    run.close()
    return {
        "frames_per_second": frames / elapsed,
        "frames": frames,
        "seconds": elapsed,
        # well below 1 on an in-process contestant: something else wanted the processor
        "cpu_share": cpu / elapsed,
        "seconds_until_ready": ready,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("contestant")
    parser.add_argument("--seconds", type=float, default=2.5)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # what a contestant warns of is not what is measured
    from benchmarks.figures import NotAvailableError

    try:
        result = measure(args.workload, args.contestant, args.seconds)
    except NotAvailableError as reason:
        print(json.dumps({"absent": str(reason)}))
        return
    except Exception as error:
        # the reason in one line for the table; the whole story on stderr for whoever looks into it
        print(json.dumps({"failed": _reason(error)}))
        raise
    print(json.dumps(result))


def _reason(error: Exception) -> str:
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"[:200]


if __name__ == "__main__":
    main()
