"""Collectors do the same over a carrier that shares nothing but bytes with its workers, without a change in swath."""

from typing import Any

import pytest
from kinds import Kind
from socket_carrier import SocketCarrier
from socket_kinds import SOCKET_ASYNC, SOCKET_SYNC

from swath.collectors import BaseCollector
from swath.runtime.carrier import Carrier
from swath.testing import CarrierConformance, CollectorConformance


class TestSocketCarrier(CarrierConformance):
    def make_carrier(self, workers: int, fields: tuple[str, ...]) -> Carrier:
        return SocketCarrier(workers, fields)


class TestCollectorsOverSockets(CollectorConformance):
    kind: Kind

    @pytest.fixture(autouse=True, params=(SOCKET_SYNC, SOCKET_ASYNC), ids=str)
    def _kind(self, request: pytest.FixtureRequest) -> None:
        self.kind = request.param
        self.batches_ahead = self.kind.ahead

    def make_collector(self, lanes: int, lengths: Any, **options: Any) -> BaseCollector:
        return self.kind.make(lanes, lengths, **options)
