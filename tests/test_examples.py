"""The examples run as a user runs them, shortened."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_ppo_example_trains_and_draws_its_curve(tmp_path: Path) -> None:
    curve = tmp_path / "curve.png"
    short = ["--total-frames", "8192", "--threshold", "0", "--plot", str(curve)]
    done = run("examples/ppo_cartpole.py", *short)
    assert done.returncode == 0, done.stderr
    assert "env" in done.stdout
    assert "policy" in done.stdout
    assert curve.read_bytes().startswith(b"\x89PNG")


def test_ppo_example_fails_loudly_below_its_threshold() -> None:
    done = run("examples/ppo_cartpole.py", "--total-frames", "2048", "--threshold", "499")
    assert done.returncode == 1
    assert "499" in done.stdout + done.stderr


def test_dqn_example_trains_beside_its_collector_and_draws_its_curve(tmp_path: Path) -> None:
    curve = tmp_path / "curve.png"
    short = ["--updates", "400", "--init-random-frames", "512", "--log-every", "100", "--eval-episodes", "2"]
    done = run("examples/dqn_cartpole.py", *short, "--threshold", "0", "--plot", str(curve))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("updates  epsilon") == 4
    assert "mean return of 2 episodes without random actions" in done.stdout
    assert curve.read_bytes().startswith(b"\x89PNG")


def test_dqn_example_fails_loudly_below_its_threshold() -> None:
    short = ["--updates", "10", "--init-random-frames", "256", "--eval-episodes", "2"]
    done = run("examples/dqn_cartpole.py", *short, "--threshold", "501")
    assert done.returncode == 1
    assert "501" in done.stderr
    assert "Traceback" not in done.stderr


def test_sac_example_trains_beside_its_collector_and_draws_its_curve(tmp_path: Path) -> None:
    curve = tmp_path / "curve.png"
    short = ["--updates", "200", "--init-random-frames", "1000", "--log-every", "100", "--eval-episodes", "2"]
    done = run("examples/sac_pendulum.py", *short, "--threshold", "0", "--plot", str(curve))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("updates  temperature") == 2
    assert "mean return of 2 episodes without noise" in done.stdout
    assert curve.read_bytes().startswith(b"\x89PNG")


def test_sac_example_fails_loudly_below_its_threshold() -> None:
    short = ["--updates", "10", "--init-random-frames", "256", "--eval-episodes", "2"]
    done = run("examples/sac_pendulum.py", *short, "--threshold", "-0.5")
    assert done.returncode == 1
    assert "-0.5" in done.stderr
    assert "Traceback" not in done.stderr
