"""The results of collectors with nodes as a page."""

from __future__ import annotations

from statistics import median

from benchmarks import report
from benchmarks.figures import FRAMES, Figure
from benchmarks.nodes.workloads import BACKENDS, BATCH_MS, MEGABYTES, TRAINER_MS, WORKLOADS
from benchmarks.results import Results

TITLE = "Many machines, measured on one"

CHECKED = """A ratio above 1 means
that swath is the faster one, of times as well. Batches of W15 are checked as those of one process are, W16's frames
must follow each other, and in W17 each update makes another action the only one, which is waited for. "Workers" are
nodes, and in W16 megabytes per batch. Trainer and nodes share the cores of one machine and its loopback device: what a
network adds is not in these figures.

`make bench BENCH_ARGS="--suite nodes"` measures all of it again."""

CARRYING = """## What carrying a batch costs

W16's batches: swath's time beyond that of collecting the same in this process, and the bare transfer of as many bytes.

| carried by | MB | ms beyond collecting | ms of the bare transfer | ratio |
|---|---:|---:|---:|---:|"""

REACH = """## How far one trainer goes

All batches end in one process. What they cost there, of its processor, is the limit that more nodes do not raise; the
rest of the machine, and of the core if it also trains, is not counted. Computed from the figures above:
"""
LINK_GB = 1.25
"""Per second, over a link of 10 Gbit/s."""


def markdown(results: Results) -> str:
    return "\n".join([report.markdown(results, TITLE, CHECKED), *_carrying(results), "", *_reach(results)]) + "\n"


def _rounds(results: Results, workload: str, contestant: str, figure: Figure) -> list[float | None]:
    series = results.series.get(workload, {}).get(contestant)
    return series.rates[figure.key] if series else []


def _median(results: Results, workload: str, figure: Figure) -> float | None:
    known = [value for value in _rounds(results, workload, "swath", figure) if value]
    return median(known) if known else None


def _carrying(results: Results) -> list[str]:
    lines = []
    for backend, name in BACKENDS.items():
        for megabytes in MEGABYTES:
            three = ("swath", "swath_here", "engine")
            sides = [_rounds(results, f"W16{backend}x{megabytes}", each, BATCH_MS) for each in three]
            rounds = [(own - here, bare) for own, here, bare in zip(*sides, strict=True) if own and here and bare]
            if rounds:
                beyond, bare = median(own for own, _ in rounds), median(bare for _, bare in rounds)
                ratio = median(own / bare for own, bare in rounds)
                lines.append(f"| {name} | {megabytes} | {beyond:.2f} | {bare:.2f} | {ratio:.2f} |")
    return [CARRYING, *lines] if lines else []


def _reach(results: Results) -> list[str]:
    lines = []
    for backend, name in BACKENDS.items():
        small = _median(results, f"W15{backend}x2", TRAINER_MS)
        large = _median(results, f"W16{backend}x16", TRAINER_MS)
        one = _median(results, f"W15{backend}x1", FRAMES)
        if not small or not large or not one:
            continue
        frames = WORKLOADS[f"W15{backend}x1"].one.frames_per_batch
        parts, gigabytes = 1e3 / small, 16 * 2**20 / 1e6 / large
        first = "the link is full first" if gigabytes > LINK_GB else "the core is busy first"
        lines.append(
            f"- {name}: a part of {frames} CartPole frames takes {small:.2f} ms of a core, so that one core takes "
            f"{parts:,.0f} of them per second: {parts * frames:,.0f} frames, {parts * frames / one:.0f} times what one "
            f"node makes here. 16 MB take {large:.1f} ms, which is {gigabytes:.1f} GB/s; over a network of 10 Gbit/s "
            f"({LINK_GB} GB/s) {first}."
        )
    return [REACH, *lines] if lines else []
