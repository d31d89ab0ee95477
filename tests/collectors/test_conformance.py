"""All collectors do what the conformance suite asks."""

from typing import Any

from swath.collectors import BaseCollector, Collector
from swath.envs import GymEnv, SerialEnv
from swath.testing import CollectorConformance, CountingEnv, CountingGymEnv, counting_envs


class TestCollectorOnGymEnvs(CollectorConformance):
    """Separate gymnasium envs, stepped one after the other."""

    def make_collector(self, lanes: int, lengths: Any, **options: Any) -> BaseCollector:
        """One lane, or several in a SerialEnv."""
        if lanes == 0:
            return Collector(GymEnv(CountingGymEnv(lengths=lengths)), None, **options)
        factories = [lambda make=make: GymEnv(make) for make in counting_envs(lanes, lengths=lengths)]
        return Collector(SerialEnv(lanes, factories), None, **options)


class TestCollectorOnACustomEnv(CollectorConformance):
    """A custom env written with TensorDicts."""

    def make_collector(self, lanes: int, lengths: Any, **options: Any) -> BaseCollector:
        """Any number of lanes."""
        return Collector(CountingEnv((lanes,) if lanes else (), lengths=lengths), None, **options)
