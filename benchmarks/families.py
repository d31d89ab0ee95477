"""Workloads that differ in the number of workers only, as one table: a line for each number."""

from __future__ import annotations

from benchmarks.catalog import CATALOG
from benchmarks.figures import Figure
from benchmarks.results import Results


def table(results: Results, family: str) -> str:
    """Medians of everybody, and swath's ratio to each of the others."""
    members = [name for name in results.series if CATALOG[name].family == family]
    figures = CATALOG[members[0]].figures
    contestants = list(results.series[members[0]])
    headings = [f"{name}: {figure.heading}" for figure in figures for name in contestants]
    lines = [f"## {family}", "", f"| workers | {' | '.join(headings)} |", f"|---|{'---:|' * len(headings)}"]
    for member in members:
        cells = [_cell(results, member, name, figure) for figure in figures for name in contestants]
        lines.append(f"| {member.partition('x')[2]} | {' | '.join(cells)} |")
    failures = [
        f"- {member} {name} failed in {len(series.failures)} round(s): {'; '.join(dict.fromkeys(series.failures))}"
        for member in members
        for name, series in results.series[member].items()
        if series.failures
    ]
    return "\n".join([*lines, *([""] if failures else []), *failures])


def _cell(results: Results, workload: str, name: str, figure: Figure) -> str:
    series = results.series[workload].get(name)
    spread = series.spread(figure) if series else None
    if spread is None:
        return "failed" if series and series.failures else "-"
    ratio = None if name == "swath" else results.ratio(workload, "swath", name, figure)
    return figure.show(spread.median) + (f" ({ratio.median:.2f}x)" if ratio else "")
