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

MOST_COLUMNS = 8192
"""The same where tiles are turned, which may be longer the fewer rows they have."""

KEPT = 2**22
"""Entries of a block of rows: 16 MiB in float32."""

GRAIN = 16
"""Single numbers in AVX-512's widest register: a product of 171 rows takes longer than one of 192."""

FEWEST_ROWS = 64
MOST_ROWS = 4096


@dataclass(frozen=True)
class Tiling:
    """``samples`` matrices at a time, ``rows`` of each, in tiles of ``columns``; turned: see ``matmul.nt``."""

    samples: int
    rows: int
    columns: int
    turned: bool

    @classmethod
    def of(cls, S: int, K: int, keeps: bool = True, turned: bool = False) -> "Tiling":
        """For matrices of S×K logits; keeps: whether all tiles of a block of rows are kept, or one after another."""
        keep_freed_memory()
        most = KEPT // K if keeps else TILE // min(K, COLUMNS)
        rows = min(S, MOST_ROWS, max(FEWEST_ROWS, most))
        columns = min(K, max(COLUMNS, min(MOST_COLUMNS, TILE // rows))) if turned else min(K, COLUMNS)
        return cls(max(1, TILE // (S * K)), rows, columns, turned)

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
    """Beginnings and ends of pieces of at most ``size``, as equal as whole grains let them be, or one."""
    if length <= size:
        yield 0, length
        return
    grain = GRAIN if size >= GRAIN else 1
    count = math.ceil(length / (size // grain * grain))
    step = math.ceil(length / count / grain) * grain
    yield from pairwise([*range(0, length, step), length])


def widened(X: Tensor) -> Tensor:
    """Half precision in float32, in which tiles are computed."""
    return X.float() if X.dtype in (torch.float16, torch.bfloat16) else X
