"""The figure of a benchmark: every way as a multiple of ours, and growth on logarithmic axes."""

import io
from collections.abc import Mapping
from typing import Any

from xentflow.report.figures import COLOURS, MARKERS


def drawn(record: Mapping[str, Any], form: str) -> bytes:
    """PNG or SVG of one record."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    comparisons, growths = record["comparisons"], record["growths"]
    bars = sum(len(told["seconds"]) for told in comparisons)
    figure = Figure(figsize=(11, 2.2 + 0.38 * (bars + 1.4 * len(comparisons)) + 3.4), layout="constrained")
    heights = [len(told["seconds"]) + 1.4 for told in comparisons]
    halves: Any = figure.subfigures(2, 1, height_ratios=[sum(heights) * 0.38, 3.6])
    upper, lower = halves
    for axes, told in zip(_list(upper.subplots(len(comparisons), 1, height_ratios=heights)), comparisons, strict=True):
        ours = min(told["seconds"][told["ours"]])
        names = list(told["seconds"])[::-1]
        values = [min(told["seconds"][name]) / ours for name in names]
        axes.barh(names, values, color=[COLOURS[0] if name == told["ours"] else "#b5b5b5" for name in names])
        for place, value in enumerate(values):
            axes.text(value, place, f" {value:.2f} ", va="center", fontsize=10)
        axes.set_xlim(0, 1.12 * max(values))
        axes.axvline(1, color="#1b1b1b", linewidth=0.8)
        axes.set_title(told["title"], fontsize=11.5, loc="left")
    axes.set_xlabel("time of the fastest round, as a multiple of ours", fontsize=11)
    left, right = lower.subplots(1, 2)
    for axes, quantity, place, label in (
        (left, "seconds", 0, "seconds"),
        (right, "mib", 1, "MiB beyond inputs and outputs"),
    ):
        for number, told in enumerate(growths):
            name = f"{told['title']}, over {told['over']}: exponent {told['exponents'][place]:.2f}"
            axes.plot(told["sizes"], told[quantity], label=name, color=COLOURS[number], marker=MARKERS[number])
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("size", fontsize=11)
        axes.set_ylabel(label, fontsize=11)
        axes.grid(True, color="#dcdcdc", linewidth=0.5)
        axes.legend(fontsize=9, frameon=False)
    file = io.BytesIO()
    with rc_context({"svg.hashsalt": "xentflow"}):
        figure.savefig(file, format=form, dpi=130, metadata={"Date": None} if form == "svg" else {})
    return file.getvalue()


def _list(axes: Any) -> list[Any]:
    return list(axes.flat) if hasattr(axes, "flat") else [axes]
