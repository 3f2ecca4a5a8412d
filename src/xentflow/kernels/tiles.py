"""Tiles: how a large S×K matrix of logits is walked over in pieces that stay in the processor's cache.

A block of rows is gone through tile by tile and kept until all of it has been used, so that a row's maximum and
normaliser are known before anything is divided. The sizes were measured; nothing but speed and memory depends on them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

TILE = 2**20
"""Entries of one tile: 4 MiB in float32."""

COLUMNS = 2048
"""Keys in one tile, where there are as many."""

KEPT = 2**22
"""Entries of a block of rows: 16 MiB in float32."""

FEWEST_ROWS = 64
MOST_ROWS = 4096


@dataclass(frozen=True)
class Tiling:
    """``samples`` matrices at a time, ``rows`` of each, in tiles of ``columns``."""

    samples: int
    rows: int
    columns: int

    @classmethod
    def of(cls, S: int, K: int) -> "Tiling":
        """For matrices of S×K logits."""
        keep_freed_memory()
        rows = min(S, MOST_ROWS, max(FEWEST_ROWS, KEPT // K))
        columns = min(K, max(COLUMNS, TILE // MOST_ROWS))
        return cls(max(1, TILE // (S * K)), rows, columns)

    def blocks(self, n: int, S: int) -> Iterator[tuple[slice, slice]]:
        """Samples and rows of every block of n matrices of S rows."""
        for first, last in spans(n, self.samples):
            for start, stop in spans(S, self.rows):
                yield slice(first, last), slice(start, stop)


@cache
def keep_freed_memory() -> None:
    """Let the C library hand freed tiles out again, where it would return each to the system and fault it in anew.

    Freeing one allocation of three tiles' size, which is never touched, teaches glibc that such sizes come and go, and
    larger ones go back to the system still. Elsewhere it does nothing.
    """
    torch.empty(3 * 2**22, dtype=torch.uint8)


def spans(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of pieces of at most ``size``, as equal as they can be."""
    count = math.ceil(length / size)
    edges = [length * index // count for index in range(count + 1)]
    yield from pairwise(edges)


def widened(X: Tensor) -> Tensor:
    """Half precision in float32, in which tiles are computed."""
    return X.float() if X.dtype in (torch.float16, torch.bfloat16) else X
