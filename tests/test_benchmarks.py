"""The benchmarks' own check: what swath delivers there is what everybody must deliver."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.catalog import CATALOG
from benchmarks.results import Results
from benchmarks.run import Plan

ROOT = Path(__file__).resolve().parent.parent
MACHINE = {"cpu": "some", "cores": "2", "system": "Linux", "python": "3.11"}


def measure(workload: str, contestant: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.measure", workload, contestant, "--seconds", "0.05"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    return outcome


@pytest.mark.parametrize("workload", list(CATALOG))
def test_swath_delivers_what_is_compared(workload: str) -> None:
    result = measure(workload, "swath")
    for figure in CATALOG[workload].figures:
        assert result[figure.key] > 0


@pytest.mark.parametrize("workload", ["W9a", "W9e", "W9f"])
def test_the_ring_written_by_hand_delivers_what_is_compared(workload: str) -> None:
    result = measure(workload, "numpy_ring")
    for figure in CATALOG[workload].figures:
        assert result[figure.key] > 0


def results_of(outcomes: dict[str, dict[str, Any]]) -> Results:
    results = Results(MACHINE, rounds=1, seconds=1.0)
    for contestant, outcome in outcomes.items():
        results.add("W9a", contestant, outcome)
    return results


def both(collected: float, batches: float) -> dict[str, float]:
    return {"collected_per_second": collected, "batches_per_second": batches, "cpu_share": 1.0}


def test_two_figures_have_a_ratio_each() -> None:
    page = report.markdown(results_of({"swath": both(9000, 500), "peer_default": both(3000, 250)}))
    assert "| contestant | collected frames/s | swath / contestant | sampled batches/s | swath / contestant |" in page
    row = next(line for line in page.splitlines() if line.startswith("| peer_default"))
    assert "3,000 (3,000 to 3,000) | 3.00x" in row
    assert "250 (250 to 250) | 2.00x" in row


def test_a_starved_side_is_shown_and_has_no_ratio() -> None:
    page = report.markdown(results_of({"swath": both(9000, 500), "peer_default": both(0, 250)}))
    row = next(line for line in page.splitlines() if line.startswith("| peer_default"))
    assert row.startswith("| peer_default | 0 (0 to 0) | - | 250")


def test_who_is_not_available_is_a_row_with_the_reason() -> None:
    results = results_of({"swath": both(9000, 500), "peer_default": {"absent": "not available with this torch"}})
    page = report.markdown(results)
    assert "| peer_default | not available with this torch | - | not available with this torch | - |" in page
    assert "failed" not in page
    json.dumps(results.as_json())


def test_a_contestant_runs_only_where_it_takes_part() -> None:
    plan = Plan(["W2", "W9f"], ["swath", "peer_tree", "env_alone"], 1, 1.0)
    assert plan.turns == [("W2", "swath"), ("W2", "env_alone"), ("W9f", "swath"), ("W9f", "peer_tree")]
