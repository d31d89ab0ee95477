"""Ships with the library: honest envs, envs that go wrong on command, and conformance suites.

The suites need pytest, which takes as long to import as a worker takes to start: they are imported when asked for, so
that a worker whose env is from here does without.
"""

import importlib
from typing import TYPE_CHECKING, Any

from swath.testing.checks import (
    assert_follows,
    assert_frames_belong,
    assert_ids_fit,
    assert_whole_episodes,
    assert_whole_in_a_row,
    counted,
)
from swath.testing.counting import CountingEnv, CountingGymEnv, CountingVectorEnv, counting_envs
from swath.testing.faulty_envs import FaultyError, FaultyGymEnv

if TYPE_CHECKING:
    from swath.testing.carrier_conformance import CarrierConformance
    from swath.testing.collector_conformance import CollectorConformance
    from swath.testing.env_conformance import EnvConformance

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

_SUITES = {f"{of.title()}Conformance": f"{__name__}.{of}_conformance" for of in ("carrier", "collector", "env")}


def __getattr__(name: str) -> Any:
    if name not in _SUITES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_SUITES[name]), name)
