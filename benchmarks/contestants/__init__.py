"""Who takes part: one module each, with `build(workload)` that returns a `Run`.

Contestants are imported by name and only in the process that measures them, so that nobody pays for
another's imports, settings or threads, and so that one that cannot even be imported is a failed row
in the table instead of the end of the comparison.
"""

from __future__ import annotations

from importlib import import_module

from benchmarks.batch import Run
from benchmarks.workloads import Workload

CONTESTANTS: dict[str, str] = {
    "swath": "swath's Collector: GymEnv for one env, SerialEnv for several",
    "peer_default": "TorchRL's Collector as its documentation shows it: GymEnv or SerialEnv",
    "peer_fastest": "TorchRL's Collector with the fastest in-process settings found for it",
    "handwritten": "a careful loop over gymnasium envs, no library in between",
    "gym_vector": "the same sampling over gymnasium's SyncVectorEnv",
    "env_alone": "the envs stepped with prepared actions: no policy, nothing stored",
}


def build(name: str, workload: Workload) -> Run:
    """Make the contestant ready to collect."""
    if name not in CONTESTANTS:
        raise ValueError(f"no contestant {name!r}; there are {', '.join(CONTESTANTS)}")
    run: Run = import_module(f"benchmarks.contestants.{name}").build(workload)
    return run
