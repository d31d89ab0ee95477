"""The benchmarks' own check: what swath delivers there is what everybody must deliver."""

import faulthandler
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import report
from benchmarks.catalog import CATALOG, CONTESTANTS, SUITES
from benchmarks.group import run_group
from benchmarks.measure import measure
from benchmarks.nodes import page as nodes_page
from benchmarks.processes import page
from benchmarks.results import Results
from benchmarks.run import Plan

ROOT = Path(__file__).resolve().parent.parent
MACHINE = {"cpu": "some", "cores": "2", "system": "Linux", "python": "3.11"}
SECONDS = 0.05


@pytest.fixture(scope="module")
def measurer() -> Iterator[ProcessPoolExecutor]:
    """One process that measures for all tests: most of what a measurement takes is the import of torch.

    Not that of the tests: what benchmarks set, register and count there would be theirs too.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield process


def measured(workload: str, contestant: str) -> dict[str, float]:
    """In the process that measures: if it hangs it says where, and ends, so that no other test waits for it."""
    faulthandler.dump_traceback_later(90, exit=True)
    try:
        return measure(workload, contestant, SECONDS)
    finally:
        faulthandler.cancel_dump_traceback_later()


def assert_measures(measurer: ProcessPoolExecutor, workload: str, contestant: str) -> None:
    result = measurer.submit(measured, workload, contestant).result()
    for figure in CATALOG[workload].figures:
        assert result[figure.key] > 0


@pytest.mark.parametrize("workload", SUITES["single"])
def test_swath_delivers_what_is_compared(measurer: ProcessPoolExecutor, workload: str) -> None:
    assert_measures(measurer, workload, "swath")


@pytest.mark.parametrize("workload", ["W4", "W8b", "W9m", "W11"])
def test_swath_delivers_what_is_compared_with_several_processes(measurer: ProcessPoolExecutor, workload: str) -> None:
    assert_measures(measurer, workload, "swath")


@pytest.mark.parametrize("workload", ["W14tx4", "W14px1"])
def test_swath_answers_what_is_compared(measurer: ProcessPoolExecutor, workload: str) -> None:
    assert_measures(measurer, workload, "swath")


@pytest.mark.parametrize(
    ("workload", "contestant"), [("W15gx1", "swath"), ("W16gx1", "swath"), ("W16gx1", "engine"), ("W17g", "swath")]
)
def test_nodes_deliver_what_is_compared(measurer: ProcessPoolExecutor, workload: str, contestant: str) -> None:
    assert_measures(measurer, workload, contestant)


@pytest.mark.parametrize(
    ("workload", "contestant"),
    [
        *[("C02", "swath"), ("C03", "handwritten"), ("C13", "handwritten"), ("C16", "swath"), ("C19b", "swath_plain")],
        *[("C20", "swath"), ("C21", "swath"), ("C22", "swath"), ("C22", "handwritten"), ("C24", "swath")],
        *[("C24", "handwritten"), ("C16", "handwritten"), ("C17", "handwritten")],
    ],
)
def test_cliffs_deliver_what_is_compared(measurer: ProcessPoolExecutor, workload: str, contestant: str) -> None:
    assert_measures(measurer, workload, contestant)


@pytest.mark.parametrize("workload", ["W9a", "W9e", "W9f"])
def test_the_ring_written_by_hand_delivers_what_is_compared(measurer: ProcessPoolExecutor, workload: str) -> None:
    assert_measures(measurer, workload, "numpy_ring")


def test_a_measurement_is_a_program_that_prints_its_figures() -> None:
    """What it measures is tested above; this one has several processes."""
    command = [sys.executable, "-m", "benchmarks.measure", "W8b", "gym_async", "--seconds", str(SECONDS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    for figure in CATALOG["W8b"].figures:
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


def test_suites_are_published_apart() -> None:
    everybody = list(CONTESTANTS)
    assert Plan(SUITES["processes"], everybody, 1, 1.0).suite == "processes"
    assert Plan(SUITES["single"], everybody, 1, 1.0).suite == "single"
    assert Plan(SUITES["single"][1:], everybody, 1, 1.0).suite is None
    assert Plan(SUITES["single"], everybody[1:], 1, 1.0).suite is None


def test_a_shorter_time_is_the_better_one() -> None:
    results = Results(MACHINE, rounds=1, seconds=1.0)
    results.add("W10", "swath", {"first_seconds": 0.5, "second_seconds": 0.25})
    results.add("W10", "peer_default", {"first_seconds": 5.0, "second_seconds": 1.0})
    row = next(line for line in page.markdown(results).splitlines() if line.startswith("| peer_default"))
    assert "5.00 (5.00 to 5.00) | 10.00x" in row
    assert "1.00 (1.00 to 1.00) | 4.00x" in row


def test_other_work_on_the_machine_is_told() -> None:
    results = Results(MACHINE, rounds=2, seconds=1.0)
    for busy in (0.01, 0.5):
        results.add("W4", "swath", {"frames_per_second": 1000.0, "busy_before": busy})
    assert "- swath: in 1 round(s) other work took more than 10% of the machine" in page.markdown(results)


def test_numbers_of_workers_share_a_table() -> None:
    results = Results(MACHINE, rounds=1, seconds=1.0)
    for workload, rate in (("W12x1", 1000.0), ("W12x2", 1900.0)):
        results.add(workload, "swath", {"frames_per_second": rate, "start_seconds": 0.5})
    results.add("W12x1", "peer_default", {"frames_per_second": 100.0, "start_seconds": 1.0})
    results.add("W12x2", "peer_default", {"failed": "no reason"})
    text = page.markdown(results)
    assert text.count("## W12") == 1
    assert "| 1 | 1,000 | 100 (10.00x) | 0.50 | 1.00 (2.00x) |" in text
    assert "| 2 | 1,900 | failed | 0.50 | failed |" in text
    assert "- W12x2 peer_default failed in 1 round(s): no reason" in text


def test_what_carrying_a_batch_costs_is_held_against_the_bare_transfer() -> None:
    results = Results(MACHINE, rounds=2, seconds=1.0)
    for swath, here, engine in ((10.0, 4.0, 5.0), (12.0, 4.0, 5.0)):
        for contestant, ms in (("swath", swath), ("swath_here", here), ("engine", engine)):
            results.add("W16gx16", contestant, {"ms_per_batch": ms, "trainer_ms": 8.0})
    results.add("W15gx1", "swath", {"frames_per_second": 50_000.0})
    results.add("W15gx2", "swath", {"trainer_ms": 0.5})
    text = nodes_page.markdown(results)
    assert "| process groups (gloo) | 16 | 7.00 | 5.00 | 1.40 |" in text
    assert "one core takes 2,000 of them per second: 2,048,000 frames, 41 times what one node makes here" in text
    assert "which is 2.1 GB/s; over a network of 10 Gbit/s (1.25 GB/s) the link is full first" in text


def test_nothing_outlives_a_measurement(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
    done = run_group([sys.executable, "-c", script], os.environ, tmp_path, timeout=30, grace=0.1)
    assert done.returncode == 0
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not psutil.pid_exists(int(done.stdout)) or psutil.Process(int(done.stdout)).status() == "zombie"
    assert "left processes behind" in capfd.readouterr().err
