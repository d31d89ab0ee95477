"""Nodes that are jobs of a real Slurm."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from children import until
from slurm import Slurm

from swath.collectors.distributed import DistributedCollector, submitit_delayed_launcher
from swath.errors import WorkerDiedError, WorkerRestartedWarning
from swath.testing import CountingEnv

pytest.importorskip("submitit")
JOB = {"timeout_min": 10, "cpus_per_task": 1, "mem_gb": 1}


def make(nodes: int = 2, **options: Any) -> DistributedCollector:
    options = {"frames_per_batch": 40, "launcher": "submitit", "address": "127.0.0.1", "slurm_kwargs": JOB, **options}
    return DistributedCollector([lambda: CountingEnv(lengths=5)] * nodes, **options)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Jobs find the modules of tests, and leave their files where nobody is disturbed."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_nodes_collect_in_jobs(slurm: Slurm, folder: Path) -> None:
    collector = make(sync=True, total_frames=400)
    (private,) = folder.iterdir()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    jobs = slurm.jobs()
    assert len(jobs) == 2
    assert sum(batch.numel() for batch in collector) == 400
    collector.shutdown()
    assert {slurm.wait_for(job, "COMPLETED", "CANCELLED", "FAILED") for job in jobs} == {"COMPLETED"}
    assert not list(folder.iterdir())


def test_a_cancelled_job_is_a_dead_worker(slurm: Slurm, folder: Path) -> None:
    collector = make(1, on_worker_failure="restart", max_restarts=1, slurm_kwargs={**JOB, "folder": "kept"})
    batches = iter(collector)
    next(batches)
    (first,) = slurm.jobs()
    slurm.cancel(first)
    with pytest.warns(WorkerRestartedWarning, match=f"SIGTERM.* as job {first} of Slurm, which is CANCELLED"):
        until(lambda: next(batches) is not None and slurm.jobs() not in ([], [first]))
    next(batches)
    (second,) = slurm.jobs()
    slurm.cancel(second)
    with pytest.raises(WorkerDiedError, match=f"Worker 0 .* on {slurm.node}, as job {second} of Slurm.* CANCELLED"):
        until(lambda: next(batches) is None, 10.0)
    collector.shutdown()
    assert list(folder.glob(f"kept/*/{first}_*.err"))


def test_a_job_that_never_reaches_its_trainer_is_told(slurm: Slurm, folder: Path) -> None:
    with pytest.raises(WorkerDiedError, match=r"exit code 3.*It has never come.* which is FAILED"):
        make(1, slurm_kwargs={**JOB, "slurm_setup": ["exit 3"]})
    begin = {"slurm_additional_parameters": {"begin": "now+3600"}}
    with pytest.raises(
        TimeoutError, match=r"No node has come within 2 s: it is job \d+ of Slurm, which is PENDING"
    ) as late:
        make(1, slurm_kwargs={**JOB, **begin}, start_timeout_s=2)
    assert "Raised in worker 0" in "".join(getattr(late.value, "__notes__", [str(late.value)]))
    until(lambda: not slurm.jobs())
    assert not list(folder.iterdir())


def test_without_submitit_or_slurm_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ImportError, match=r"pip install 'swath\[slurm\]'"):
        make()


# -- delayed -------------------------------------------------------------------------------------------------------


def collect(**options: Any) -> tuple[list[int], str]:
    collector = make(launcher="submitit_delayed", total_frames=400, slurm_kwargs=None, **options)
    workers = {int(batch["collector", "traj_ids"][0]) >> 40 for batch in collector}
    collector.shutdown()
    return sorted(workers), os.environ["SLURM_JOB_ID"]


def delayed(num_jobs: int, **options: Any) -> Any:
    return submitit_delayed_launcher(
        num_jobs, submitit_main_conf=JOB, submitit_collection_conf=JOB, start_timeout_s=30, **options
    )


def test_the_delayed_launcher_collects(slurm: Slurm, folder: Path) -> None:
    main = delayed(2)(lambda **options: collect(**options))
    workers, job = main(sync=False)
    assert workers == [0, 1]
    assert slurm.state(job) == "COMPLETED"
    assert not slurm.jobs()
    assert not list(folder.iterdir())


def test_the_delayed_launcher_tells_what_goes_wrong(slurm: Slurm) -> None:
    with pytest.raises(Exception, match=r"2 nodes need submitit_delayed_launcher\(num_jobs=2\), not 1"):
        delayed(1)(collect)()
    until(lambda: not slurm.jobs())
    with pytest.raises(RuntimeError, match=r"was job \d+ of Slurm, which is CANCELLED"):
        delayed(0)(lambda: (subprocess.run(["scancel", os.environ["SLURM_JOB_ID"]]), time.sleep(60)))()


def test_the_delayed_launcher_refuses_what_cannot_be() -> None:
    with pytest.raises(NotImplementedError, match="carrier pigeons"):
        submitit_delayed_launcher(1, framework="carrier pigeons")
    with pytest.raises(RuntimeError, match="with the decorator submitit_delayed_launcher"):
        make(launcher="submitit_delayed")
    with pytest.raises(ValueError, match="on_worker_failure='drop'"):
        make(launcher="submitit_delayed", on_worker_failure="restart")
