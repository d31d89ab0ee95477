"""The results of several processes as a page."""

from __future__ import annotations

from benchmarks import report
from benchmarks.results import Results

TITLE = "Several processes, measured"

CHECKED = """A ratio above 1 means
that swath is the faster one, of times as well. Before the clock starts, batches are checked for their content, stepped
envs for the motion of CartPole and for resets, and new weights for their arrival in every worker. There are two workers
unless a line says otherwise, and two cores: the trainer's process shares them with the workers. Other work makes
the ratio of workers to one process meaningless (Linux divides cores among sessions, so that two workers then get
as much as one process); frames per CPU second are then the better measure, and a note says where it was so.

`make bench-processes` measures all of it again, `make bench BENCH_ARGS="--workloads W4,W8a --rounds 2"` some of it.
PufferLib asks for releases of numpy, gym and gymnasium that nobody else here can use; its vector backend also runs with
newer ones: `pip install --no-deps --target DIRECTORY pufferlib==1.0.1 gym==0.23.0 pettingzoo==1.24.3`, and
`PYTHONPATH=DIRECTORY` when measuring. Without it its lines say that it is not installed."""


def markdown(results: Results) -> str:
    return report.markdown(results, TITLE, CHECKED)
