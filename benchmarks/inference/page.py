"""The results of inference servers as a page."""

from __future__ import annotations

from benchmarks import report
from benchmarks.results import Results

TITLE = "Inference servers, measured"

CHECKED = """A ratio above 1 means
that swath is the faster one, of times as well. Each client's first answers are compared with those of the network
itself. Clients do nothing but ask, all from two cores, which they share with the server; "workers" are clients.

`make bench BENCH_ARGS="--suite inference"` measures all of it again."""


def markdown(results: Results) -> str:
    return report.markdown(results, TITLE, CHECKED)
