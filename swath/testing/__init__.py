"""Ships with the library: honest envs, envs that go wrong on command, and conformance suites."""

from swath.testing.carrier_conformance import CarrierConformance
from swath.testing.checks import (
    assert_follows,
    assert_frames_belong,
    assert_ids_fit,
    assert_whole_episodes,
    assert_whole_in_a_row,
    counted,
)
from swath.testing.collector_conformance import CollectorConformance
from swath.testing.counting import CountingEnv, CountingGymEnv, CountingVectorEnv, counting_envs
from swath.testing.env_conformance import EnvConformance
from swath.testing.faulty_envs import FaultyError, FaultyGymEnv

__all__ = [
    "CarrierConformance",
    "CollectorConformance",
    "CountingEnv",
    "CountingGymEnv",
    "CountingVectorEnv",
    "EnvConformance",
    "FaultyError",
    "FaultyGymEnv",
    "assert_follows",
    "assert_frames_belong",
    "assert_ids_fit",
    "assert_whole_episodes",
    "assert_whole_in_a_row",
    "counted",
    "counting_envs",
]
