"""ℓ of softmax distributions over N = qkᵀ + b, and its gradients, in one sweep over tiles of the logits.

For row i with targets C_i that sum to one, ℓ_i = R_i − ⟨C_i, N_i⟩ and, with weights w_i,

    ∂q_i = w_i (p_i − C_i) k        ∂k = Σ_i w_i (p_i − C_i)ᵀ q_i        ∂b = Σ_i w_i (p_i − C_i).

Three products, qkᵀ, ek and eᵀq, are the fewest that give all of it without keeping N. The sweep needs no more: it keeps
e = exp(N − m) of a block of rows, in which m and the normaliser become known only at the block's end, and puts them
into the right-hand side of the third product, eᵀ(w exp(m_tile − R) q).

Where C is one class y, that class is left out of the sums, and ℓ = softplus(log Σ_{j≠y} exp N_j − N_y): nothing cancels
however confident the row, and p_y − 1 = −sigmoid(log Σ_{j≠y} exp N_j − N_y) keeps its digits too.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from xentflow.kernels.chunked import Columns, RunningSoftmax, left_out, widened
from xentflow.kernels.tiles import Tiling, spans


class Gradients(NamedTuple):
    """∂q ``(n, S, F)``, ∂k ``(m, K, F)`` and ∂b ``(m, K)``; None where not asked for."""

    q: Tensor | None
    k: Tensor | None
    b: Tensor | None


@dataclass(frozen=True)
class Problem:
    """Distributions over keys, for n matrices of queries and n, or one shared, of keys.

    q: ``(n, S, F)``; k: ``(m, K, F)``, m = n or 1; bias: b ``(m, K)``; mask: True where an entry takes part,
    ``(n, S, K)``; labels: y ``(n, S)``, or targets: C ``(n, S, K)``; smoothing: the share of C that is spread evenly
    over the entries that take part, with labels.
    """

    q: Tensor
    k: Tensor
    bias: Tensor | None
    mask: Tensor | None
    labels: Tensor | None
    targets: Tensor | None
    smoothing: float = 0.0

    @property
    def one_class(self) -> bool:
        """Whether every row's targets are one class."""
        return self.labels is not None and self.smoothing == 0

    def targets_of(self, index: int, rows: slice, columns: slice) -> Tensor:
        """C of a tile, where it is not one class a row."""
        wide = widened(self.q[:0]).dtype
        if self.targets is not None:
            return self.targets[index, rows, columns].to(wide)
        assert self.labels is not None
        K = self.k.shape[-2]
        labels = self.labels[index, rows]
        if self.mask is None:
            C = torch.full(
                (len(labels), columns.stop - columns.start), self.smoothing / K, dtype=wide, device=labels.device
            )
        else:
            present = self.mask[index, rows].sum(-1, keepdim=True).clamp_min(1)
            C = self.mask[index, rows, columns] * (self.smoothing / present.to(wide))
        inside = ((labels >= columns.start) & (labels < columns.stop)).nonzero().squeeze(-1)
        C[inside, labels[inside] - columns.start] += 1 - self.smoothing
        return C


@torch.no_grad()
def sweep(
    problem: Problem, weights: Tensor, wants_q: bool = True, wants_k: bool = True, wants_b: bool = True
) -> tuple[Tensor, Gradients]:
    """ℓ ``(n, S)`` of every row, and the gradients of Σ w ℓ for weights ``(n, S)``.

    A row of weight zero, or with nothing left by the mask, adds nothing to any gradient.
    """
    q, k = problem.q, problem.k
    n, S, F = q.shape
    shared, K = k.shape[0] == 1, k.shape[-2]
    wide = widened(q[:0]).dtype
    values = torch.empty(n, S, dtype=wide, device=q.device)
    grads = Gradients(
        torch.empty_like(q) if wants_q else None,
        torch.zeros(k.shape, dtype=wide, device=k.device) if wants_k else None,
        torch.zeros(k.shape[:2], dtype=wide, device=k.device) if wants_b and problem.bias is not None else None,
    )
    tiling = Tiling.of(S, K, kept=wants_k)
    pieces = list(spans(K, tiling.columns))
    kept = len(pieces) if wants_k or grads.b is not None else 1
    e = torch.empty(kept, tiling.rows * max(end - begin for begin, end in pieces), dtype=wide, device=q.device)
    queries, keys = Columns(q[0], tiling.rows, 1.0, 0.0), Columns(k[0], tiling.columns, 0.0, 1.0)
    sums = torch.empty(tiling.rows, F + 2, dtype=wide, device=q.device)
    for index in range(n):
        for start, stop in spans(S, tiling.rows):
            block = _Block(problem, index, slice(start, stop), weights[index, start:stop].to(wide), pieces)
            of_key = 0 if shared else index
            found = block.forward(queries, keys, sums[: stop - start], e, careful=False)
            ell, dq = block.forward(queries, keys, sums[: stop - start], e, careful=True) if found is None else found
            values[index, start:stop] = ell
            if grads.q is not None:
                grads.q[index, start:stop] = dq
            if kept == len(pieces) and (grads.k is not None or grads.b is not None):
                block.backward(
                    e, None if grads.k is None else grads.k[of_key], grads.b if grads.b is None else grads.b[of_key]
                )
    dk = grads.k if grads.k is None else grads.k.to(k.dtype)
    db = grads.b if grads.b is None else grads.b.to(k.dtype)
    return values, Gradients(grads.q, dk, db)


