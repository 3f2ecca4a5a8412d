"""Records of operators' benchmarks as rows: the same for the terminal, for a document and for a figure."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table as RichTable

from xentflow.bench.measure import Comparison, floor, middle

Rows = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""A title, headings and rows."""


def tables(record: Mapping[str, Any]) -> Iterator[Rows]:
    """What a record of ``bench attention``, ``loss`` or ``block`` holds."""
    for told in record["comparisons"]:
        comparison = Comparison(**told)
        yield (
            comparison.title,
            ("way", "fastest, ms", "median, ms", "× ours (fastest)", "× ours (median)"),
            [
                *_ways(comparison),
                ("floor", f"{1e3 * floor(comparison, record['rates']):.1f}", "", "", ""),
            ],
        )
    peaks: list[tuple[str, ...]] = [
        (peak["title"], f"{peak['mib']:.0f}", f"{peak['seconds']:.2f}") for peak in record["peaks"]
    ]
    yield "Peak memory beyond inputs and outputs, each in a fresh process", ("what", "MiB", "seconds"), peaks
    growths: list[tuple[str, ...]] = []
    turns = min(told["turns"] for told in record["growths"])
    calls = {told.get("calls") for told in record["growths"]}
    for told in record["growths"]:
        sizes = ", ".join(f"{size:,}" for size in told["sizes"])
        time, memory = told["exponents"]
        growths.append((told["title"], told["over"], sizes, f"{time:.2f}", f"{memory:.2f}"))
    # Records of before calls were counted say of turns alone.
    each = "" if None in calls else f" of {min(calls)} calls each"
    heading = f"Growth: the slope of logarithms, of time by the fastest of {turns} turns{each}"
    yield heading, ("what", "over", "sizes", "of time", "of memory"), growths


def notes(record: Mapping[str, Any]) -> list[str]:
    """Rates of this machine, and the part of the floor that is reached."""
    rates = ", ".join(
        f"{name.split(',')[0]} {value:.0f} {name.split(', ')[1]}" for name, value in record["rates"].items()
    )
    found = [f"Rates here: {rates}."]
    for told in record["comparisons"]:
        comparison = Comparison(**told)
        share = floor(comparison, record["rates"]) / min(comparison.seconds[comparison.ours])
        work = f"{comparison.gflop:.1f} GFLOP of products, {comparison.mib:.0f} MiB read and written at least"
        found.append(f"{comparison.title}: {work}; {share:.0%} of the floor's speed.")
    return found


def as_terminal(rows: Rows) -> RichTable:
    """For the terminal."""
    title, headings, lines = rows
    shown = RichTable(title=title, title_justify="left", box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if number else "left")
    for line in lines:
        shown.add_row(*line)
    return shown


def as_markdown(record: Mapping[str, Any]) -> str:
    """For a document."""
    parts = []
    for title, headings, lines in tables(record):
        rule = ["---", *["---:"] * (len(headings) - 1)]
        parts.append(f"**{title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *lines)))
    return "\n\n".join([*parts, *notes(record)]) + "\n"


def _ways(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    ours = comparison.seconds[comparison.ours]
    for name, seconds in comparison.seconds.items():
        yield (
            name,
            f"{1e3 * min(seconds):.1f}",
            f"{1e3 * middle(seconds):.1f}",
            f"{min(seconds) / min(ours):.2f}",
            f"{middle(seconds) / middle(ours):.2f}",
        )
