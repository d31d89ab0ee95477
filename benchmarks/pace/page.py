"""The results of envs at their own pace as a page."""

from __future__ import annotations

from benchmarks import report
from benchmarks.results import Results

TITLE = "Envs at their own pace, measured"

CHECKED = """A ratio above 1 means
that swath is the faster one. Before the clock starts, the steps of each env are checked to follow each other over two
batches. The limit of envs that wait is how often they could step if nothing else took time; waiting itself costs about
20 us of a processor per step in Python, so that two cores cannot do much more than 256 such envs ask for.

`make bench BENCH_ARGS="--suite pace"` measures all of it again."""


def markdown(results: Results) -> str:
    return report.markdown(results, TITLE, CHECKED)
