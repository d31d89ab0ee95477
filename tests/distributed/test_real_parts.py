"""The hosts, the Slurm and the Ray that other tests stand on are real, and leave nothing behind."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from children import ANSWER_S, importing_env, is_gone, until
from hosts import hosts, why_no_hosts
from ray_cluster import RayCluster, running_ray, why_no_ray
from slurm import Slurm, running_slurm, why_no_slurm

PORT = 5000


def echo() -> None:
    with socket.create_server(("", PORT)) as server:
        print("listens on", socket.gethostbyname(socket.gethostname()))
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(100):
                connection.sendall(data)


def talk(to: str) -> None:
    """Send numbers one after the other, and print each that comes back."""
    with socket.create_connection((to, PORT)) as connection:
        for number in itertools.count():
            connection.sendall(b"%d" % number)
            print(f"<{connection.recv(100).decode()}>")
            time.sleep(0.001)


def knock(at: str) -> None:
    """Connect to a port where nobody listens: a host that is there says so at once."""
    try:
        socket.create_connection((at, PORT + 1), timeout=0.5)
    except OSError as error:
        print(type(error).__name__)


def sleeper() -> None:
    """Leave a process behind that nobody knows."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("left", child.pid)


def number_of_job() -> str:
    return os.environ["SLURM_JOB_ID"]


def add_up(rank: int, address: str, seconds: float) -> None:
    """Be one of two members of a process group."""
    import torch.distributed  # here, since no other program of this file needs it, and each would wait for it

    limit = datetime.timedelta(seconds=seconds)
    group = f"tcp://{address}:{PORT}"
    torch.distributed.init_process_group("gloo", init_method=group, rank=rank, world_size=2, timeout=limit)
    total = torch.tensor([float(rank + 1)])
    torch.distributed.all_reduce(total)
    print("total", total.item())
    torch.distributed.destroy_process_group()


def last_number(output: str) -> int:
    return int(output.rpartition("<")[2].partition(">")[0])


def test_hosts_talk_unless_the_cable_is_pulled() -> None:
    with hosts(2) as (trainer, node):
        server = trainer.call(echo)
        assert server.wait_for("listens").endswith(trainer.address)
        client = node.call(talk, trainer.name)
        client.wait_for("<10>")
        node.cut()
        assert node.call(knock, trainer.address).succeed() != "ConnectionRefusedError\n"
        stuck = last_number(client.output())
        assert node.call(knock, trainer.address).succeed() != "ConnectionRefusedError\n"
        assert last_number(client.output()) == stuck
        node.restore()
        client.wait_for(f"<{stuck + 10}>")
        until(lambda: node.call(knock, trainer.address).succeed() == "ConnectionRefusedError\n")


def test_a_killed_host_tells_nobody_and_can_come_back() -> None:
    with hosts(2) as (trainer, node):
        server = trainer.call(echo)
        server.wait_for("listens")
        client = node.call(talk, trainer.address)
        client.wait_for("<10>")
        left = int(node.call(sleeper).succeed().split()[1])
        assert node.pids() == {client.pid, left}
        node.kill()
        assert client.wait() == -signal.SIGKILL
        until(lambda: is_gone(left))
        assert trainer.call(knock, node.address).succeed() != "ConnectionRefusedError\n"
        assert trainer.pids() == {server.pid}  # it still waits
        node.restore()
        until(lambda: node.call(knock, trainer.address).succeed() == "ConnectionRefusedError\n")


def test_a_process_group_spans_hosts() -> None:
    with hosts(2) as pair:
        members = [host.call(add_up, rank, pair[0].address, ANSWER_S) for rank, host in enumerate(pair)]
        assert ["total 3.0" in member.succeed() for member in members] == [True, True]


def test_hosts_of_different_tests_do_not_meet() -> None:
    with hosts(1) as (one,), hosts(2) as (_, other):
        assert one.call(knock, other.address).succeed() != "ConnectionRefusedError\n"
        assert one.call(knock, "127.0.0.1").succeed() == "ConnectionRefusedError\n"  # that is itself
    assert not any(Path("/run/netns", host.namespace).exists() for host in (one, other))


def test_a_job_runs_and_is_cancelled(slurm: Slurm) -> None:
    done = slurm.submit("srun echo on $SLURM_JOB_NODELIST")
    long = slurm.submit("srun sleep 1000")
    assert slurm.wait_for(done, "COMPLETED", "FAILED") == "COMPLETED"
    assert slurm.output(done) == f"on {slurm.node}\n"
    slurm.wait_for(long, "RUNNING")
    idle = len(slurm.pids())
    assert slurm.jobs() == [str(long)]
    subprocess.run(["scancel", str(long)], check=True)  # finds our Slurm by itself
    slurm.wait_for(long, "CANCELLED")
    until(lambda: len(slurm.pids()) < idle)


def test_submitit_calls_a_function_in_a_job(slurm: Slurm, tmp_path: Path) -> None:
    submitit = pytest.importorskip("submitit")
    executor = submitit.AutoExecutor(tmp_path)
    assert executor.cluster == "slurm"
    executor.update_parameters(timeout_min=1, cpus_per_task=1, mem_gb=1)
    job = executor.submit(number_of_job)
    assert job.result() == job.job_id


def test_an_actor_on_each_node_answers(ray_cluster: RayCluster) -> None:
    import ray

    @ray.remote
    class Actor:
        def where(self) -> str:
            return str(ray.util.get_node_ip_address())

    with ray_cluster.connected():
        first, second = ray_cluster.nodes
        actors = [Actor.options(resources=node.resources).remote() for node in (first, second)]
        assert ray.get([actor.where.remote() for actor in actors]) == [first.address, second.address]
        pids = second.pids()
        ray_cluster.remove_node(second)
        assert all(map(is_gone, pids))
        third = ray_cluster.add_node()
        now = {first.address, third.address}
        until(lambda: {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]} == now)
        assert ray.get(Actor.options(resources=third.resources).remote().where.remote()) == third.address


def leave(paths: Iterable[object], pids: Iterable[int]) -> None:
    """End without any tidying, as a test that takes too long does."""
    print(json.dumps({"paths": [*map(str, paths)], "pids": [*pids]}), flush=True)
    os._exit(0)


def leave_hosts() -> None:
    with hosts(1) as (host,):
        leave([Path("/run/netns", host.namespace)], [host.start("sleep", "1000").pid])


def leave_slurm() -> None:
    with running_slurm() as slurm:
        slurm.wait_for(slurm.submit("srun sleep 1000"), "RUNNING")
        leave([slurm.folder], slurm.pids())


def leave_ray() -> None:
    with running_ray() as cluster:
        leave([cluster.folder], cluster.nodes[0].pids() | cluster.nodes[1].pids())


@pytest.mark.parametrize(
    ("part", "why_not"), [(leave_hosts, why_no_hosts), (leave_slurm, why_no_slurm), (leave_ray, why_no_ray)]
)
def test_nothing_outlives_the_process_of_a_test(part: Callable[[], None], why_not: Callable[[], str]) -> None:
    if reason := why_not():
        pytest.skip(reason)
    program = f"import {__name__} as tests; tests.{part.__name__}()"
    left = json.loads(subprocess.check_output([sys.executable, "-c", program], env=importing_env()))
    assert left["pids"]
    until(lambda: all(map(is_gone, left["pids"])) and not any(map(os.path.exists, left["paths"])))
