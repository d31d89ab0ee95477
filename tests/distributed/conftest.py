"""Real parts: hosts, Slurm and Ray. What takes seconds to start is started once, for all tests that ask for it."""

import os
import secrets
from collections.abc import Iterator

import pytest
from children import importing_env
from ray_cluster import RayCluster, running_ray
from slurm import Slurm, running_slurm

# Ray reads these once. Without a token in the environment it would write one into the user's home.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_USAGE_STATS_ENABLED="0")


@pytest.fixture(scope="session")
def slurm_of_session() -> Iterator[Slurm]:
    with running_slurm() as slurm:
        yield slurm
    assert not slurm.folder.exists()


@pytest.fixture
def slurm(slurm_of_session: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """A Slurm without jobs, which commands and submitit find by themselves; its jobs import what the test can."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_of_session.conf))
    monkeypatch.setenv("PYTHONPATH", importing_env()["PYTHONPATH"])
    yield slurm_of_session
    slurm_of_session.cancel_all()


@pytest.fixture(scope="session")
def ray_of_session() -> Iterator[RayCluster]:
    with running_ray() as cluster:
        yield cluster
    assert not cluster.folder.exists()


@pytest.fixture(scope="module")
def driver(ray_of_session: RayCluster) -> Iterator[RayCluster]:
    """This process as a driver of the cluster."""
    with ray_of_session.connected():
        yield ray_of_session


@pytest.fixture
def ray_cluster(ray_of_session: RayCluster) -> RayCluster:
    """A cluster of two nodes, whatever other tests did to it, and no connection to it yet."""
    ray_of_session.complete()
    return ray_of_session
