"""The benchmarks' own check: what swath delivers there is what everybody must deliver."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("workload", ["W1", "W2", "W3", "W6"])
def test_swath_delivers_what_is_compared(workload: str) -> None:
    command = [sys.executable, "-m", "benchmarks.measure", workload, "swath", "--seconds", "0.05"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    assert result["frames_per_second"] > 0
