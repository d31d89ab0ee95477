"""Results as a page that can be read without having seen the code."""

from __future__ import annotations

from benchmarks import families
from benchmarks.catalog import CATALOG
from benchmarks.figures import Figure
from benchmarks.results import Results, Series, Spread

BUSY = 0.9
"""Below this share of a processor the figure was disturbed by other work, and the page says so."""


CHECKED = (
    "Before the clock starts,\neach contestant that stores data must deliver two batches with the same agreed "
    "content, final\nobservations and log-probs included; and what a buffer delivers must be whole frames, as they "
    "were written."
)


ONE_THREAD = "One thread for everybody (`torch.set_num_threads(1)`, no environment\nvariable)."


def markdown(
    results: Results, title: str = "Benchmark results", checked: str = CHECKED, threads: str = ONE_THREAD
) -> str:
    """The whole page."""
    parts = [f"# {title}", _conditions(results, checked, threads)]
    done: set[str] = set()
    for workload in results.series:
        family = CATALOG[workload].family
        if not family:
            parts.append(_table(results, workload))
        elif family not in done:
            parts.append(families.table(results, family))
            done.add(family)
    parts.append(_legend(results))
    return "\n\n".join(parts) + "\n"


def _conditions(results: Results, checked: str, threads: str) -> str:
    facts = dict(results.machine)
    cpu, cores, system = facts.pop("cpu"), facts.pop("cores"), facts.pop("system")
    versions = ", ".join(f"{name} {version}" for name, version in facts.items())
    return (
        f"{cpu}, {cores} cores, {system}; {versions}.\n\n"
        f"{results.rounds} rounds of {results.seconds:g} s per figure after a warm-up, a new "
        f"process for each figure,\ncontestants taking turns. {threads} Rates: median "
        "and, in brackets, lowest to highest round. Ratio: swath's rate divided by\nthe "
        "contestant's, taken within each round, then median and range over the rounds. " + checked
    )


def _table(results: Results, workload: str) -> str:
    entry = CATALOG[workload]
    headings = [heading for figure in entry.figures for heading in (figure.heading, "swath / contestant")]
    lines = [
        f"## {workload}: {entry.heading}",
        "",
        f"| contestant | {' | '.join(headings)} |",
        f"|---|{'---:|' * len(headings)}",
    ]
    lines += [_row(results, workload, name) for name in results.series[workload]]
    notes = [note for name, series in results.series[workload].items() for note in _notes(name, series)]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _row(results: Results, workload: str, name: str) -> str:
    series = results.series[workload][name]
    cells = [name]
    for figure in CATALOG[workload].figures:
        cells.append(_rate(series, figure))
        cells.append("" if name == "swath" else _ratio(results.ratio(workload, "swath", name, figure)))
    return f"| {' | '.join(cells)} |"


def _rate(series: Series, figure: Figure) -> str:
    if series.absent is not None:
        return series.absent
    spread = series.spread(figure)
    if spread is None:
        return "failed"
    return f"{figure.show(spread.median)} ({figure.show(spread.low)} to {figure.show(spread.high)})"


def _ratio(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:.2f}x ({spread.low:.2f} to {spread.high:.2f})"


def _notes(name: str, series: Series) -> list[str]:
    """What the reader must know before trusting a row."""
    notes = []
    if series.failures:
        reasons = "; ".join(dict.fromkeys(series.failures))
        notes.append(f"- {name} failed in {len(series.failures)} round(s): {reasons}")
    disturbed = sum(share < BUSY for share in series.cpu_shares)
    if disturbed:
        notes.append(f"- {name}: in {disturbed} round(s) it had less than {BUSY:.0%} of a core")
    disturbed = sum(share > 1 - BUSY for share in series.busy_before)
    if disturbed:
        notes.append(f"- {name}: in {disturbed} round(s) other work took more than {1 - BUSY:.0%} of the machine")
    return notes


def _legend(results: Results) -> str:
    """What the names mean, once for each set of workloads that share a meaning."""
    parts = []
    for legend in {id(CATALOG[workload].legend): CATALOG[workload].legend for workload in results.series}.values():
        workloads = [workload for workload in results.series if CATALOG[workload].legend is legend]
        shown = {name for workload in workloads for name in results.series[workload]}
        lines = [f"- **{name}**: {text}" for name, text in legend.items() if name in shown]
        parts.append("\n".join([f"## Contestants in {', '.join(workloads)}", "", *lines]))
    return "\n\n".join(parts)
