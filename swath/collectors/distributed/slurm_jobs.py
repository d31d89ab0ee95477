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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swath.collectors.distributed.groups import check_backend
from swath.collectors.distributed.launchers import Launched
from swath.collectors.distributed.meeting import Invitation, Meeting
from swath.errors import StallWarning

ENDED = [
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
]
ANSWER_S = 10.0
"""How long a command of Slurm may take."""
LOOK_S = 10.0
"""How often Slurm is asked at the least, while the end of a job is waited for."""
GRACE_S = 10.0
"""How long nodes may take to end after the function that they collect for."""
Start = Callable[[Invitation], Launched]


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
        """In Slurm's words."""
        if self._known.get("JobState") not in ENDED:
            command = ["scontrol", "--oneliner", "show", "job", self.submitted.job_id]
            try:
                told = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S).stdout
            except subprocess.TimeoutExpired:
                told = ""
            self._known = dict(re.findall(r"(\w+)=(\S+)", told)) or self._known
        return self._known.get("JobState", "not known to Slurm")

    def describe(self) -> str:
        """In words, with the last that it has said."""
        state, reason = self.state(), self._known.get("Reason", "None").replace("None", "")
        said = Path(self.submitted.paths.stderr)
        words = f" and has said: {said.read_text(errors='replace')[-1500:]}" if said.exists() else ""
        return f"job {self.submitted.job_id} of Slurm, which is {state} {reason}".rstrip() + words * (state == "FAILED")

    def exitcode(self, timeout_s: float) -> int | None:
        """How it has ended, if it does in time."""
        deadline, pause = time.monotonic() + timeout_s, 0.1
        while (state := self.state()) not in ENDED:
            if (left := deadline - time.monotonic()) <= 0:
                return None
            time.sleep(min(left, pause))
            pause = min(LOOK_S, 2 * pause)
        if state == "CANCELLED":
            return -signal.SIGTERM
        code, number = map(int, self._known["ExitCode"].split(":"))
        return -(number or code - 128) if number or code > 128 else code  # srun tells of a signal as shells do

    def kill(self) -> None:
        """Cancel it."""
        subprocess.run(["scancel", self.submitted.job_id], capture_output=True, timeout=ANSWER_S)

    def launched(self) -> Launched:
        """As what a node is."""
        return Launched(self.describe, self.exitcode, self.kill)


def job_folder(*settings: Mapping[str, Any]) -> tuple[Path, Callable[[], None]]:
    """A new folder for jobs, closed to others, and what to do when they are over: it is kept if one was asked for."""
    asked = [Path(each["folder"]) for each in settings if "folder" in each]
    for folder in asked:
        folder.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="swath-jobs-", dir=asked[0] if asked else os.getcwd()))
    return made, lambda: None if asked else shutil.rmtree(made, ignore_errors=True)


def jobs(settings: Mapping[str, Any], address: str, port: int) -> tuple[Meeting, Start, Callable[[], None]]:
    """Nodes that are a job each, submitted from here."""
    folder, close = job_folder(settings)
    return Meeting(address, port), lambda own: SlurmJob(folder, settings, own.accept).launched(), close


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
        deadline, place = time.monotonic() + self.start_timeout_s, self.folder / "trainer"
        while not place.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"main() has made no collector for its nodes within {self.start_timeout_s:g} s.")
            time.sleep(0.2)
        address, port = place.read_text().split()
        Invitation(address, int(port), self.secret, index).accept()

    def expect(self, invitation: Invitation, nodes: int) -> Launched:
        """Tell nodes where the trainer listens, once it expects all of them."""
        if invitation.index == nodes - 1:
            (self.folder / "new").write_text(f"{invitation.address} {invitation.port}")
            (self.folder / "new").rename(self.folder / "trainer")
        return Launched(lambda: f"number {invitation.index} of the jobs that submitit_delayed_launcher submits")


_run: DelayedRun | None = None
"""In the job of a user's function."""


def delayed(nodes: int, address: str, port: int) -> tuple[Meeting, Start]:
    """Nodes that wait in jobs which were submitted for this process."""
    run = _run
    if run is None:
        raise RuntimeError(
            "launcher='submitit_delayed' is for collectors that are made in a function with the decorator "
            "submitit_delayed_launcher; with launcher='submitit', nodes are submitted from here."
        )
    if nodes > run.num_jobs:
        raise ValueError(f"{nodes} nodes need submitit_delayed_launcher(num_jobs={nodes}), not {run.num_jobs}.")
    return Meeting(address, port or run.port, run.secret), lambda invitation: run.expect(invitation, nodes)


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
        framework: "distributed" or "rpc"; as `backend`, it is the collector's that counts.
        backend: the collector's.
        tcpport: at which port the trainer listens, if the collector does not say; by default one that is free.
        submitit_main_conf: for submitit's executor, what the function's job needs. In its `folder`, which all machines
            must share, jobs leave what they print; by default it is the current one, where nothing is left.
        submitit_collection_conf: the same for the jobs of nodes. submitit's `timeout_min` is 5 by default.
        start_timeout_s: how long nodes wait for the collector to be made.
    """
    if framework not in ("distributed", "rpc"):
        raise NotImplementedError(f"framework={framework!r} is unknown: use 'distributed' or 'rpc'.")
    if framework == "distributed":
        check_backend(backend)
    for_main, for_nodes = submitit_main_conf or {}, submitit_collection_conf or {}

    def decorate(main: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(main)
        def launch(*args: Any, **kwargs: Any) -> Any:
            folder, close = job_folder(for_main, for_nodes)
            run = DelayedRun(folder, secrets.token_bytes(32), int(tcpport or 0), num_jobs, start_timeout_s)
            submitted: list[SlurmJob] = []
            try:
                job = SlurmJob(
                    folder, for_main, functools.partial(run.be_main, functools.partial(main, *args, **kwargs))
                )
                submitted.append(job)
                begun, has_warned = time.monotonic(), False
                while job.exitcode(60.0 if len(submitted) > 1 else 1.0) is None:
                    if len(submitted) == 1 and job.state() == "RUNNING":
                        calls = [functools.partial(run.be_node, index) for index in range(num_jobs)]
                        submitted += [SlurmJob(folder, for_nodes, call) for call in calls]
                    elif len(submitted) == 1 and time.monotonic() > begun + 15.0 and not has_warned:
                        has_warned = True
                        warnings.warn(f"{main.__name__} does not run yet: it is {job.describe()}.", StallWarning, 2)
                deadline = time.monotonic() + GRACE_S * (job.exitcode(0.0) == 0)
                for each in submitted:
                    each.exitcode(max(0.0, deadline - time.monotonic()))
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
