"""The comparison: `python -m benchmarks.run`.

Every figure comes from a process of its own. Contestants take turns (A B C, A B C, ...), so that a
busy minute of the machine falls on all of them; a round measures everybody once, and a ratio is
taken within a round before the median is taken over rounds. Absolute rates depend on the machine,
ratios hardly.

There are five suites: `single`, which collects in one process, `processes`, `inference`, `pace` for envs at their
own pace, and `nodes`. A full run writes `RESULTS.md` and `results.json` beside this file, or `PROCESSES.md`,
`INFERENCE.md`, `PACE.md`, `NODES.md` and so on. A partial or quick one only writes where it is told to, so that it
cannot replace the published table by accident.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine, report
from benchmarks.catalog import CATALOG, CONTESTANTS, SUITES
from benchmarks.cliffs import page as cliffs_page
from benchmarks.group import run_group
from benchmarks.inference import page as inference_page
from benchmarks.nodes import page as nodes_page
from benchmarks.pace import page as pace_page
from benchmarks.processes import page
from benchmarks.results import Results

HERE = Path(__file__).resolve().parent
TIMEOUT = 180.0
"""Seconds for one figure, imports and warm-up included; longer is a failure with that reason."""
PAGES: dict[str, tuple[str, str, Callable[[Results], str]]] = {
    "single": ("results.json", "RESULTS.md", report.markdown),
    "processes": ("processes.json", "PROCESSES.md", page.markdown),
    "inference": ("inference.json", "INFERENCE.md", inference_page.markdown),
    "pace": ("pace.json", "PACE.md", pace_page.markdown),
    "nodes": ("nodes.json", "NODES.md", nodes_page.markdown),
    "cliffs": ("cliffs.json", "CLIFFS.md", cliffs_page.markdown),
}
"""Where each suite is published, and by what."""


@dataclass(frozen=True)
class Plan:
    """What to run."""

    workloads: list[str]
    contestants: list[str]
    rounds: int
    seconds: float

    @property
    def turns(self) -> list[tuple[str, str]]:
        """One round: each workload with those of the contestants that take part in it."""
        return [(w, c) for w in self.workloads for c in CATALOG[w].contestants if c in self.contestants]

    @property
    def suite(self) -> str | None:
        """The suite that this is all of, if any."""
        whole = len(self.contestants) == len(CONTESTANTS)
        return next((suite for suite, names in SUITES.items() if whole and self.workloads == names), None)


def run(plan: Plan) -> Results:
    """All rounds; one line of progress per figure."""
    results = Results(machine.facts(), plan.rounds, plan.seconds)
    total = plan.rounds * len(plan.turns)
    done, started = 0, time.monotonic()
    for round_ in range(plan.rounds):
        for workload, contestant in plan.turns:
            done += 1
            # several processes wait for each other, so their own time does not tell whether they were disturbed
            busy = machine.busy_share() if CATALOG[workload].suite != "single" else None
            outcome = {**_measure(workload, contestant, plan.seconds), "busy_before": busy}
            results.add(workload, contestant, outcome)
            left = (time.monotonic() - started) / done * (total - done)
            print(
                f"[{done}/{total}, {left / 60:.0f} min left] round {round_ + 1} "
                f"{workload} {contestant:13s} {_short(workload, outcome)}",
                file=sys.stderr,
                flush=True,
            )
    return results


def _measure(workload: str, contestant: str, seconds: float) -> dict[str, Any]:
    """One figure from a fresh process; whatever goes wrong becomes `{"failed": reason}`."""
    command = [sys.executable, "-m", "benchmarks.measure", workload, contestant]
    try:
        finished = run_group(
            [*command, "--seconds", str(seconds)],
            env={name: value for name, value in os.environ.items() if name not in machine.THREAD_VARIABLES},
            cwd=HERE.parent,
            timeout=TIMEOUT + seconds,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {TIMEOUT + seconds:.0f} s"}
    for line in reversed(finished.stdout.splitlines()):
        if line.startswith("{"):  # the last such line: a library may print lines of its own
            outcome: dict[str, Any] = json.loads(line)
            if finished.returncode and "failed" not in outcome:
                break  # it measured and then crashed: a figure from a broken run is no figure
            return outcome
    last = (finished.stderr.strip().splitlines() or ["no output"])[-1]
    return {"failed": f"ended with code {finished.returncode}: {last[:200]}"}


def _short(workload: str, outcome: dict[str, Any]) -> str:
    if "absent" in outcome:
        return str(outcome["absent"])
    if "failed" in outcome:
        return f"FAILED: {outcome['failed']}"
    return ", ".join(f"{f.show(outcome[f.key]):>10s} {f.heading}" for f in CATALOG[workload].figures)


def _names(known: Collection[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} not known; there are {', '.join(known)}")
        return names

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--suite", choices=SUITES, default="single", help="all workloads of one kind")
    add("--workloads", type=_names(CATALOG), metavar="W1,W2", help="only these, of whichever suite")
    add("--contestants", type=_names(CONTESTANTS), default=list(CONTESTANTS), metavar="A,B")
    add("--rounds", type=int, default=5)
    add("--seconds", type=float, default=2.5, help="measured time per figure")
    add("--quick", action="store_true", help="2 rounds of 1 s: a look, not a result")
    add("--json", type=Path, help="where to write the figures")
    add("--markdown", type=Path, help="where to write the table")
    args = parser.parse_args()
    rounds, seconds = (2, 1.0) if args.quick else (args.rounds, args.seconds)
    plan = Plan(args.workloads or SUITES[args.suite], args.contestants, rounds, seconds)

    results = run(plan)
    json_name, markdown_name, markdown = PAGES[CATALOG[plan.workloads[0]].suite]
    table = markdown(results)
    print(table)
    publish = plan.suite and not args.quick
    json_path = args.json or (HERE / json_name if publish else None)
    markdown_path = args.markdown or (HERE / markdown_name if publish else None)
    if json_path:
        json_path.write_text(json.dumps(results.as_json(), indent=1) + "\n")
    if markdown_path:
        markdown_path.write_text(table)


if __name__ == "__main__":
    main()
