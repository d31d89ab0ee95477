"""The examples run as a user runs them, shortened."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TRAINED: dict[str, tuple[list[str], dict[str, int | None]]] = {
    "ppo_cartpole": (["--total-frames", "8192"], {"env": None, "policy": None}),
    "dqn_cartpole": (
        ["--updates", "400", "--init-random-frames", "512", "--log-every", "100", "--eval-episodes", "2"],
        {"updates  epsilon": 4, "mean return of 2 episodes without random actions": 1},
    ),
    "sac_pendulum": (
        ["--updates", "200", "--init-random-frames", "1000", "--log-every", "100", "--eval-episodes", "2"],
        {"updates  temperature": 2, "mean return of 2 episodes without noise": 1},
    ),
}
"""Arguments, and what is printed how often; None: at all."""
FEW = ["--updates", "10", "--init-random-frames", "256", "--eval-episodes", "2"]
FAILED = {
    "ppo_cartpole": ["--total-frames", "2048", "--threshold", "499"],
    "dqn_cartpole": [*FEW, "--threshold", "501"],
    "sac_pendulum": [*FEW, "--threshold", "-0.5"],
}
ONE_AFTER_THE_OTHER = """
import runpy, sys
for name, arguments in {runs!r}.items():
    sys.argv = [f"examples/{{name}}.py", *arguments]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as left:
        print(name, "has left with", left.code, file=sys.stderr)
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("name", TRAINED)
def test_an_example_trains_and_draws_its_curve(name: str, tmp_path: Path) -> None:
    arguments, printed = TRAINED[name]
    curve = tmp_path / "curve.png"
    done = run(f"examples/{name}.py", *arguments, "--threshold", "0", "--plot", str(curve))
    assert done.returncode == 0, done.stderr
    for words, times in printed.items():
        assert done.stdout.count(words) == times or (times is None and words in done.stdout)
    assert curve.read_bytes().startswith(b"\x89PNG")


def test_all_workers_share_one_model() -> None:
    done = run("examples/shared_model_cartpole.py", "--total-frames", "8192", "--threshold", "0")
    assert done.returncode == 0, done.stderr
    assert "requests per forward" in done.stdout


def test_examples_fail_loudly_below_their_thresholds() -> None:
    done = run("-c", ONE_AFTER_THE_OTHER.format(runs=FAILED))
    for name, arguments in FAILED.items():
        said, _, done.stderr = done.stderr.partition(f"{name} has left with 1\n")
        assert f"below the threshold {arguments[-1]}" in said
        assert "Traceback" not in said
