"""Collectors do the same over a carrier that shares nothing but bytes with its workers, without a change in swath."""

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
from socket_carrier import SocketCarrier
from socket_kinds import SOCKET_ASYNC, SOCKET_SYNC, TWINS

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


THREADS = "workers are threads of this process"
CANNOT = {
    "test_exploration_type": f"{THREADS}, for which the exploration type is one",
    "test_num_threads_and_num_sub_threads": f"{THREADS}, for which torch has one setting",
    "test_workers_leave_the_random_numbers_of_this_process_alone": f"{THREADS}, and share its generators",
    "test_a_seed_decides_all_that_workers_draw": f"{THREADS}, and share its generators",
    "test_a_policy_factory_for_all_workers": f"{THREADS}, and have its number",
    "test_publishing_does_not_wait_for_a_stopped_worker": f"{THREADS}, which cannot be stopped",
    "test_no_frame_is_made_by_half_of_an_update": "10,000 messages take long; another test runs free meanwhile",
}
"""Tests of processes, and why they are not for workers over sockets."""
for module in (test_delivery, test_lifecycle, test_options, test_reflection, test_seeding, test_state, test_weights):
    tests = joined(module, TWINS, CANNOT)
    assert not set(tests) & set(globals())
    globals().update(tests)
