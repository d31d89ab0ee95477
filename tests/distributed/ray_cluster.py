"""A Ray cluster of two nodes on this machine, each with an address of its own on the loopback device.

Nodes are what `ray start` starts. A node that is removed is killed with all that runs there, as if its power had gone.
Ray listens on all devices wherever it runs, so that only the token (see `conftest.py`) keeps others out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import importing_env, until
from slurm import free_ports
from warden import START_S, Warden

NODES = 2
CPUS = 4
"""What each node says that it has; more than is true, so that actors need not wait for each other."""
STORE_BYTES = 150 * 2**20
SETTINGS = {
    # A worker is started when an actor needs it.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # A node that is gone is noticed in some 3 s, and not in 15 s; one that is merely slow may be so for longer.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
OPTIONS = (
    f"--num-cpus={CPUS} --num-gpus=0 --object-store-memory={STORE_BYTES} --include-log-monitor=false "
    # Ports that are free: the usual ones are the same for each node.
    "--min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0 --disable-usage-stats"
).split()


class RayNode:
    """A machine of the cluster, as Ray sees it."""

    def __init__(self, address: str, warden: Warden) -> None:
        self.address = address
        self.warden = warden

    @property
    def resources(self) -> dict[str, float]:
        """What an actor asks for that shall run here: `options(resources=node.resources)`."""
        return {f"node:{self.address}": 0.001}

    def pids(self) -> set[int]:
        """All processes of this node."""
        return self.warden.pids()


class RayCluster:
    """The cluster that runs; `running_ray` starts it."""

    def __init__(self, folder: Path) -> None:
        self.nodes: list[RayNode] = []
        self.port = free_ports(1)[0]
        self.folder = folder
        self._started = 0

    @property
    def address(self) -> str:
        """For `ray.init`."""
        return f"{self.nodes[0].address}:{self.port}"

    def start(self) -> None:
        """Start both nodes at the same time."""
        options = (f"--port={self.port}", "--include-dashboard=false", "--no-monitor", f"--temp-dir={self.folder}")
        head = self._start("--head", *options, tidy=f"rm -r {self.folder}")
        until(lambda: self._is_reachable() or head.warden.has_ended(), START_S)
        if self._is_reachable():
            self.add_node()
        head.warden.ready()  # or says why it could not start

    def add_node(self) -> RayNode:
        """Start another node, and wait until it belongs to the cluster."""
        node = self._start(f"--address={self.address}")
        node.warden.ready()
        return node

    def remove_node(self, node: RayNode) -> None:
        """Kill a node that is not the first one, with all that runs there."""
        assert node is not self.nodes[0], "the cluster does not outlive its first node"
        self.nodes.remove(node)
        node.warden.close()

    def complete(self) -> None:
        """Have two nodes again, whatever was added or removed, or is taken for dead as it was slow to answer."""
        import ray

        alive = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]} if ray.is_initialized() else None
        for node in self.nodes[1:]:
            if alive is not None and node.address not in alive:
                self.remove_node(node)
        for node in self.nodes[NODES:]:
            self.remove_node(node)
        while len(self.nodes) < NODES:
            self.add_node()

    @contextlib.contextmanager
    def connected(self, **options: Any) -> Iterator[None]:
        """This process as a driver, by `ray.init`, and on the first node."""
        import ray

        ray.init(self.address, log_to_driver=False, **options)
        try:
            yield
        finally:
            ray.shutdown()

    def close(self) -> None:
        """Kill all nodes."""
        while self.nodes:
            self.nodes.pop().warden.close()

    def _is_reachable(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.nodes[0].address, self.port)):
            return True
        return False

    def _start(self, *options: str, tidy: str = "") -> RayNode:
        self._started += 1
        address = f"127.0.0.{self._started + 1}"  # Ray takes 127.0.0.1 for the address of another device
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={address}"]
        log = self.folder / f"start-{address}.log"
        warden = Warden([*command, *options, *OPTIONS], log, tidy, importing_env(**SETTINGS))
        self.nodes.append(RayNode(address, warden))
        return self.nodes[-1]


def why_no_ray() -> str:
    """Why there cannot be a cluster here, or nothing."""
    return "" if importlib.util.find_spec("ray") else "Ray is not installed: pip install 'swath[ray]'"


@contextlib.contextmanager
def running_ray() -> Iterator[RayCluster]:
    """A cluster of two nodes; it, its actors and its files are gone afterwards."""
    if reason := why_no_ray():
        pytest.skip(reason)
    with contextlib.closing(RayCluster(Path(tempfile.mkdtemp(prefix="swath-ray-")))) as cluster:
        cluster.start()
        yield cluster
