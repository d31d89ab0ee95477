"""Nodes on other hosts, whose links are cut and which are killed."""

from __future__ import annotations

import itertools
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import pytest
from children import is_gone, until
from hosts import Host, Program, hosts

from swath.collectors.distributed import DistributedCollector
from swath.testing import CountingEnv

LENGTH = 5
"""Of episodes."""


def train(nodes: Sequence[Sequence[Sequence[str]]], options: dict[str, Any]) -> None:
    """Collect from a node for each element, by its first command, and by the next where it is started again."""
    commands = [itertools.cycle(list(own)) for own in nodes]

    def launch(index: int, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*next(commands[index]), *command], stdin=subprocess.PIPE)

    collector = DistributedCollector(
        [lambda: CountingEnv(lengths=LENGTH)] * len(nodes),
        frames_per_batch=100,
        launcher=launch,
        address=socket.gethostbyname(socket.gethostname()),
        **options,
    )
    steps: dict[int, int] = {}
    for batch in collector:
        worker = int(batch["collector", "traj_ids"][0]) >> 40
        episodes, counts = batch["observation"][:, 1:].T.long()
        made = episodes * LENGTH + counts  # how many steps its worker had made before each
        assert made.diff().eq(1).all()
        assert made[0] == steps.get(worker, 0)  # not one is lost or comes twice
        steps[worker] = int(made[-1]) + 1
        print(f"worker {worker} batch {steps[worker] // 100}.", flush=True)
        time.sleep(0.02)


def start(trainer: Host, *nodes: Host | list[Host], **options: Any) -> Program:
    """A trainer with a node on each of these hosts; the next host of a list is where it is started again."""
    places = [[host.command() for host in (own if isinstance(own, list) else [own])] for own in nodes]
    program = trainer.call(train, places, options)
    for worker in range(len(nodes)):
        program.wait_for(f"worker {worker} batch 3.", 90.0)
    return program


def batches(program: Program, worker: int) -> int:
    return program.output().count(f"worker {worker} batch")


def go_on(program: Program, worker: int, more: int = 5) -> None:
    """Wait for more batches of a worker."""
    now = batches(program, worker)
    until(lambda: batches(program, worker) >= now + more)


def test_a_link_that_comes_back_costs_nothing() -> None:
    with hosts(3) as (here, near, far):
        trainer = start(here, near, far)
        said = len(trainer.output())  # nodes that start slowly are warned of
        far.cut()
        time.sleep(5.0)
        stuck = batches(trainer, 1)
        go_on(trainer, 0)
        assert batches(trainer, 1) == stuck
        far.restore()
        go_on(trainer, 0)
        go_on(trainer, 1)
        assert "Warning" not in trainer.output()[said:]


@pytest.mark.parametrize("fault", ["cut", "kill"])
def test_a_host_that_is_gone_is_named(fault: str) -> None:
    with hosts(2) as (here, far):
        trainer = start(here, far, node_timeout_s=2.0)
        getattr(far, fault)()
        said = trainer.wait_for("WorkerDiedError: Worker 0", 10.0)
        assert "host1, as what the command" in said
        # The command that has started it is on this machine: if it was killed, that may be seen first.
        assert "node_timeout_s=2" in said or (fault == "kill" and "SIGKILL" in said)
        assert trainer.wait() == 1
        until(lambda: not far.pids())  # a node without a trainer ends


@pytest.mark.parametrize(("fault", "cure"), [("cut", "drop"), ("kill", "restart")])
def test_collection_goes_on_without_a_host(fault: str, cure: str) -> None:
    with hosts(4) as (here, near, far, spare):
        trainer = start(here, near, [far, spare], node_timeout_s=2.0, on_worker_failure=cure)
        getattr(far, fault)()
        trainer.wait_for("WorkerRestartedWarning: Worker 1", 15.0)
        go_on(trainer, 0)
        if cure == "restart":
            trainer.wait_for("worker 2 batch 3.")  # the number of the new one
            assert spare.pids()


@pytest.mark.parametrize("whole_host", [False, True])
def test_nodes_do_not_outlive_their_trainer(whole_host: bool) -> None:
    with hosts(2) as (here, far):
        trainer = start(here, far, far, node_timeout_s=4.0)
        nodes = far.pids()
        assert len(nodes) == 2
        (here if whole_host else trainer).kill()
        until(lambda: all(map(is_gone, nodes)), 10.0)
