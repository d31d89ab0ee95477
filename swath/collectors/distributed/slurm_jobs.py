"""Nodes that are jobs of Slurm, submitted through submitit.

How a job is doing is asked of Slurm's controller, which knows it for some minutes after its end: accounts need not be
kept. What jobs are given, the secret among it, lies in a folder that only this user can open.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swath.collectors.distributed.launchers import Launched, Way
from swath.collectors.distributed.meeting import Invitation, Meeting
from swath.errors import StallWarning

GOING_ON = ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED", "SIGNALING", "STAGE_OUT", "")
ANSWER_S = LOOK_S = GRACE_S = 10.0
"""How long a command of Slurm may take, how often it is asked at the least, and how long nodes may outlive main()."""


class SlurmJob:
    """A job, and what Slurm tells of it."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], call: Callable[[], Any]) -> None:
        """Submit a call, with what `settings` say."""
        try:
            import submitit
        except ImportError as error:
            raise ImportError("Jobs of Slurm are submitted through submitit: pip install 'swath[slurm]'.") from error
        executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
        executor.update_parameters(**{name: value for name, value in settings.items() if name != "folder"})
        self.submitted = executor.submit(call)
        self._known: dict[str, str] = {}

    def state(self) -> str:
        """In Slurm's word; nothing if that does not answer."""
        if self._known.get("JobState", "") in GOING_ON:
            command = ["scontrol", "--oneliner", "show", "job", self.submitted.job_id]
            with suppress(subprocess.TimeoutExpired):
                told = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S).stdout
                self._known = dict(re.findall(r"(\w+)=(\S+)", told)) or self._known
        return self._known.get("JobState", "")

    def describe(self) -> str:
        """How it is doing, with the last that it has said if it has failed."""
        state, reason = self.state() or "not known", self._known.get("Reason", "").replace("None", "")
        said = Path(self.submitted.paths.stderr)
        words = f", and has said: {said.read_text(errors='replace')[-1500:]}" if said.exists() else ""
        return f"job {self.submitted.job_id} of Slurm, which is {state} {reason}".rstrip() + words * (state == "FAILED")

    def exitcode(self, timeout_s: float) -> int | None:
        """How it has ended, if it does in time."""
        deadline, pause = time.monotonic() + timeout_s, 0.1
        while (state := self.state()) in GOING_ON:
            if (left := deadline - time.monotonic()) <= 0:
                return None
            time.sleep(min(left, pause))
            pause = min(LOOK_S, 2 * pause)
        code, number = map(int, self._known.get("ExitCode", "1:0").split(":"))
        number = signal.SIGTERM if state == "CANCELLED" else number or max(0, code - 128)  # which is how srun tells
        return -number or code

    def kill(self) -> None:
        """Cancel it."""
        subprocess.run(["scancel", self.submitted.job_id], capture_output=True, timeout=ANSWER_S)


def job_folder(*settings: Mapping[str, Any]) -> tuple[Path, Callable[[], None]]:
    """A new folder for jobs, closed to others, and what to do when they are over: it is kept if one was asked for."""
    asked = [Path(each["folder"]) for each in settings if "folder" in each]
    for folder in asked:
        folder.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="swath-jobs-", dir=asked[0].absolute() if asked else os.getcwd()))
    return made, lambda: None if asked else shutil.rmtree(made, ignore_errors=True)


def jobs(settings: Mapping[str, Any], address: str, port: int) -> Way:
    """Nodes that are a job each, submitted from here."""
    meeting, (folder, close) = Meeting(address, port), job_folder(settings)

    def begin(invitation: Invitation) -> Launched:
        job = SlurmJob(folder, settings, invitation.accept)
        return Launched(job.describe, job.exitcode, job.kill)

    return meeting, begin, close


# -- delayed -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DelayedRun:
    """What the jobs of `submitit_delayed_launcher` have in common."""

    folder: Path
    secret: bytes = field(repr=False)
    port: int
    num_jobs: int
    start_timeout_s: float

    def be_main(self, main: Callable[[], Any]) -> Any:
        """Call the user's function, in its job."""
        global _run
        _run = self
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit would not notice that it was cancelled
        return main()

    def be_node(self, index: int) -> None:
        """Wait until the trainer listens, and be its node."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        deadline, place = time.monotonic() + self.start_timeout_s, self.folder / "trainer"
        while not place.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"No collector was made for the nodes within {self.start_timeout_s:g} s.")
            time.sleep(0.2)
        address, port = place.read_text().split()
        Invitation(address, int(port), self.secret, index).accept()


_run: DelayedRun | None = None
"""In the job of a user's function."""


