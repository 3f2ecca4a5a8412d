"""What kernels must compute, written out a second time: float64 takes care of digits, and no package code is called.

Everything here is an exponential and a sum, differentiable by autograd as often as one likes.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """What ``attend`` takes: q ``(n, S, F)``, k, v, bias ``(n, K)``, mask ``(n, S, K)``."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None
    causal: bool = False

    @property
    def tensors(self):
        return tuple(X for X in (self.q, self.k, self.v, self.bias) if X is not None)

    def at(self, q, k, v, bias=None):
        return replace(self, q=q, k=k, v=v, bias=bias)

    def to(self, dtype):
        return self.at(*(X.to(dtype) for X in self.tensors))

    def leaves(self):
        return self.at(*(X.detach().clone().requires_grad_() for X in self.tensors))

    @property
    def arguments(self):
        return self.q, self.k, self.v, self.bias, self.mask, self.causal


def seen(case, n, S, K):
    present = torch.ones(n, S, K, dtype=torch.bool)
    if case.mask is not None:
        present &= case.mask
    if case.causal:
        present &= torch.arange(K)[None, None] <= torch.arange(S)[None, :, None]
    if case.bias is not None:
        present &= (case.bias > -torch.inf)[:, None]
    return present


def attention(case):
    """O, R and p of softmax attention; a row with nothing to see has O = 0 and R = −∞."""
    N = torch.einsum("nsf,nkf->nsk", case.q, case.k)
    present = seen(case, *N.shape)
    if case.bias is not None:
        N = N + case.bias.masked_fill(case.bias == -torch.inf, 0)[:, None]
    N = N.masked_fill(~present, 0)
    peak = N.masked_fill(~present, -1e300).amax(-1, keepdim=True).detach()
    e = torch.where(present, torch.exp((N - peak).clamp(max=0)), 0.0)
    total = e.sum(-1, keepdim=True)
    dead = total == 0
    p = e / total.masked_fill(dead, 1)
    R = (peak + total.masked_fill(dead, 1).log()).masked_fill(dead, -torch.inf).squeeze(-1)
    return torch.einsum("nsk,nkg->nsg", p, case.v), R, p


def cross_entropies(q, k, C, bias=None, mask=None):
    """ℓ ``(n, S)`` = log Σ exp N − ⟨C, N⟩ over what takes part; zero where nothing does."""
    N = torch.einsum("nsf,nkf->nsk", q, k)
    if bias is not None:
        N = N + bias[:, None]
    present = torch.ones_like(N, dtype=torch.bool) if mask is None else mask
    C = C * present
    dead = ~present.any(-1)
    N = N.masked_fill(~present, 0)
    peak = N.masked_fill(~present, -1e300).amax(-1).masked_fill(dead, 0).detach()
    total = torch.where(present, torch.exp(N - peak[..., None]), 0.0).sum(-1).masked_fill(dead, 1)
    return ((total.log() + peak) * C.sum(-1) - (C * N).sum(-1)).masked_fill(dead, 0)


def one_hot(labels, K, smoothing=0.0, mask=None):
    """Targets of labels ``(n, S)``, a share of them spread evenly over what takes part."""
    C = torch.eye(K, dtype=torch.float64)[labels]
    if smoothing == 0:
        return C
    present = torch.ones_like(C) if mask is None else mask.double()
    return (1 - smoothing) * C + smoothing * present / present.sum(-1, keepdim=True).clamp(min=1)
