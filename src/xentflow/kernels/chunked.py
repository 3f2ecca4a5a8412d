"""Softmax attention both ways and its gradients, block of rows by block, from torch's public operations.

With e = exp(N − m) of a block of rows, m the maximum and t = Σ_j e_j the normaliser of each row,

    pv = (e v) / t        pᵀu += eᵀ(u / t)        R = m + log t.

The block's e is kept until all of it is known, and the division goes to the thinner factor: one product for N, and one
for each of what is asked for. For upstream gradients Ġ of pv, Ḣ of pᵀu and Ṙ, with ṗ = Ġvᵀ + uḢᵀ,

    ∂N = p ∘ (ṗ − Σ_j p_j ṗ_j + Ṙ)    ∂a = ∂N c    ∂c = ∂Nᵀa    ∂v = pᵀĠ    ∂u = pḢ    ∂b = ∂Nᵀ1.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from xentflow.kernels.matmul import nn, nt, tn
from xentflow.kernels.tiles import Tiling, spans, widened

LOG2E = 1 / math.log(2)


class Found(NamedTuple):
    """pv ``(n, S, G)``, pᵀu ``(n, K, H)`` and R ``(n, S)``; None where no values were given."""

    own: Tensor | None
    other: Tensor | None
    R: Tensor


class Gradients(NamedTuple):
    """∂a, ∂c, ∂u, ∂v and ∂b, each like its operand; None where there was none."""

    a: Tensor
    c: Tensor
    u: Tensor | None
    v: Tensor | None
    b: Tensor | None


class Exponentials(NamedTuple):
    """e = exp(N − m) of a block in tiles, m and t, and 1/t, zero for rows without entries."""

    tiles: list[tuple[slice, Tensor]]
    m: Tensor
    total: Tensor
    inverse: Tensor


def attend(
    a: Tensor,
    c: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Found:
    """For a ``(n, S, F)``, c ``(n, K, F)``, u ``(n, S, H)``, v ``(n, K, G)``, bias ``(n, K)``, mask ``(n, S, K)``."""
    n, S, _ = a.shape
    K = c.shape[-2]
    dtype = a.dtype
    a, c, u, v, bias = _widened(a, c, u, v, bias)
    own = None if v is None else a.new_empty(n, S, v.shape[-1], dtype=dtype)
    other = None if u is None else a.new_zeros(n, K, u.shape[-1])
    R = a.new_empty(n, S)
    tiling = Tiling.of(S, K)
    for at in tiling.blocks(n, S):
        block = _exponentials(a[at], c[at[0]], *_seen(at, bias, mask), causal, at[1].start, tiling)
        samples, _ = at
        if own is not None and v is not None:
            own[at] = _gathered(block, v[samples]).mul_(block.inverse)
        if other is not None and u is not None:
            weighted = u[at] * block.inverse
            for columns, e in block.tiles:
                other[samples, columns] += tn(e, weighted)
            del e, weighted
        R[at] = (block.m + block.total.log()).squeeze(-1)
        # Before the next block is made: its tiles are most of the memory.
        del block
    return Found(own, None if other is None else other.to(dtype), R)


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
) -> Gradients:
    """The gradients of everything ``attend`` takes."""
    n, S, _ = a.shape
    K = c.shape[-2]
    came = a.dtype
    a, c, u, v, bias = _widened(a, c, u, v, bias)
    _, _, grad_other, grad_own, _ = _widened(a, c, grad_other, grad_own, None)
    da, dc = torch.empty_like(a), torch.zeros_like(c)
    du, dv = (None if X is None else torch.zeros_like(X) for X in (u, v))
    db = None if bias is None else torch.zeros_like(bias)
    tiling = Tiling.of(S, K)
    for at in tiling.blocks(n, S):
        samples, _ = at
        block = _exponentials(a[at], c[samples], *_seen(at, bias, mask), causal, at[1].start, tiling)
        left = _beside(None if grad_own is None else grad_own[at], None if u is None else u[at])
        products, mean = [], torch.zeros_like(block.m)
        for columns, e in block.tiles:
            right = _beside(*(None if X is None else X[samples, columns] for X in (v, grad_other)))
            product = nt(left, right)
            mean += (e * product).sum(-1, keepdim=True)
            products.append(product)
        shift = (grad_R[at].unsqueeze(-1) - mean * block.inverse).masked_fill(block.total == 0, 0)
        scaled, pulled = a[at] * block.inverse, None
        of_own = None if grad_own is None else grad_own[at] * block.inverse
        for (columns, e), product in zip(block.tiles, products, strict=True):
            dN = product.add_(shift).mul_(e)
            part = nn(dN, c[samples, columns])
            pulled = part if pulled is None else pulled.add_(part)
            dc[samples, columns] += tn(dN, scaled)
            if db is not None:
                # A sum, not a product with a vector: it adds in pairs and keeps more digits.
                db[samples, columns] += (dN * block.inverse).sum(-2)
            if dv is not None and of_own is not None:
                dv[samples, columns] += tn(e, of_own)
        assert pulled is not None
        da[at] = pulled.mul_(block.inverse)
        if du is not None and grad_other is not None:
            du[at] = _gathered(block, grad_other[samples]).mul_(block.inverse)
        del block, products
    return Gradients(*(None if X is None else X.to(came) for X in (da, dc, du, dv, db)))  # type: ignore[arg-type]


def tiles_of_logits(
    a: Tensor, c: Tensor, bias: Tensor | None, mask: Tensor | None, causal: bool, start: int, tiling: Tiling
) -> Iterator[tuple[slice, Tensor]]:
    """N of a block whose first row is ``start``, tile by tile, −∞ where an entry is left out."""
    rows, K = a.shape[-2], c.shape[-2]
    for begin, end in spans(K, tiling.columns):
        if causal and begin >= start + rows:
            break
        columns = slice(begin, end)
        N = nt(a, c[:, columns], None if bias is None else bias[:, columns], tiling.turned)
        if mask is not None:
            N.masked_fill_(~mask[..., columns], -torch.inf)
        if causal and end - 1 > start:
            places = torch.arange(start, start + rows, device=a.device)[:, None]
            N.masked_fill_(torch.arange(begin, end, device=a.device) > places, -torch.inf)
        yield columns, N


def exponentiate(N: Tensor, m: Tensor) -> Tensor:
    """exp(N − m) in place; powers of two, since vectorised ones cost a quarter of torch's exponential on a CPU."""
    return N.sub_(m).mul_(LOG2E).exp2_()


