"""Nodes that are ranks which torchrun or mpirun has started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from children import ANSWER_S, importing_env, is_gone, until
from slurm import free_ports

from swath.collectors.distributed import DistributedCollector
from swath.testing import CountingEnv

PROGRAM = """
import os, sys
from swath.collectors.distributed import DistributedCollector
from swath.testing import CountingEnv

os.write(1, b"pid %d\\n" % os.getpid())  # whole, also beside others
collector = DistributedCollector(
    [lambda: CountingEnv(lengths=5)] * 2, frames_per_batch=40, total_frames=400, sync=True, launcher="torchrun"
)
print("trainer", os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK")), flush=True)
for number, batch in enumerate(collector):
    if "--die" in sys.argv:
        os.kill(os.getpid(), 9)
    assert batch.shape == (2, 20)
print("batches", number + 1, flush=True)
collector.shutdown()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def pids(said: str) -> list[int]:
    return [int(line.split()[1]) for line in said.splitlines() if line.startswith("pid ")]


@pytest.mark.parametrize("ends", ["well", "by a signal"])
def test_torchrun(program: Path, ends: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(program)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "env": importing_env(), "timeout": 2 * ANSWER_S}
    if ends == "well":
        done = subprocess.run(command, **options)
        assert done.returncode == 0, done.stderr
        assert [line for line in done.stdout.splitlines() if "pid" not in line] == ["trainer 0", "batches 10"]
    else:
        done = subprocess.run([*command, "--die"], **options)
        assert done.returncode != 0
        assert "Signal 9 (SIGKILL)" in done.stderr
    assert len(pids(done.stdout)) == 3
    until(lambda: all(map(is_gone, pids(done.stdout))))


def test_ranks_of_mpirun(program: Path) -> None:
    """As Open MPI starts them; MPICH has other names for the same."""
    names = [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")] * 2 + [("PMI_RANK", "PMI_SIZE")]
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    command: list[Any] = [sys.executable, program]
    ranks = []
    for number, (rank, size) in enumerate(names):
        env = importing_env(**{rank: str(number), size: "3"}, **master)
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env))
    try:
        said = ranks[0].communicate(timeout=2 * ANSWER_S)[0]
        assert "batches 10" in said
        assert [rank.wait(10.0) for rank in ranks] == [0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(nodes: int = 2, **options: Any) -> None:
        DistributedCollector([CountingEnv] * nodes, frames_per_batch=10, launcher="torchrun", **options)

    with pytest.raises(RuntimeError, match="torchrun --nproc-per-node 3"):
        make()
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="4 nodes need 5 ranks, not 3"):
        make(4)
    with pytest.raises(ValueError, match="on_worker_failure='drop'"):
        make(on_worker_failure="restart")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", str(free_ports(1)[0]))
    with pytest.raises(TimeoutError, match=r"No node has come within 1 s: it is rank [12]"):
        make(start_timeout_s=1)
