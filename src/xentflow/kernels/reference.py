"""The plain forms: what every other backend must agree with, and what runs where the logits are few.

Softmax attention over N = acᵀ + b, entries where a mask is False left out, its log-sum-exp, and the product the other
way:

    R_i = log Σ_j exp N_ij          p_ij = exp(N_ij − R_i)          pv          pᵀu

A row with every entry left out has p = 0 and R = −∞. Gradients are those of ``chunked``.
"""

import torch
from torch import Tensor


def logits(a: Tensor, c: Tensor, bias: Tensor | None, mask: Tensor | None, causal: bool) -> Tensor:
    """N = acᵀ + b with −∞ where an entry is left out."""
    N = a @ c.mT
    if bias is not None:
        N = N + bias.unsqueeze(-2)
    if causal:
        lower = torch.ones(N.shape[-2:], dtype=torch.bool, device=N.device).tril()
        N = N.masked_fill(~lower, -torch.inf)
    return N if mask is None else N.masked_fill(~mask, -torch.inf)


def attend(
    a: Tensor,
    c: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """pv ``(*batch, S, G)``, pᵀu ``(*batch, K, H)`` and R ``(*batch, S)``; None where no values were given."""
    N = logits(a, c, bias, mask, causal)
    if bias is None and mask is None:
        p, R = torch.softmax(N, -1), torch.logsumexp(N, -1)
    else:
        dead = N.isneginf().all(-1)
        N = N.masked_fill(dead.unsqueeze(-1), 0)
        p = torch.softmax(N, -1).masked_fill(dead.unsqueeze(-1), 0)
        R = torch.logsumexp(N, -1).masked_fill(dead, -torch.inf)
    return None if v is None else p @ v, None if u is None else p.mT @ u, R


def attend_backward(
    a: Tensor,
    c: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    grad_own: Tensor | None,
    grad_other: Tensor | None,
    grad_R: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """∂a, ∂c, ∂u, ∂v, ∂b, in differentiable torch; nothing is taken from the forward pass."""
    N = logits(a, c, bias, mask, causal)
    dead = N.isneginf().all(-1, keepdim=True)
    p = torch.softmax(N.masked_fill(dead, 0), -1).masked_fill(dead, 0)
    grad_p = torch.zeros_like(p)
    du = dv = None
    if v is not None and grad_own is not None:
        grad_p, dv = grad_p + grad_own @ v.mT, p.mT @ grad_own
    if u is not None and grad_other is not None:
        grad_p, du = grad_p + u @ grad_other.mT, p @ grad_other
    mean = (p * grad_p).sum(-1, keepdim=True) - grad_R.unsqueeze(-1).masked_fill(dead, 0)
    grad_N = p * (grad_p - mean)
    return grad_N @ c, grad_N.mT @ a, du, dv, grad_N.sum(-2)
