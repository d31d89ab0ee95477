"""A Slurm of our own: controller, one node and authentication, with all their files in one folder.

Its programs listen on the loopback device only, on ports that were free, so that several of them, and another Slurm of
this machine, do not meet. Commands find it by `SLURM_CONF`, which the fixture `slurm` sets. It keeps no accounts:
`sacct`, and what submitit asks it for (`job.state`), know nothing.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import ANSWER_S, until
from warden import Warden

SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
NEEDED = {"munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm"}
"""Commands, and the Debian packages that bring them."""
NODE = socket.gethostname().partition(".")[0]
# The node claims more than this machine has, so that jobs need not wait for each other. KillWait is the time between
# the polite signal to a cancelled job and the other one; submitit's jobs do not listen to the first.
CONFIG = """
ClusterName=swath
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
SchedulerParameters=bf_interval=1
NodeName={node} NodeAddr=127.0.0.1 CPUs=32 RealMemory=64000
PartitionName=all Nodes={node} Default=YES State=UP
"""
# By force: munged expects that other users want to reach it, to whom our folder is closed.
START = """
munged --force --socket={folder}/munge.socket --key-file={folder}/munge.key --pid-file={folder}/munged.pid \
    --log-file={folder}/munged.log --seed-file={folder}/munged.seed && slurmctld && slurmd
"""


class Slurm:
    """The Slurm that runs; `running_slurm` starts it."""

    node = NODE
    """Name of its only node, which is this machine."""

    def __init__(self, folder: Path, warden: Warden) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self._warden = warden

    def run(self, *command: str | Path) -> str:
        """What a command of Slurm prints."""
        env = {**os.environ, "SLURM_CONF": str(self.conf)}
        done = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, timeout=ANSWER_S)
        assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, script: str, *options: str) -> int:
        """Give the lines of a shell script to `sbatch`, and return the number of the job."""
        path = self.folder / f"{secrets.token_hex(4)}.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        return int(self.run("sbatch", "--parsable", f"--output={self.folder}/%j.out", *options, path))

    def output(self, job: int) -> str:
        """What a job that was given to `submit` has printed so far."""
        path = self.folder / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def state(self, job: int | str) -> str:
        """Its state in Slurm's words, e.g. RUNNING, COMPLETED, CANCELLED; known for some minutes after its end."""
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()

    def wait_for(self, job: int | str, *states: str, timeout_s: float = ANSWER_S) -> str:
        """Wait until a job is in one of these states, and return which."""
        seen = ""

        def reached() -> bool:
            nonlocal seen
            seen = self.state(job)
            return seen in states

        until(reached, timeout_s)
        return seen

    def jobs(self) -> list[str]:
        """Numbers of the jobs that wait or run."""
        return self.run("squeue", "--noheader", "--format=%i").split()

    def cancel(self, *jobs: int | str) -> None:
        """Cancel them by `scancel`."""
        self.run("scancel", *map(str, jobs))

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until they are gone."""
        if jobs := self.jobs():
            self.cancel(*jobs)
            until(lambda: not self.jobs())

    def pids(self) -> set[int]:
        """All its processes, and those of its jobs."""
        return self._warden.pids()


def why_no_slurm() -> str:
    """Why there cannot be a Slurm here, or nothing."""
    missing = {package for command, package in NEEDED.items() if not shutil.which(command, path=SYSTEM_PATH)}
    if missing:
        return f"Slurm needs the packages {', '.join(sorted(missing))}; `make test` installs them where it may"
    return ""


def free_ports(count: int) -> list[int]:
    """Ports of the loopback device that nobody has now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def running_slurm() -> Iterator[Slurm]:
    """A Slurm that is ready for jobs; it, its jobs and its files are gone afterwards."""
    if reason := why_no_slurm():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="swath-slurm-"))
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    controller_port, node_port = free_ports(2)
    config = CONFIG.format(
        node=NODE, user=getpass.getuser(), folder=folder, controller_port=controller_port, node_port=node_port
    )
    (folder / "slurm.conf").write_text(config)
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": SYSTEM_PATH}
    start = ["sh", "-c", START.format(folder=folder)]
    with contextlib.closing(Warden(start, folder / "start.log", tidy=f"rm -r {folder}", env=env)) as warden:
        warden.ready()
        slurm = Slurm(folder, warden)
        until(lambda: slurm.run("sinfo", "--noheader", "--format=%T").strip() == "idle")
        yield slurm
