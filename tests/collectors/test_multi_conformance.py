"""Collectors with workers do what the conformance suite asks of all collectors."""

from __future__ import annotations

from typing import Any

from swath.collectors import AsyncCollector, BaseCollector, MultiAsyncCollector, MultiSyncCollector
from swath.testing import CollectorConformance, CountingEnv


def env(lanes: int, lengths: Any) -> Any:
    return lambda: CountingEnv((lanes,) if lanes else (), lengths=lengths)


class TestMultiSync(CollectorConformance):
    """A worker for each lane, whose parts lie in one batch."""

    hooks_run_here = False

    def make_collector(self, lanes: int, lengths: Any, **options: Any) -> BaseCollector:
        if not lanes:
            return MultiSyncCollector([env(0, lengths)], None, cat_results=-1, **options)
        return MultiSyncCollector([env(0, lengths)] * lanes, None, **options)


class TestMultiSyncInThisProcess(TestMultiSync):
    """The same with debug=True."""

    def make_collector(self, lanes: int, lengths: Any, **options: Any) -> BaseCollector:
        return super().make_collector(lanes, lengths, debug=True, **options)


class TestAsync(CollectorConformance):
    """One worker, which collects ahead."""

    hooks_run_here = False
    batches_ahead = 2

    def make_collector(self, lanes: int, lengths: Any, **options: Any) -> BaseCollector:
        return AsyncCollector(env(lanes, lengths), None, **options)


class TestMultiAsyncInThisProcess(CollectorConformance):
    """One worker of the class for many, with debug=True."""

    hooks_run_here = False
    batches_ahead = 2

    def make_collector(self, lanes: int, lengths: Any, **options: Any) -> BaseCollector:
        return MultiAsyncCollector([env(lanes, lengths)], None, debug=True, **options)


class TestMultiAsyncWithoutRunningAhead(CollectorConformance):
    """`max_staleness=0`: a batch is begun when it is asked for."""

    hooks_run_here = False

    def make_collector(self, lanes: int, lengths: Any, **options: Any) -> BaseCollector:
        return MultiAsyncCollector([env(lanes, lengths)], None, max_staleness=0, debug=True, **options)
