"""Which of the peer's settings is fastest: `python -m benchmarks.peer_settings W2`.

All variants of `contestants/_peer.py` live in one process here and take turns batch by batch, which
is less strict than `run.py` but compares close cousins under the same minute of the machine. A
variant that does not deliver the agreed content is shown with the reason and cannot win.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings

from benchmarks.machine import THREAD_VARIABLES

os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))  # before torch is imported

import torch

from benchmarks.batch import Run, check
from benchmarks.contestants._peer import build_variant, variants
from benchmarks.results import Spread
from benchmarks.workloads import WORKLOADS, Workload, get_workload


def compare(workload: Workload, rounds: int, only: list[str]) -> None:
    runs: dict[str, Run] = {}
    flaws: dict[str, str] = {}
    for name in variants(workload):
        if only and not any(part in name for part in only):
            continue
        try:
            runs[name] = build_variant(workload, name)
            check(runs[name], workload)
        except Exception as error:
            flaws[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            runs.pop(name, None)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            frames = run()
            rates[name].append(frames / (time.perf_counter() - start))
    for run in runs.values():
        run.close()
    print(f"{workload.name}: {workload.title}")
    for name, values in sorted(rates.items(), key=lambda item: -sum(item[1])):
        spread = Spread.of(values)
        if spread:
            print(f"  {name:28s} {spread.median:8,.0f} ({spread.low:,.0f} to {spread.high:,.0f})")
    for name, flaw in flaws.items():
        print(f"  {name:28s} out: {flaw}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=9, help="batches per variant")
    parser.add_argument("--only", nargs="*", default=[], help="variants whose name contains this")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in args.workloads:
        compare(get_workload(name), args.rounds, args.only)


if __name__ == "__main__":
    main()
