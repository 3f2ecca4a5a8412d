"""What the paper prints: the twelve cells of its Table 1, and the distance of other figures to them."""

import math
from collections.abc import Mapping, Sequence

STARTS = ("clean", "noisy")
"""Where the passes start: the original images X, or the corrupted ones Z⁽⁰⁾."""

TABLE_1: Mapping[str, tuple[float, ...]] = {
    "clean": (0.8424, 0.9788, 0.9963, 0.9992, 0.9998, 0.9999),
    "noisy": (0.8139, 0.9835, 0.9978, 0.9999, 1.0000, 1.0000),
}
"""Accuracy before the first pass and after each of five."""

Rows = Mapping[str, Sequence[float]]
"""Accuracies by start."""


def differences(ours: Rows) -> dict[str, list[float]]:
    """Ours minus the paper's, for as many passes as both have."""
    return {start: [here - there for here, there in zip(ours[start], TABLE_1[start], strict=False)] for start in STARTS}


def rmse(ours: Rows) -> float:
    """The root of the mean squared difference over the cells that both have."""
    cells = [cell for row in differences(ours).values() for cell in row]
    return math.sqrt(sum(cell * cell for cell in cells) / len(cells))


def largest_difference(ours: Rows) -> float:
    """How far the furthest cell is off."""
    return max(abs(cell) for row in differences(ours).values() for cell in row)