def delayed(nodes: int, address: str, port: int) -> Way:
    """Nodes that wait in jobs which were submitted for this process."""
    run = _run
    if run is None:
        raise RuntimeError(
            "launcher='submitit_delayed' is for collectors that are made in a function with the decorator "
            "submitit_delayed_launcher; with launcher='submitit', nodes are submitted from here."
        )
    if nodes > run.num_jobs:
        raise ValueError(f"{nodes} nodes need submitit_delayed_launcher(num_jobs={nodes}), not {run.num_jobs}.")

    def begin(invitation: Invitation) -> Launched:
        if invitation.index == nodes - 1:  # all are expected
            (run.folder / "new").write_text(f"{invitation.address} {invitation.port}")
            (run.folder / "new").rename(run.folder / "trainer")
        return Launched(lambda: f"number {invitation.index} of the jobs that submitit_delayed_launcher submits")

    return Meeting(address, port or run.port, run.secret), begin, lambda: None


def submitit_delayed_launcher(
    num_jobs: int,
    framework: str = "distributed",
    backend: str = "gloo",
    tcpport: int | str | None = None,
    submitit_main_conf: Mapping[str, Any] | None = None,
    submitit_collection_conf: Mapping[str, Any] | None = None,
    start_timeout_s: float = 600.0,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function run as a job of Slurm, and `num_jobs` nodes for the collector that it makes in others.

    The collector must have `launcher="submitit_delayed"`. A call of the function returns what it returns in its job.
    Nodes are submitted when that job runs; when it has ended, they have ended too, or are cancelled.

    Args:
        num_jobs: how many nodes there are; the collector may use fewer.
        framework: "distributed" or "rpc". Here and for `backend`, what the collector is counts.
        backend: see there.
        tcpport: at which port the trainer listens, if the collector does not say; by default one that is free.
        submitit_main_conf: for the function's job; see `slurm_kwargs` of the collector.
        submitit_collection_conf: for the jobs of nodes. Their `timeout_min` is 5 if nothing is said.
        start_timeout_s: how long nodes wait for the collector to be made.
    """
    if framework not in ("distributed", "rpc"):
        raise NotImplementedError(f"framework={framework!r} is unknown: use 'distributed' or 'rpc'.")
    for_main, for_nodes = submitit_main_conf or {}, submitit_collection_conf or {}

    def decorate(main: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(main)
        def launch(*args: Any, **kwargs: Any) -> Any:
            folder, close = job_folder(for_main, for_nodes)
            run = DelayedRun(folder, secrets.token_bytes(32), int(tcpport or 0), num_jobs, start_timeout_s)
            call, submitted = functools.partial(main, *args, **kwargs), list[SlurmJob]()
            try:
                job = SlurmJob(folder, for_main, functools.partial(run.be_main, call))
                submitted.append(job)
                _wait_in_queue(job)
                for index in range(num_jobs):
                    submitted.append(SlurmJob(folder, for_nodes, functools.partial(run.be_node, index)))
                while (code := job.exitcode(60.0)) is None:
                    pass
                deadline = time.monotonic() + GRACE_S * (code == 0)
                for node in submitted[1:]:
                    node.exitcode(max(0.0, deadline - time.monotonic()))
                if not job.submitted.paths.result_pickle.exists():
                    raise RuntimeError(f"{main.__name__} has not come to its end: it was {job.describe()}.")
                return job.submitted.result()
            finally:
                for each in submitted:
                    if each.exitcode(0.0) is None:
                        each.kill()
                close()

        return launch

    return decorate


def _wait_in_queue(job: SlurmJob) -> None:
    """Wait until a job runs or has ended; if that takes long, say why."""
    begun, has_warned = time.monotonic(), False
    while job.exitcode(1.0) is None and job.state() != "RUNNING":
        if not has_warned and time.monotonic() > begun + 15.0:
            has_warned = True
            warnings.warn(f"The function is not called yet: it is {job.describe()}.", StallWarning, stacklevel=3)
