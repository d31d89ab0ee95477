"""Where the microseconds go: `python -m benchmarks.profile_loop W2 swath`.

cProfile charges every Python call but no C call's inside, so shares are a guide and the sum is too
high: the honest cost per frame is printed first, taken without the profiler.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import time
import warnings
from collections.abc import Callable

import torch

from benchmarks.contestants import build
from benchmarks.workloads import get_workload


def profile(workload_name: str, contestant: str, seconds: float, rows: int) -> None:
    run = build(contestant, get_workload(workload_name))
    _collect_for(run.collect, 0.5)
    frames, elapsed = _collect_for(run.collect, seconds)
    print(f"{workload_name} {contestant}: {elapsed / frames * 1e6:.2f} us per frame, unprofiled")

    profiler = cProfile.Profile()
    profiler.enable()
    frames, _ = _collect_for(run.collect, seconds)
    profiler.disable()
    run.close()
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    print(f"{'us/frame, own':>14s} {'with callees':>13s}  function (profiled, so all inflated)")
    for (file, line, name), entry in sorted(stats.items(), key=lambda item: -item[1][2])[:rows]:
        own, total = entry[2] / frames * 1e6, entry[3] / frames * 1e6
        print(f"{own:14.2f} {total:13.2f}  {name} ({os.path.basename(file)}:{line})")


def _collect_for(collect: Callable[[], int], seconds: float) -> tuple[int, float]:
    frames, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        frames += collect()
    return frames, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", nargs="?", default="W2")
    parser.add_argument("contestant", nargs="?", default="swath")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rows", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    profile(args.workload, args.contestant, args.seconds, args.rows)


if __name__ == "__main__":
    main()
