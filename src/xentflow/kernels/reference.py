"""The plain forms: what every other backend must agree with, and what runs where the logits are few.

Softmax attention with its log-sum-exp, over N = qkᵀ + b, entries where a mask is False left out:

    R_i = log Σ_j exp N_ij          O = pv, p_ij = exp(N_ij − R_i)

A row with every entry left out has O = 0 and R = −∞. For upstream gradients Ȯ and Ṙ, with D = rowsum(Ȯ ∘ O) − Ṙ,

    ∂N = p ∘ (Ȯvᵀ − D)      ∂q = ∂N k      ∂k = ∂Nᵀ q      ∂v = pᵀȮ      ∂b = ∂Nᵀ 1
"""

import torch
from torch import Tensor


def logits(q: Tensor, k: Tensor, bias: Tensor | None, mask: Tensor | None, causal: bool) -> Tensor:
    """N = qkᵀ + b with −∞ where an entry is left out."""
    N = q @ k.mT
    if bias is not None:
        N = N + bias.unsqueeze(-2)
    if causal:
        lower = torch.ones(N.shape[-2:], dtype=torch.bool, device=N.device).tril()
        N = N.masked_fill(~lower, -torch.inf)
    return N if mask is None else N.masked_fill(~mask, -torch.inf)


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """O ``(*batch, S, G)`` and R ``(*batch, S)``; see the module."""
    N = logits(q, k, bias, mask, causal)
    if bias is None and mask is None:
        return torch.softmax(N, -1) @ v, torch.logsumexp(N, -1)
    dead = (N == -torch.inf).all(-1)
    N = N.masked_fill(dead.unsqueeze(-1), 0)
    p = torch.softmax(N, -1).masked_fill(dead.unsqueeze(-1), 0)
    return p @ v, torch.logsumexp(N, -1).masked_fill(dead, -torch.inf)


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    grad_O: Tensor,
    grad_R: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """∂q, ∂k, ∂v, ∂b of the module's formulas, in differentiable torch; nothing is taken from the forward pass."""
    N = logits(q, k, bias, mask, causal)
    dead = (N == -torch.inf).all(-1, keepdim=True)
    p = torch.softmax(N.masked_fill(dead, 0), -1).masked_fill(dead, 0)
    weighted = grad_O @ v.mT
    D = (p * weighted).sum(-1, keepdim=True) - grad_R.unsqueeze(-1).masked_fill(dead, 0)
    grad_N = p * (weighted - D)
    return grad_N @ k, grad_N.mT @ q, p.mT @ grad_O, grad_N.sum(-2)
