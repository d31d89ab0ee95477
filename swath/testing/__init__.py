"""Ships with the library: honest envs, envs that go wrong on command, and conformance suites."""

from swath.testing.checks import (
    assert_follows,
    assert_frames_belong,
    assert_ids_fit,
    assert_whole_episodes,
    assert_whole_in_a_row,
)
from swath.testing.conformance import CollectorConformance, EnvConformance
from swath.testing.counting import CountingEnv, CountingGymEnv, counting_envs
from swath.testing.faults import FaultyError, FaultyGymEnv

__all__ = [
    "CollectorConformance",
    "CountingEnv",
    "CountingGymEnv",
    "EnvConformance",
    "FaultyError",
    "FaultyGymEnv",
    "assert_follows",
    "assert_frames_belong",
    "assert_ids_fit",
    "assert_whole_episodes",
    "assert_whole_in_a_row",
    "counting_envs",
]
