"""Which of the peer's settings is fastest: `python -m benchmarks.peer_settings W2`.

All variants of `contestants/_peer.py` (for W4 and W6m, those of `processes/contestants/_peer.py`)
live in one process here and take turns batch by batch, which is less strict than `run.py` but compares
close cousins under the same minute of the machine. A variant that does not deliver the agreed content
is shown with the reason and cannot win. Not for async workers, which would work in others' turns.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.batch import Run, check
from benchmarks.catalog import CATALOG
from benchmarks.contestants._peer import build_variant, variants
from benchmarks.processes.contestants import _peer as processes
from benchmarks.processes.parts import Collecting
from benchmarks.processes.workloads import WORKLOADS as PROCESSES
from benchmarks.results import Spread
from benchmarks.workloads import WORKLOADS, get_workload

Builder = Callable[[], Collecting]


def builders(name: str) -> dict[str, Builder]:
    """All variants for the workload of that name."""
    if name in PROCESSES:
        several = PROCESSES[name]
        return {key: partial(processes.collect, several, *how) for key, how in processes.VARIANTS.items()}
    one = get_workload(name)
    return {key: lambda key=key: Collecting(build_variant(one, key), one) for key in variants(one)}


def compare(title: str, made: dict[str, Builder], rounds: int) -> None:
    runs: dict[str, Run] = {}
    flaws: dict[str, str] = {}
    for name, build in made.items():
        try:
            collecting = build()
            runs[name] = collecting.run
            check(collecting.run, collecting.batch, collecting.joined)
        except Exception as error:
            flaws[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            if name in runs:
                runs.pop(name).close()
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            frames = run()
            rates[name].append(frames / (time.perf_counter() - start))
    for run in runs.values():
        run.close()
    print(title)
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
    get_workload("W6")  # registers the pixel env
    for name in args.workloads:
        made = builders(name)
        chosen = {key: build for key, build in made.items() if not args.only or any(part in key for part in args.only)}
        compare(f"{name}: {CATALOG[name].heading}", chosen, args.rounds)


if __name__ == "__main__":
    main()
