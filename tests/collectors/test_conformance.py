"""All collectors do what the conformance suite asks."""

from typing import Any

import pytest
from kinds import EVERY, Kind

from swath.collectors import BaseCollector, Collector
from swath.envs import GymEnv, SerialEnv
from swath.testing import CollectorConformance, CountingGymEnv, counting_envs


class TestEveryKind(CollectorConformance):
    """On custom envs."""

    kind: Kind

    @pytest.fixture(autouse=True, params=EVERY, ids=str)
    def _kind(self, request: pytest.FixtureRequest) -> None:
        self.kind = request.param
        self.batches_ahead = self.kind.ahead

    def make_collector(self, lanes: int, lengths: Any, **options: Any) -> BaseCollector:
        return self.kind.make(lanes, lengths, **options)


class TestCollectorOnGymEnvs(CollectorConformance):
    """Separate gymnasium envs, stepped one after the other."""

    def make_collector(self, lanes: int, lengths: Any, **options: Any) -> BaseCollector:
        """One lane, or several in a SerialEnv."""
        if lanes == 0:
            return Collector(GymEnv(CountingGymEnv(lengths=lengths)), None, **options)
        factories = [lambda make=make: GymEnv(make) for make in counting_envs(lanes, lengths=lengths)]
        return Collector(SerialEnv(lanes, factories), None, **options)


SUITE = """
from swath.collectors import Collector
from swath.testing import CollectorConformance, CountingEnv

class Unsized(Collector):
    def __len__(self):
        raise RuntimeError("unknown")

class TestUnsized(CollectorConformance):
    cannot = {{"test_len": "unknown", "{other}": "an excuse"}}

    def make_collector(self, lanes, lengths, **options):
        return Unsized(CountingEnv((lanes,) if lanes else (), lengths=lengths), None, **options)
"""


@pytest.mark.parametrize("other", ["test_stats", "test_status"])
def test_what_a_class_cannot_do_must_fail_and_be_a_test(pytester: pytest.Pytester, other: str) -> None:
    """An entry for something that it can do fails, as does one that is no test of the suite."""
    pytester.makepyfile(SUITE.format(other=other))
    outcome = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "test_len or test_stats or named")
    outcome.assert_outcomes(xfailed=1, failed=1, passed=1)
