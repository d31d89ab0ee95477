"""RayCollector, on a real cluster of two nodes: what it does that others do not, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from children import is_gone, until
from ray_cluster import RayCluster, why_no_ray
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from swath.collectors.distributed import RayCollector
from swath.errors import ClosedError, StallWarning, WorkerDiedError, WorkerRestartedWarning
from swath.modules import InferenceServer
from swath.testing import CountingEnv, assert_follows, assert_frames_belong

ray = pytest.importorskip("ray", reason=why_no_ray())
pytestmark = pytest.mark.timeout(120)

Make = Callable[..., RayCollector]


@pytest.fixture
def make(driver: RayCluster) -> Iterator[Make]:
    """Makes collectors of counting envs. When they are shut down, all of their actors are gone."""
    made: list[RayCollector] = []
    actors: set[int] = set()

    def build(count: int, **options: Any) -> RayCollector:
        made.append(RayCollector(CountingEnv, num_collectors=count, **{"frames_per_batch": 20, **options}))
        actors.update(made[-1].worker_pids)
        return made[-1]

    yield build
    for collector in made:
        if not collector.closed:
            actors.update(collector.worker_pids)
        collector.shutdown(raise_on_error=False)
    until(lambda: all(map(is_gone, actors)))


def ids(batches: list[TensorDictBase]) -> list[int]:
    return [int(one) for batch in batches for one in batch["collector", "traj_ids"].flatten()]


# -- batches and weights ---------------------------------------------------------------------------------------------


def test_sync_and_async_collectors_share_a_cluster(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, first_come = make(2, sync=True, total_frames=50), make(2, total_frames=110)
    rows: dict[int, list[TensorDictBase]] = {0: [], 1: []}
    for batch in first_come:
        rows[int(batch["observation"][0, 0])].append(batch)
    batches = list(sync)
    assert [tuple(batch.shape) for batch in batches] == [(2, 10), (2, 10), (2, 5)]
    assert_frames_belong(torch.cat(batches, 1))
    assert sorted(batch.numel() for own in rows.values() for batch in own) == [10, 20, 20, 20, 20, 20]
    for own in rows.values():
        assert_frames_belong(torch.cat(own))
    assert not set(ids(rows[0])) & set(ids(rows[1]))
    assert (sync.stats()["frames"], first_come.stats()["frames"]) == (50, 110)
    left: list[int] = []
    monkeypatch.setattr(ray, "shutdown", lambda: left.append(1))
    sync.shutdown()
    assert not left
    sync.shutdown(shutdown_ray=True)
    first_come.async_shutdown(shutdown_ray=True)
    assert left == [1, 1]


class Constant(nn.Module):
    """Acts by its first weight; it has more than go along with a message."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(50_000))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.stack([1.0 - self.value[0], self.value[0]]).expand(*observation.shape[:-1], 2)


def test_weights_are_put_once_for_all_nodes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from swath.collectors.distributed import ray_wire

    put, puts = ray_wire.put, []
    monkeypatch.setattr(ray_wire, "put", lambda value: puts.append(value.nbytes) or put(value))
    policy = Constant()
    collector = make(2, policy=TensorDictModule(policy, ["observation"], ["action"]), sync=True)  # endless
    batches = iter(collector)
    for version in range(1, 4):
        with torch.no_grad():
            policy.value.fill_(version % 2)
        collector.update_policy_weights_()
        until(lambda value=version % 2: bool((next(batches)["action"][..., 1] == value).all()))
    assert len(puts) <= 4, "the first weights, and three updates"
    assert min(puts) >= 200_000
    assert collector.policy_version == 3


def test_an_inference_server_acts_for_nodes_on_all_machines(make: Make, driver: RayCluster) -> None:
    driver.complete()
    policy = TensorDictModule(Constant(), ["observation"], ["action"])
    with InferenceServer(policy) as server:
        wants = [{"resources": node.resources} for node in driver.nodes]
        options: dict[str, Any] = {"sync": True, "remote_configs": wants, "on_worker_failure": "drop"}
        collector = make(2, policy=server.client(), **options)
        assert (collector.next()["action"][..., 1] == 0).all()
        server.update_policy_weights_({"module.value": torch.ones(50_000)})
        until(lambda: bool((collector.next()["action"][..., 1] == 1).all()))
        os.kill(collector.worker_pids[1], signal.SIGKILL)
        with pytest.warns(WorkerRestartedWarning, match="is dropped"):
            until(lambda: collector.next().shape == (1, 10))
        before = server.stats()["requests"]
        assert (collector.next()["action"][..., 1] == 1).all()
        assert server.stats()["requests"] > before
        server.shutdown()
        with pytest.raises(ClosedError, match="InferenceServer was shut down") as caught:
            list(collector)
        assert "worker 0" in "".join(caught.value.__notes__)


# -- nodes that come and go ------------------------------------------------------------------------------------------


def test_nodes_join(make: Make, driver: RayCluster) -> None:
    collector = make(1, sync=True, remote_configs={"resources": driver.nodes[0].resources})
    first = collector.next()
    collector.set_seed(7)
    assert collector.add_collectors(remote_configs={"resources": driver.nodes[1].resources}) == [1]
    assert len(collector.remote_collectors) == collector.num_workers == 2
    second = collector.next()
    assert (first.shape, second.shape) == ((1, 20), (2, 20))
    assert_frames_belong(second)
    assert len(set(ids([second[0]])) & set(ids([second[1]]))) == 0
    with pytest.raises(ValueError, match=r"worker 2 .* differs from worker 0"):
        collector.add_collectors([lambda: CountingEnv(kind="pixels")])
    assert_follows(second, collector.next())
    assert collector.stats()["workers_alive"] == 2


