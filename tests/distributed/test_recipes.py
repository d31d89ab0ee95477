"""The recipes of the docs for clusters run on real ones."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import RayCluster
from slurm import Slurm

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def recipes(cluster: str) -> list[str]:
    found = re.findall(rf"^```python {cluster}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return found


def run(recipe: str, folder: Path, **options: Any) -> str:
    """What it prints, as a program of its own."""
    program = folder / "recipe.py"
    program.write_text(recipe)
    done = subprocess.run([sys.executable, program], cwd=folder, capture_output=True, text=True, timeout=100, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("recipe", recipes("slurm"), ids=["submitit", "delayed"])
def test_slurm(slurm: Slurm, recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    local = recipe.replace(
        'launcher="submitit', 'address="127.0.0.1", launcher="submitit'
    )  # the name leads nowhere here
    assert run(local, tmp_path) == "1000"


@pytest.mark.parametrize("recipe", recipes("ray"), ids=["cluster", "buffer"])
def test_ray(ray_cluster: RayCluster, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    assert run(recipe, tmp_path) == "1000"
