"""Collectors do the same when their batches and weights come by RPC."""

from typing import Any

import pytest
from kinds import Kind
from node_kinds import twins

from swath.collectors import BaseCollector
from swath.collectors.distributed import RPCCollector
from swath.testing import CollectorConformance

RPCS = twins("rpc", RPCCollector, launcher="mp")


class TestCollectorsOverRpc(CollectorConformance):
    kind: Kind

    @pytest.fixture(autouse=True, params=[RPCS["sync"], RPCS["async"]], ids=str)
    def _kind(self, request: pytest.FixtureRequest) -> None:
        self.kind = request.param
        self.batches_ahead = self.kind.ahead

    def make_collector(self, lanes: int, lengths: Any, **options: Any) -> BaseCollector:
        return self.kind.make(lanes, lengths, **options)
