"""Everything that can be measured: each workload with its figures and those who take part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks import workloads
from benchmarks.cliffs import workloads as cliffs
from benchmarks.cliffs.contestants import CONTESTANTS as ON_CLIFFS
from benchmarks.contestants import CONTESTANTS as COLLECTING
from benchmarks.figures import FRAMES, Figure
from benchmarks.inference import workloads as inference
from benchmarks.inference.contestants import CONTESTANTS as SERVING
from benchmarks.nodes import workloads as nodes
from benchmarks.nodes.contestants import CONTESTANTS as ON_NODES
from benchmarks.pace import workloads as pace
from benchmarks.pace.contestants import CONTESTANTS as PACING
from benchmarks.processes import workloads as processes
from benchmarks.processes.contestants import CONTESTANTS as PROCESSING
from benchmarks.replay import workloads as replay
from benchmarks.replay.contestants import CONTESTANTS as REPLAYING


@dataclass(frozen=True)
class Entry:
    """One workload as the driver and the report see it."""

    heading: str
    figures: tuple[Figure, ...]
    contestants: tuple[str, ...]
    legend: Mapping[str, str]
    """What each contestant's name stands for in this workload."""
    suite: str = "single"
    """What it is run and published with: "single" is all that collects in one process."""
    family: str = ""
    """Workloads of one family share a table."""


CATALOG: dict[str, Entry] = {
    **{
        w.name: Entry(f"{w.title}, {w.frames_per_batch} frames per batch", (FRAMES,), tuple(COLLECTING), COLLECTING)
        for w in workloads.WORKLOADS.values()
    },
    **{w.name: Entry(w.title, w.figures, w.contestants, REPLAYING) for w in replay.WORKLOADS.values()},
    **{
        w.name: Entry(w.title, w.figures, w.contestants, PROCESSING, "processes", w.family)
        for w in processes.WORKLOADS.values()
    },
    **{
        w.name: Entry(w.title, w.figures, w.contestants, SERVING, "inference", w.family)
        for w in inference.WORKLOADS.values()
    },
    **{w.name: Entry(w.title, w.figures, w.contestants, PACING, "pace", w.family) for w in pace.WORKLOADS.values()},
    **{c.name: Entry(c.title, c.figures, c.contestants, ON_CLIFFS, "cliffs") for c in cliffs.WORKLOADS.values()},
    **{w.name: Entry(w.title, w.figures, w.contestants, ON_NODES, "nodes", w.family) for w in nodes.WORKLOADS.values()},
}

SUITES: dict[str, list[str]] = {
    suite: [name for name, entry in CATALOG.items() if entry.suite == suite]
    for suite in ("single", "processes", "inference", "pace", "nodes", "cliffs")
}
"""The workloads that are run together."""

CONTESTANTS: tuple[str, ...] = tuple(
    dict.fromkeys([*COLLECTING, *REPLAYING, *PROCESSING, *SERVING, *PACING, *ON_NODES, *ON_CLIFFS])
)
"""All names, in the order in which they take their turns."""