def largest(tiles: list[tuple[slice, Tensor]]) -> Tensor:
    """m ``(n, r, 1)`` of a block; zero in rows without entries."""
    m = torch.stack([N.amax(-1, keepdim=True) for _, N in tiles]).amax(0)
    return m.masked_fill_(m.isneginf(), 0)


def _exponentials(
    a: Tensor, c: Tensor, bias: Tensor | None, mask: Tensor | None, causal: bool, start: int, tiling: Tiling
) -> Exponentials:
    tiles = list(tiles_of_logits(a, c, bias, mask, causal, start, tiling))
    m = largest(tiles)
    total = torch.zeros_like(m)
    for _, N in tiles:
        total += exponentiate(N, m).sum(-1, keepdim=True)
    return Exponentials(tiles, m, total, total.reciprocal().masked_fill(total == 0, 0))


def _gathered(block: Exponentials, values: Tensor) -> Tensor:
    """e times values ``(n, K, G)``."""
    found = None
    for columns, e in block.tiles:
        part = nn(e, values[:, columns])
        found = part if found is None else found.add_(part)
    assert found is not None
    return found


def _seen(at: tuple[slice, slice], bias: Tensor | None, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None if bias is None else bias[at[0]], None if mask is None else mask[at])


def _beside(*factors: Tensor | None) -> Tensor:
    given = [X for X in factors if X is not None]
    return given[0] if len(given) == 1 else torch.cat(given, -1)


def _widened(
    a: Tensor, c: Tensor, u: Tensor | None, v: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    u, v = (None if X is None else widened(X) for X in (u, v))
    a = widened(a)
    return a, widened(c), u, v, None if bias is None else bias.to(a.dtype)
