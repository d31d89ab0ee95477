"""The figures of a run, and what is derived from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any


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

    rates: list[float | None] = field(default_factory=list)
    cpu_shares: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def spread(self) -> Spread | None:
        return Spread.of([rate for rate in self.rates if rate is not None])


@dataclass
class Results:
    """Everything measured, by workload and contestant."""

    machine: dict[str, str]
    rounds: int
    seconds: float
    series: dict[str, dict[str, Series]] = field(default_factory=dict)

    def add(self, workload: str, contestant: str, outcome: Mapping[str, Any]) -> None:
        series = self.series.setdefault(workload, {}).setdefault(contestant, Series())
        if "failed" in outcome:
            series.rates.append(None)
            series.failures.append(_without_paths(str(outcome["failed"])))
        else:
            series.rates.append(outcome["frames_per_second"])
            series.cpu_shares.append(outcome["cpu_share"])

    def ratio(self, workload: str, above: str, below: str) -> Spread | None:
        """How many times as fast `above` is as `below`; only figures of the same round meet."""
        contestants = self.series[workload]
        if above not in contestants or below not in contestants:
            return None
        pairs = zip(contestants[above].rates, contestants[below].rates, strict=True)
        return Spread.of([a / b for a, b in pairs if a is not None and b is not None])

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
        ratio = self.ratio(workload, "swath", name)
        return {
            "frames_per_second": series.rates,
            "median": series.spread.median if series.spread else None,
            "cpu_shares": series.cpu_shares,
            "swath_ratio": ratio.median if ratio else None,
            "failures": series.failures,
        }


def _without_paths(reason: str) -> str:
    """File names only: an error may name directories, which are nobody's business in a table."""
    return re.sub(r"(?<![\w.])/(?=\S)(?:[^/'\"():]+/)+", "", reason)
