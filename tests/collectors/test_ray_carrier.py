"""Collectors do the same when their workers are actors of Ray."""

import os
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from kinds import Kind
from node_kinds import twins

from swath.collectors import BaseCollector
from swath.collectors.distributed import RayCollector
from swath.runtime.ray_joining import connect
from swath.testing import CollectorConformance

# Ray reads these when it is imported. Without a token in the environment it would write one into the user's home.
for name, value in {"AUTH_MODE": "token", "AUTH_TOKEN": secrets.token_hex(32), "USAGE_STATS_ENABLED": "0"}.items():
    os.environ.setdefault(f"RAY_{name}", value)
ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'swath[ray]'")
pytestmark = [
    pytest.mark.skipif("SWATH_LONG" not in os.environ, reason="actors take seconds to start: SWATH_LONG=1"),
    pytest.mark.timeout(300),
]
RAYS = twins("ray", RayCollector, remote_configs={"num_cpus": 0.01})


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    connect({"log_to_driver": False})
    yield
    ray.shutdown()


class TestCollectorsOverRay(CollectorConformance):
    kind: Kind

    @pytest.fixture(autouse=True, params=[RAYS["sync"], RAYS["async"]], ids=str)
    def _kind(self, request: pytest.FixtureRequest) -> None:
        self.kind = request.param
        self.batches_ahead = self.kind.ahead

    def make_collector(self, lanes: int, lengths: Any, **options: Any) -> BaseCollector:
        return self.kind.make(lanes, lengths, **options)
