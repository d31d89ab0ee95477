"""The cliffs as one table: swath's rate as a share of that of the loop by hand, as a number and as a bar."""

from __future__ import annotations

from benchmarks import report
from benchmarks.catalog import CATALOG
from benchmarks.figures import FRAMES
from benchmarks.results import Results

WIDTH = 40
"""Of a bar that is four times as fast."""


def markdown(results: Results) -> str:
    """The picture first, then the figures."""
    lines = ["| setting | held against | share | |", "|---|---|---:|---|"]
    for name in results.series:
        for other in results.series[name]:
            ratio = None if other == "swath" else results.ratio(name, "swath", other, FRAMES)
            if ratio is not None:
                bar = "█" * min(WIDTH, round(ratio.median * WIDTH / 4))
                lines.append(f"| {name}: {CATALOG[name].heading} | {other} | {ratio.median:.2f} | {bar} |")
    checked = "A share of 1 is as fast as the other; a full bar is four times as fast."
    threads = "As many threads as torch takes by itself, and no\nenvironment variable, as most people run it."
    page = report.markdown(results, "Beside the loop that a careful user writes", checked, threads)
    head, _, rest = page.partition("\n## ")
    return f"{head}\n\n" + "\n".join(lines) + f"\n\n## {rest}"
