"""The figures of a run, and what is derived from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.catalog import CATALOG
from benchmarks.figures import Figure


@dataclass(frozen=True)
class Spread:
    """A median with the lowest and highest value seen: five rounds do not carry more."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread | None:
        return cls(median(values), min(values), max(values)) if values else None


@dataclass
class Series:
    """One contestant in one workload: an entry per round, None where it failed."""

    rates: dict[str, list[float | None]]
    """By figure."""
    cpu_shares: list[float] = field(default_factory=list)
    busy_before: list[float] = field(default_factory=list)
    """For several processes: how busy the machine was with other work just before."""
    failures: list[str] = field(default_factory=list)
    absent: str | None = None
    """Why it could not take part, if so."""

    def spread(self, figure: Figure) -> Spread | None:
        return Spread.of([rate for rate in self.rates[figure.key] if rate is not None])


@dataclass
class Results:
    """Everything measured, by workload and contestant."""

    machine: dict[str, str]
    rounds: int
    seconds: float
    series: dict[str, dict[str, Series]] = field(default_factory=dict)

    def add(self, workload: str, contestant: str, outcome: Mapping[str, Any]) -> None:
        contestants = self.series.setdefault(workload, {})
        series = contestants.setdefault(contestant, Series({f.key: [] for f in CATALOG[workload].figures}))
        for key, rates in series.rates.items():
            rates.append(outcome.get(key))
        if outcome.get("busy_before") is not None:
            series.busy_before.append(outcome["busy_before"])
        if "absent" in outcome:
            series.absent = str(outcome["absent"])
        elif "failed" in outcome:
            series.failures.append(_without_paths(str(outcome["failed"])))
        elif "cpu_share" in outcome:  # not of several processes, which wait for each other
            series.cpu_shares.append(outcome["cpu_share"])

    def ratio(self, workload: str, above: str, below: str, figure: Figure) -> Spread | None:
        """How many times as fast `above` is as `below`; only figures of the same round meet."""
        contestants = self.series[workload]
        if above not in contestants or below not in contestants:
            return None
        if figure.less_is_better:
            above, below = below, above
        pairs = zip(contestants[above].rates[figure.key], contestants[below].rates[figure.key], strict=True)
        # a side that was starved to nothing has no ratio
        return Spread.of([a / b for a, b in pairs if a is not None and b])

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "threads": 1,
            "rounds": self.rounds,
            "seconds": self.seconds,
            "workloads": {
                workload: {name: self._entry(workload, name) for name in contestants}
                for workload, contestants in self.series.items()
            },
        }

    def _entry(self, workload: str, name: str) -> dict[str, Any]:
        series = self.series[workload][name]
        return {
            "figures": {figure.key: self._figure(workload, name, figure) for figure in CATALOG[workload].figures},
            "cpu_shares": series.cpu_shares,
            "busy_before": series.busy_before,
            "failures": series.failures,
            "absent": series.absent,
        }

    def _figure(self, workload: str, name: str, figure: Figure) -> dict[str, Any]:
        series = self.series[workload][name]
        spread, ratio = series.spread(figure), self.ratio(workload, "swath", name, figure)
        return {
            "rounds": series.rates[figure.key],
            "median": spread.median if spread else None,
            "swath_ratio": ratio.median if ratio else None,
        }


def _without_paths(reason: str) -> str:
    """File names only: an error may name directories, which are nobody's business in a table."""
    return re.sub(r"(?<![\w.])/(?=\S)(?:[^/'\"():]+/)+", "", reason)
