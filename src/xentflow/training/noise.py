"""Corruption of images by Gaussian noise: what the experiment does to a picture before anything looks at it.

For a pixel q in {0, …, 255}, g ~ N(0, 1) drawn anew for every pixel of every image at every load, and a normalisation
ν(x) = (x − m)/d,

    noise before normalisation   z = ν(clamp(q/255 + std · g))          clamp to [0, 1]
    noise after normalisation    z = clamp(ν(q/255) + std · g)          clamp to [ν(0), ν(1)], the same range of pixels

or the same without the clamp. ν is increasing and affine, so it commutes with the clamp, and all readings are one form:

    z = clamp(ν(q/255) + s · g),     s = std/d before, std after.

The paper says only that noise of standard deviation 1/3 is added; the default here is the reading that reproduces its
table.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from xentflow.errors import XentflowError

Normalisation = Literal["half", "unit", "standard"]

_KINDS = ("half", "unit", "standard")
STREAMS = 2**16
"""Streams of one seed: independent draws for the same image."""

MOST_PIXELS = 2**17
"""Two pixels share a counter of 16 bits."""


@dataclass(frozen=True)
class Corruption:
    """How images become features: see the module's formula.

    std: of the noise; clamp: whether pixels are brought back to their range; when: noise before or after
    normalisation; normalisation: ``"half"`` (x − ½)/½, ``"unit"`` x itself, ``"standard"`` (x − mean)/deviation;
    mean, deviation: of all pixels of the training set, by default Fashion-MNIST's.
    """

    std: float = 1 / 3
    clamp: bool = True
    when: Literal["before", "after"] = "before"
    normalisation: Normalisation = "half"
    mean: float = 0.2860
    deviation: float = 0.3530

    def __post_init__(self) -> None:
        if not (math.isfinite(self.std) and self.std >= 0):
            raise XentflowError(f"std: expected a finite number, at least 0, got {self.std}")
        if self.when not in ("before", "after"):
            raise XentflowError(f'when: expected "before" or "after", got {self.when!r}')
        if self.normalisation not in _KINDS:
            raise XentflowError(f'normalisation: expected "half", "unit" or "standard", got {self.normalisation!r}')
        if not (math.isfinite(self.mean) and math.isfinite(self.deviation) and self.deviation > 0):
            raise XentflowError(
                f"mean, deviation: expected finite numbers, deviation above 0, got {self.mean}, {self.deviation}"
            )

    @property
    def centre_and_spread(self) -> tuple[float, float]:
        """m and d of the normalisation ν(x) = (x − m)/d."""
        if self.normalisation == "half":
            return 0.5, 0.5
        return (0.0, 1.0) if self.normalisation == "unit" else (self.mean, self.deviation)

    def clean(self, images: Tensor) -> Tensor:
        """ν(q/255), without noise: uint8 ``(n, …)`` to float32 ``(n, F)``."""
        m, d = self.centre_and_spread
        return (_flat(images).float() / 255 - m) / d

    def literal(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The definition step by step, with torch's normals: the reference for ``apply``."""
        m, d = self.centre_and_spread
        x = _flat(images).float() / 255
        if self.when == "after":
            x = (x - m) / d
        x = x + self.std * torch.randn(x.shape, generator=generator)
        if self.clamp:
            x = x.clamp((0 - m) / d, (1 - m) / d) if self.when == "after" else x.clamp(0, 1)
        return x if self.when == "after" else (x - m) / d

    def apply(
        self, images: Tensor, seed: int, stream: int = 0, index: Tensor | None = None, threads: int | None = None
    ) -> Tensor:
        """The same law from the counter-based sampler: float32 ``(n, F)``, a function of its arguments alone.

        images: uint8 ``(m, …)``; index: int64 ``(n,)``, which of them, by default all; stream: an independent draw
        for each, epoch e of training uses e + 1. The noise of an image depends on (seed, stream, its number, pixel)
        and on nothing else: not on ``threads``, nor on which other images are asked for.
        """
        flat = _flat(images)
        rows = np.arange(len(flat)) if index is None else _checked_index(index, len(flat))
        out = torch.empty(len(rows), flat.shape[1])
        fill = Sampler(self, flat, seed)
        count = max(1, min(torch.get_num_threads() if threads is None else threads, len(rows)))
        bounds = [len(rows) * part // count for part in range(count + 1)]
        with ThreadPoolExecutor(count) as pool:
            jobs = [pool.submit(fill, out[a:b].numpy(), rows[a:b], stream) for a, b in pairwise(bounds)]
            for job in jobs:
                job.result()
        return out


class Sampler:
    """The compiled sampler bound to its images and seed; calls from several threads may overlap.

    corruption, images: see ``Corruption``, images uint8 ``(m, F)``; seed: 0 to 2⁶⁴ − 1.
    """

    def __init__(self, corruption: Corruption, images: Tensor, seed: int) -> None:
        if not 0 <= seed < 2**64:
            raise XentflowError(f"seed: expected an integer from 0 to 2**64 - 1, got {seed}")
        if images.shape[1] > MOST_PIXELS:
            raise XentflowError(f"images: expected at most {MOST_PIXELS} pixels each, got {images.shape[1]}")
        # numba takes half a second to import: only who computes pays.
        from xentflow.training import _kernels

        m, d = corruption.centre_and_spread
        s = corruption.std / d if corruption.when == "before" else corruption.std
        low, high = ((0 - m) / d, (1 - m) / d) if corruption.clamp else (-math.inf, math.inf)
        numbers = (1 / (255 * d), -m / d, -2 * math.log(2) * s * s, low, high)
        self._affine: Any = tuple(np.float32(number) for number in numbers)
        self._key = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
        self._images = images.contiguous().numpy()
        self._kernel = _kernels.corrupt

    def __call__(self, out: Any, index: Any, stream: int) -> None:
        """Fill ``out`` float32 ``(n, F)`` with the corrupted images that ``index`` int64 ``(n,)`` names."""
        if not 0 <= stream < STREAMS:
            raise XentflowError(f"stream: expected an integer from 0 to {STREAMS - 1}, got {stream}")
        self._kernel(out, self._images, index, *self._key, np.uint32(stream << 16), self._affine)


def _flat(images: Tensor) -> Tensor:
    if not isinstance(images, Tensor) or images.dtype != torch.uint8 or images.ndim < 2 or images.numel() == 0:
        came = f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise XentflowError(f"images: expected a non-empty uint8 tensor (n, height, width) or (n, F), got {came}")
    return images.flatten(1)


def _checked_index(index: Tensor, images: int) -> Any:
    if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.ndim != 1:
        came = f"{index.dtype} {tuple(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
        raise XentflowError(f"index: expected an int64 tensor (n,), got {came}")
    # The compiled loop does not look: a wrong number would read foreign memory.
    if len(index) and not (index.min() >= 0 and index.max() < images):
        raise XentflowError(
            f"index: expected numbers from 0 to {images - 1}, got {int(index.min())} to {int(index.max())}"
        )
    return index.contiguous().numpy()