class _Block:
    """A block of rows of one matrix, against all keys."""

    def __init__(
        self, problem: Problem, index: int, rows: slice, weights: Tensor, pieces: list[tuple[int, int]]
    ) -> None:
        self.problem, self.index, self.rows, self.pieces = problem, index, rows, pieces
        shared = problem.k.shape[0] == 1
        self.k = problem.k[0 if shared else index]
        self.bias = None if problem.bias is None else problem.bias[0 if shared else index]
        self.mask = None if problem.mask is None else problem.mask[index]
        self.q = problem.q[index, rows]
        self.weights = weights
        if problem.one_class:
            assert problem.labels is not None
            self.labels = problem.labels[index, rows]
            # Labels in the order of their tiles, so that each tile finds its own at once.
            order = self.labels.argsort()
            edges = torch.tensor([begin for begin, _ in pieces] + [pieces[-1][1]], device=order.device)
            self.order = order
            self.cuts = torch.searchsorted(self.labels[order].contiguous(), edges).tolist()

    def forward(
        self, queries: Columns, keys: Columns, sums: Tensor, e: Tensor, careful: bool
    ) -> tuple[Tensor, Tensor] | None:
        """ℓ and ∂q of the block, None if it overflowed; ``e`` keeps exp(N − m), each tile with the m it had then."""
        running = RunningSoftmax(queries, self.q, sums, careful)
        r, F = self.q.shape
        own = torch.full((r,), -torch.inf, dtype=sums.dtype, device=sums.device)
        linear, mass = torch.zeros_like(own), torch.zeros_like(own)
        pulled: Tensor | None = None
        self.references = []
        for number, (begin, end) in enumerate(self.pieces):
            columns = slice(begin, end)
            tile = self._tile(e, number, end - begin)
            k_of = keys.of(self.k[columns], None if self.bias is None else self.bias[columns])
            absent = left_out(self.mask, False, self.rows, columns, tile.device)
            rise = running.exponents(k_of, tile, absent)
            if self.problem.one_class:
                if rise is not None:
                    own -= rise
                mine = self.order[self.cuts[number] : self.cuts[number + 1]]
                if len(mine):
                    at = self.labels[mine] - begin
                    own[mine] = tile[mine, at]
                    tile[mine, at] = -torch.inf
            else:
                C = self.problem.targets_of(self.index, self.rows, columns)
                if rise is not None:
                    linear -= rise * mass
                mass += C.sum(-1)
                linear += (C * (tile if absent is None else tile.masked_fill(absent, 0))).sum(-1)
                product = C @ k_of[:, :F]
                pulled = product if pulled is None else pulled.add_(product)
            self.references.append(running.reference.clone())
            running.add(tile.exp_(), k_of)
        if running.overflowed:
            return None
        others = running.sums[:, -1]
        self.reference = running.reference
        if self.problem.one_class:
            away = others.log() - own
            ell = torch.nn.functional.softplus(away)
            # softplus is the identity beyond 20, where e⁻²⁰ is still seen in float64.
            ell = torch.where(away > 20, away + torch.log1p(torch.exp(-away)), ell)
            self.missed = torch.sigmoid(away) * self.weights
            total = others + own.exp()
            pulled = self.missed.unsqueeze(-1) * self.k[self.labels].to(sums.dtype)
        else:
            total = others
            ell = others.log() * mass - linear
            pulled = pulled * self.weights.unsqueeze(-1) if pulled is not None else torch.zeros_like(sums[:, :F])
        # Nothing left by the mask, or of no weight: silent, not NaN.
        dead = (total == 0) | (self.weights == 0)
        self.scale = (self.weights / total).masked_fill(dead, 0)
        ell = ell.masked_fill(total == 0, 0)
        return ell, running.sums[:, :F] * self.scale.unsqueeze(-1) - pulled.masked_fill(dead.unsqueeze(-1), 0)

    def backward(self, e: Tensor, dk: Tensor | None, db: Tensor | None) -> None:
        """What the block adds to ∂k ``(K, F)`` and ∂b ``(K,)``."""
        q = widened(self.q)
        for number, (begin, end) in enumerate(self.pieces):
            tile = self._tile(e, number, end - begin)
            scale = self.scale * torch.exp(self.references[number] - self.reference)
            if not self.problem.one_class:
                C = self.problem.targets_of(self.index, self.rows, slice(begin, end))
                weights = self.weights.masked_fill(self.scale == 0, 0)
                tile.mul_(scale.unsqueeze(-1)).sub_(C * weights.unsqueeze(-1))
                scale = torch.ones_like(scale)
            if dk is not None:
                dk[begin:end].addmm_(tile.mT, q * scale.unsqueeze(-1))
            if db is not None:
                db[begin:end].addmv_(tile.mT, scale)
        if self.problem.one_class:
            missed = self.missed.masked_fill(self.scale == 0, 0)
            if dk is not None:
                dk.index_add_(0, self.labels, q * missed.unsqueeze(-1), alpha=-1)
            if db is not None:
                db.index_add_(0, self.labels, missed, alpha=-1)

    def _tile(self, e: Tensor, number: int, width: int) -> Tensor:
        r = self.q.shape[0]
        return e[number if e.shape[0] > 1 else 0, : r * width].view(r, width)
