"""Products of matrices, by the faster of torch's two libraries.

On x86 torch multiplies float32 matrices by MKL, which uses the widest registers on Intel's processors only; oneDNN,
which torch convolves by, uses them wherever they are. A matrix product *is* a convolution of one pixel,

    ABᵀ  a convolution        AB  a transposed one        AᵀB  the derivative of one by its weights

with rows of A as pixels and rows of B as filters, so public operations reach the other library. That is done wherever
there is AVX-512. It was measured on an AMD processor alone: tiles as large as ours are multiplied at twice the rate.

Filters are put into another order at every call, pixels are read as they lie. So a few rows A against many keys B are
the filters: ABᵀ = (BAᵀ)ᵀ, a transposed view whose columns lie in memory one after another. Products of it then read it
as it lies, and few rows are multiplied as fast as many.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_weight

WORTHWHILE = 2**22
"""Multiplications from which it pays to convolve."""

_NARROWEST = 8


def nt(A: Tensor, B: Tensor, bias: Tensor | None = None, turned: bool = False) -> Tensor:
    """ABᵀ ``(n, r, c)`` for A ``(n, r, F)`` and B ``(n, c, F)``; bias ``(n, c)`` joins every row.

    turned: column after column in memory, where that is faster.
    """
    if _convolves(A, B.shape[-2]):
        if turned and A.shape[-2] < B.shape[-2]:
            found = _rows(functional.conv2d(_pixels(B), _filters(A))).mT
            return found if bias is None else found.add_(bias.unsqueeze(-2))
        return _rows(functional.conv2d(_pixels(A), _filters(B), None if bias is None else bias[0]))
    if len(A) == 1:
        # torch multiplies a batch of one more slowly than one.
        one = A[0] @ B[0].mT
        return (one if bias is None else one + bias[0]).unsqueeze(0)
    return torch.bmm(A, B.mT) if bias is None else torch.baddbmm(bias.unsqueeze(-2), A, B.mT)


def nn(A: Tensor, B: Tensor) -> Tensor:
    """AB ``(n, r, F)`` for A ``(n, r, c)`` and B ``(n, c, F)``."""
    if _convolves(A, B.shape[-1]):
        return _by_weights(A.mT, B) if _is_turned(A) else _transposed(A, B)
    return (A[0] @ B[0]).unsqueeze(0) if len(A) == 1 else torch.bmm(A, B)


def tn(A: Tensor, B: Tensor) -> Tensor:
    """AᵀB ``(n, c, F)`` for A ``(n, r, c)`` and B ``(n, r, F)``."""
    if _convolves(A, B.shape[-1]):
        return _transposed(A.mT, B) if _is_turned(A) else _by_weights(A, B)
    return (A[0].mT @ B[0]).unsqueeze(0) if len(A) == 1 else torch.bmm(A.mT, B)


def is_doubled(A: Tensor) -> bool:
    """Whether large products of such matrices go to oneDNN, and why: it has wider registers to work with."""
    settings: Any = torch.backends.mkldnn
    if A.device.type != "cpu" or A.dtype != torch.float32 or not (settings.enabled and settings.is_available()):
        return False
    # Someone may have allowed convolutions, but not products of matrices, to round.
    exact = settings.conv.fp32_precision in ("none", "ieee")
    return exact and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _convolves(A: Tensor, width: int) -> bool:
    n, r, inner = A.shape
    large = n == 1 and r * inner * width >= WORTHWHILE and min(r, inner, width) >= _NARROWEST
    return large and is_doubled(A)


def _transposed(A: Tensor, B: Tensor) -> Tensor:
    return _rows(functional.conv_transpose2d(_pixels(A), _filters(B)))


def _by_weights(A: Tensor, B: Tensor) -> Tensor:
    c, F = A.shape[-1], B.shape[-1]
    found: Tensor = conv2d_weight(_pixels(B), (c, F, 1, 1), _pixels(A))  # type: ignore[no-untyped-call]
    return found.view(1, c, F)


def _is_turned(A: Tensor) -> bool:
    """Whether columns, not rows, lie in memory one after another."""
    return A.mT.is_contiguous() and not A.is_contiguous()


def _pixels(A: Tensor) -> Tensor:
    """Rows as pixels. As two images where that can be: a single small one torch would not hand to oneDNN."""
    _, r, width = A.shape
    images = 2 if r % 2 == 0 else 1
    return A.reshape(images, 1, r // images, width).permute(0, 3, 1, 2)


def _filters(B: Tensor) -> Tensor:
    return B.reshape(*B.shape[1:], 1, 1)


def _rows(image: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1).reshape(1, -1, image.shape[1])
