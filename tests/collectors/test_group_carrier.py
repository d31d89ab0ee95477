"""Collectors do the same when their batches and weights come through process groups."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import test_delivery
import test_lifecycle
import test_options
import test_reflection
import test_seeding
import test_state
import test_weights
import torch
from kinds import Kind, joined
from node_kinds import GROUPS

from swath.collectors import BaseCollector
from swath.collectors.distributed.groups import GroupWire
from swath.collectors.distributed.wire import NODE, TRAINER
from swath.runtime.channel import Channel
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


def test_a_body_lands_where_it_is_expected_although_others_never_come() -> None:
    """As of orders that a node has discarded: two are expected, and the second one is sent."""
    channel, end = Channel.pair()
    with ThreadPoolExecutor(1) as other:
        making = other.submit(GroupWire, Channel(end), NODE, "gloo", 10.0)
        trainer = GroupWire(channel, TRAINER, "gloo", 10.0)
        node = making.result(10)
        spaces = [torch.zeros(3_000_000, dtype=torch.uint8) for _ in range(2)]
        for number, space in enumerate(spaces, 1):
            trainer.expect(number, space)
        for number, value in ((2, 7), (3, 9)):  # the last one was not announced
            sending = other.submit(node.send, b"parcel", torch.full((3_000_000,), value, dtype=torch.uint8), number)
            assert trainer.receive() == b"parcel"
            trainer.fetch(spaces[1], number)
            sending.result(10)
            assert bool((spaces[1] == value).all())
        assert not spaces[0].any()
        trainer.close()
        node.close()