def test_a_removed_machine_and_one_that_is_added(make: Make, driver: RayCluster) -> None:
    driver.complete()
    wants = [{"num_cpus": 1, "resources": driver.nodes[0].resources}, {"num_cpus": 4}]  # of which one machine has 3
    collector = make(2, on_worker_failure="restart", remote_configs=wants)
    batches = [collector.next() for _ in range(5)]
    driver.remove_node(driver.nodes[1])
    driver.add_node()
    with pytest.warns(WorkerRestartedWarning, match="Worker 1 of RayCollector.* is restarted"):
        until(lambda: bool(batches.append(collector.next()) or collector.stats()["worker_restarts"]))
    lane_1 = len(batches)
    until(lambda: bool(batches.append(collector.next()) or batches[-1]["observation"][0, 0] == 1))
    assert not set(ids(batches[:lane_1])) & set(ids([batches[-1]]))
    assert collector.stats()["workers_alive"] == 2


def test_a_killed_actor_is_dropped_and_the_last_is_told_of(make: Make) -> None:
    collector = make(2, sync=True, on_worker_failure="drop")
    assert collector.next().shape == (2, 10)
    first, second = collector.worker_pids
    os.kill(second, signal.SIGKILL)
    with pytest.warns(WorkerRestartedWarning, match="Worker 1 of RayCollector.* is dropped, 1 are left"):
        assert collector.next().shape == (1, 10)
    assert len(collector.remote_collectors) == 1
    os.kill(first, signal.SIGKILL)
    where = r"127\.0\.0\.\d+, as the Ray actor \w+\. Ray says: its worker process has died"
    with pytest.raises(WorkerDiedError, match=rf"Worker 0 \(pid {first}\).* {where}"):
        list(collector)


def test_processes_of_a_node_end_with_its_actor(make: Make) -> None:
    collector = make(1, collector_class="async", num_workers_per_collector=2)
    assert collector.next().shape == (20,)
    processes = [one.pid for one in psutil.Process(collector.worker_pids[0]).children(recursive=True)]
    assert len(processes) >= 2
    os.kill(collector.worker_pids[0], signal.SIGKILL)
    until(lambda: all(map(is_gone, processes)), 10)


def test_a_cluster_without_room(driver: RayCluster) -> None:
    words = "it asks for 1000 CPU, but no machine has more than 4"
    with (
        pytest.warns(StallWarning, match=words),
        pytest.raises(TimeoutError, match=rf"Ray has not started an actor within 2 s: {words}.*remote_configs="),
    ):
        RayCollector(CountingEnv, frames_per_batch=10, remote_configs={"num_cpus": 1000}, start_timeout_s=2.0)


# -- the end ---------------------------------------------------------------------------------------------------------

PROGRAM = """
import psutil, ray, sys, time
from swath.collectors.distributed import RayCollector
from swath.testing import CountingEnv

options = {"log_to_driver": False, **eval(sys.argv[1])}
collector = RayCollector(CountingEnv, frames_per_batch=10, ray_init_config=options)
collector.next()
own = [psutil.Process(), *psutil.Process().children(recursive=True)]
listeners = {one.laddr.ip for each in own for one in each.net_connections("tcp") if one.status == "LISTEN"}
print(collector.worker_pids + [one.pid for one in own], "/", *listeners, flush=True)
for _ in collector if "address" in sys.argv[1] else iter(lambda: time.sleep(1), 0):
    pass
"""


@contextlib.contextmanager
def running(options: dict[str, Any]) -> Iterator[tuple[subprocess.Popen[str], list[int], set[str]]]:
    """Another trainer, the processes that are to end with it, and the addresses at which they listen."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, repr(options)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            pids, _, listeners = process.stdout.readline().partition("/")
            assert pids, process.communicate()[1]
            yield process, json.loads(pids), {address.removeprefix("::ffff:") for address in listeners.split()}
        finally:
            process.kill()
    until(lambda: all(map(is_gone, json.loads(pids))), 10)


def test_actors_end_with_a_trainer_that_is_killed(driver: RayCluster) -> None:
    with running({"address": driver.address}):
        pass


def test_a_cluster_of_our_own_is_reached_from_here_alone_and_ends_with_us() -> None:
    """Also when the collector was not shut down."""
    with running({"num_cpus": 1, "object_store_memory": 100_000_000}) as (process, _, listeners):
        assert listeners == {"127.0.0.1"}
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in process.communicate(timeout=30)[1]


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"remote_configs": [{}, {}], "num_collectors": 3}, "remote_configs has 2 elements for 3 workers"),
        ({"remote_configs": {"lifetime": "detached"}}, "an actor ends with its trainer"),
        ({"remote_configs": {"max_restarts": 3}}, "on_worker_failure="),
        ({"num_collectors": 0}, "num_workers must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RayCollector(CountingEnv, frames_per_batch=10, **options)


def test_a_ray_client_is_refused(driver: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    with pytest.raises(ValueError, match="on a machine of the cluster"):
        RayCollector(CountingEnv, frames_per_batch=10)


def test_without_ray_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'pip install "swath\[ray\]"'):
        RayCollector(CountingEnv, frames_per_batch=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collector = RayCollector(CountingEnv, frames_per_batch=10, total_frames=10, debug=True, use_env_creator=True)
        assert len(list(collector)) == 1


def test_ray_is_shut_down_before_the_collector(make: Make) -> None:
    """The last test: others need Ray."""
    collector = make(1)
    collector.next()
    ray.shutdown()
    with pytest.raises(WorkerDiedError):
        list(collector)
    collector.shutdown()
    assert not ray.is_initialized()
