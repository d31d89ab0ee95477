"""Collectors do the same when their batches and weights come through process groups."""

from typing import Any

import pytest
import test_delivery
import test_lifecycle
import test_options
import test_reflection
import test_seeding
import test_state
import test_weights
from kinds import Kind, joined
from node_kinds import GROUPS

from swath.collectors import BaseCollector
from swath.testing import CollectorConformance


class TestCollectorsOverGroups(CollectorConformance):
    kind: Kind

    @pytest.fixture(autouse=True, params=[GROUPS["sync"], GROUPS["async"]], ids=str)
    def _kind(self, request: pytest.FixtureRequest) -> None:
        self.kind = request.param
        self.batches_ahead = self.kind.ahead

    def make_collector(self, lanes: int, lengths: Any, **options: Any) -> BaseCollector:
        return self.kind.make(lanes, lengths, **options)


CANNOT = {
    "test_workers_write_to_the_buffer_while_the_consumer_rests": "the trainer writes what nodes have sent",
}
"""Tests of processes, and why they are not for nodes."""
for module in (
    test_delivery,
    test_lifecycle,
    test_options,
    test_reflection,
    test_seeding,
    test_state,
    test_weights,
):
    globals().update(joined(module, GROUPS, CANNOT))
