"""Ships with the library: honest envs, envs that go wrong on command, and conformance suites."""

from swath.testing.checks import (
    assert_follows,
    assert_frames_belong,
    assert_ids_fit,
    assert_whole_episodes,
    assert_whole_in_a_row,
    counted,
)
from swath.testing.conformance import CollectorConformance, EnvConformance
from swath.testing.counting import CountingEnv, CountingGymEnv, CountingVectorEnv, counting_envs
from swath.testing.faults import FaultyError, FaultyGymEnv
from swath.testing.reference import CountingReference, Frame, assert_holds

__all__ = [
    "CollectorConformance",
    "CountingEnv",
    "CountingGymEnv",
    "CountingReference",
    "CountingVectorEnv",
    "EnvConformance",
    "FaultyError",
    "FaultyGymEnv",
    "Frame",
    "assert_follows",
    "assert_frames_belong",
    "assert_holds",
    "assert_ids_fit",
    "assert_whole_episodes",
    "assert_whole_in_a_row",
    "counted",
    "counting_envs",
]
