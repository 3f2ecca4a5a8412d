"""Tiles: how a large S×K matrix of logits is walked over in pieces that stay in a core's cache.

A product of two matrices runs several times faster where its result stays in cache than where it goes to memory, and
so do the exponentials that follow. The sizes were measured; nothing but speed and memory depends on them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

TILE = 2**20
"""Entries of one tile: 4 MiB in float32."""

COLUMNS = 2048
"""Keys in one tile, where there are as many."""

KEPT = 2**22
"""Entries of exp(N) kept for a block of rows, so that they need not be computed again: 16 MiB in float32."""

_FEWEST_ROWS = 64
_MOST_ROWS = 4096


@dataclass(frozen=True)
class Tiling:
    """rows × columns of one tile over an S×K matrix."""

    rows: int
    columns: int

    @classmethod
    def of(cls, S: int, K: int, kept: bool = False) -> "Tiling":
        """Tiles for S×K logits; ``kept``: for whole rows of tiles that together have at most about ``KEPT`` entries."""
        columns = min(K, COLUMNS)
        rows = min(S, _MOST_ROWS, TILE // columns)
        if kept:
            rows = min(rows, max(_FEWEST_ROWS, KEPT // K))
        return cls(max(1, rows), columns)


def spans(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of pieces of at most ``size``, as equal as they can be."""
    count = math.ceil(length / size)
    edges = [length * index // count for index in range(count + 1)]
    yield from zip(edges, edges[1:], strict=False)
