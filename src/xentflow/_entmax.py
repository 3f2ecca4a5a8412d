"""α-entmax weights that can be differentiated any number of times, compiled, and vmapped.

p = [(α−1)N − τ]₊^{1/(α−1)} with the threshold τ that makes p sum to one. The ``entmax`` package finds τ; its autograd
functions predate ``torch.func``, so the derivative is carried by two Newton steps on the equation for τ in plain torch,
started at the solution: each leaves the value where it is and doubles the number of exact derivatives (1, then 3).
"""

import entmax
import torch
from torch import Tensor


@torch.library.custom_op("xentflow::entmax_threshold", mutates_args=())
def _threshold(gaps: Tensor, alpha: float, dim: int) -> Tensor:
    """τ for logits −gaps whose maximum is zero; keeps the reduced dimension."""
    # Any entry this far below the maximum has weight zero, and finite numbers sort and sum without NaN.
    logits = -gaps.clamp_max(2 / (alpha - 1))
    if alpha == 2:
        p: Tensor = entmax.sparsemax(logits, dim)
    elif alpha == 1.5:
        p = entmax.entmax15(logits, dim)
    else:
        p = entmax.entmax_bisect(logits, alpha, dim)
    return -p.amax(dim, keepdim=True).pow(alpha - 1).contiguous()


@_threshold.register_fake
def _(gaps: Tensor, alpha: float, dim: int) -> Tensor:
    return gaps.new_empty(gaps.narrow(dim, 0, 1).shape)


@_threshold.register_vmap
def _(info: object, in_dims: tuple[int | None, ...], gaps: Tensor, alpha: float, dim: int) -> tuple[Tensor, int]:
    assert in_dims[0] is not None
    assert dim < 0
    return _threshold(gaps.movedim(in_dims[0], 0), alpha, dim), 0


def weights(N: Tensor, alpha: float, dim: int) -> Tensor:
    """α-entmax of N along ``dim`` (negative), N possibly −∞ at masked entries but nowhere throughout."""
    N = N - N.amax(dim, keepdim=True).detach()
    # What finds τ cannot do with NaN; a distribution that holds one (from +∞ too) is NaN throughout, like softmax.
    lost = N.detach().isnan().any(dim, keepdim=True)
    N = N.masked_fill(lost, 0)
    tau = _threshold(-N.detach(), alpha, dim)
    exponent = 1 / (alpha - 1)
    # The exact support is fixed before the Newton steps; powers of zero would have infinite derivatives.
    support = (alpha - 1) * N.detach() > tau
    scaled = (alpha - 1) * N.masked_fill(~support, 0)

    def powers(tau: Tensor, exponent: float) -> Tensor:
        above = torch.where(support, scaled - tau, 1.0).clamp_min(torch.finfo(N.dtype).tiny)
        return above.pow(exponent).masked_fill(~support, 0)

    for _ in range(2):
        total = powers(tau, exponent).sum(dim, keepdim=True)
        slope = exponent * powers(tau, exponent - 1).sum(dim, keepdim=True)
        tau = tau + (total - 1) / slope
    return powers(tau, exponent).masked_fill(lost, float("nan"))
