"""What is measured of inference servers (W14), the same for every contestant.

A small network, asked by 1 to 64 clients that do nothing else: what is left is the way to the server and back, and how
well requests are put together. `W14t` are threads of the server's own process, `W14p` processes, with the server in one
of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.figures import Figure

CLIENTS = (1, 4, 16, 64)
INPUTS, OUTPUTS = 4, 2

_FIGURES = (
    Figure("requests_per_second", "requests/s"),
    Figure("p50_ms", "ms, median", 3, less_is_better=True),
    Figure("p95_ms", "ms, 95%", 3, less_is_better=True),
)


@dataclass(frozen=True)
class InferenceWorkload:
    """One setting."""

    name: str
    title: str
    clients: int
    in_processes: bool
    family: str
    figures: tuple[Figure, ...] = _FIGURES
    contestants: tuple[str, ...] = ("swath", "peer_default", "peer_fastest")


def _workload(clients: int, in_processes: bool) -> InferenceWorkload:
    where = "processes" if in_processes else "threads"
    family = f"W14, clients in {where}: a small network asked by more and more clients"
    return InferenceWorkload(f"W14{where[0]}x{clients}", f"{clients} clients in {where}", clients, in_processes, family)


WORKLOADS: dict[str, InferenceWorkload] = {
    w.name: w for w in (_workload(clients, where) for where in (False, True) for clients in CLIENTS)
}
