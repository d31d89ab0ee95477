"""A randomised stress of collectors: rounds of threads, signals, deaths, forks and checkpoints, every frame checked.

    python -m swath.testing.stress --seed 7 --seconds 60 [--kind MultiAsyncCollector ...]

Each round is a process of its own, with a collector that is drawn from the round's seed, as is all that is done to it.
What is raised and not promised, frames that are not where they belong, hangs, crashes, and whatever is left behind are
findings. `--round-seed` runs a round again, though threads and signals will not come at the same moments.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = ("Collector", "MultiSyncCollector", "MultiAsyncCollector", "AsyncCollector", "AsyncBatchedCollector")
NODES = ("DistributedCollector", "RPCCollector", "RayCollector")
"""Their workers are nodes on this machine. They take part if they are asked for."""
ACTS = ("calls", "signals", "interrupts", "forks", "keeps", "stops", "kills")
"""What may be drawn. With fewer of them, a round is the same without the others."""
MARK = "SWATH_STRESS_ROUND"
LEAVE_S = 20.0
"""How long the processes of a round may take to end after it."""
LONGEST_S = 300.0


def processes(mark: str) -> list[int]:
    """Those whose environment has that mark: a round, and what stems from it."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def memory_names() -> set[str]:
    """Names of shared memory that may be ours."""
    return {path.name for path in Path("/dev/shm").glob("*swath*")}


def run_round(kind: str, seed: int, deadline_s: float = 30.0, acts: Sequence[str] = ACTS) -> list[str]:
    """Run one round; prints what was drawn, and returns what was found."""
    mark, names, begun = secrets.token_hex(8), memory_names(), time.monotonic()
    own = ["--kind", kind, "--round-seed", str(seed), "--deadline", str(deadline_s), "--acts", *acts]
    print(f"--kind {kind} --round-seed {seed}:", end=" ", flush=True)
    given = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", **os.environ, MARK: mark}
    if kind == "RayCollector":  # without a token in the environment Ray would write one into the user's home
        given.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    command = [sys.executable, "-X", "faulthandler", "-u", "-m", "swath.testing.stress", *own, "--inside"]
    found: list[str] = []
    with tempfile.TemporaryFile("w+") as output:  # no pipe, which processes that are left would keep open
        process = subprocess.Popen(command, env=given, stdout=output, stderr=output, start_new_session=True)
        try:
            process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # which shows its tracebacks
            process.wait(LEAVE_S)
        output.seek(0)
        text = output.read()
    if process.returncode:
        found.append(f"it has ended with {process.returncode}")
    elif "Traceback (most recent call last)" in text:
        found.append("it has ended well, but something was raised on the way")
    deadline = time.monotonic() + LEAVE_S
    while (left := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        found.append(f"the process {pid} is left")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if memory_names() - names:
        time.sleep(1.0)  # a file may have its name for a moment
        found += [f"shared memory is left: {name}" for name in memory_names() - names]
    verdict = f"\nFOUND: {'; '.join(found)}" if found else ""
    print(f"{text.rstrip()}{verdict} ({time.monotonic() - begun:.1f} s)", flush=True)
    return found


def run(
    seed: int, seconds: float, kinds: Sequence[str] = HERE, deadline_s: float = 30.0, **options: Sequence[str]
) -> int:
    """Run rounds until the time is over, all kinds in turn; how many had findings."""
    generator, end, rounds, findings = random.Random(seed), time.monotonic() + seconds, 0, 0
    print(f"seed {seed}, {seconds:g} s, {', '.join(kinds)}", flush=True)
    while time.monotonic() < end:
        findings += bool(run_round(kinds[rounds % len(kinds)], generator.getrandbits(32), deadline_s, **options))
        rounds += 1
    print(f"{rounds} rounds, {findings} with findings", flush=True)
    return findings


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m swath.testing.stress", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of all rounds")
    parser.add_argument("--seconds", type=float, default=60.0, help="begin rounds for so long")
    parser.add_argument("--kind", nargs="+", choices=HERE + NODES, default=HERE, help="which collectors")
    parser.add_argument("--acts", nargs="*", choices=ACTS, default=ACTS, help="what may be done to them")
    parser.add_argument("--deadline", type=float, default=30.0, help="a step that takes so many seconds hangs")
    parser.add_argument("--round-seed", type=int, help="run this round, of one kind, alone")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.inside:
        from swath.testing.stress_round import Round

        found = Round(given.kind[0], given.round_seed, given.deadline, given.acts).run()
        faulthandler.dump_traceback_later(LEAVE_S, exit=True)  # the interpreter must end
        return found
    if given.round_seed is not None:
        return int(bool(run_round(given.kind[0], given.round_seed, given.deadline, given.acts)))
    return int(bool(run(given.seed, given.seconds, given.kind, given.deadline, acts=given.acts)))


if __name__ == "__main__":
    sys.exit(main())
