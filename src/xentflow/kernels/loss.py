"""ℓ of softmax distributions over N = qkᵀ + b, and its gradients, in one sweep over tiles of the logits.

For row i with targets C_i that sum to one, ℓ_i = R_i − ⟨C_i, N_i⟩ and, with weights w_i,

    ∂q_i = w_i (p_i − C_i) k        ∂k = Σ_i w_i (p_i − C_i)ᵀ q_i        ∂b = Σ_i w_i (p_i − C_i).

Three products, qkᵀ, ek and eᵀq, are the fewest that give all of it without keeping N. The sweep needs no more. A tile
of a block of rows becomes e = exp(N − m) and ek at once, m being the maximum of each row in that tile, and e is kept
until the whole row's maximum M and normaliser t are known. What a tile is short of, f = exp(m − M), goes with 1/t into
the thinner factor: p = f e / t, pk = Σ f (ek) / t, pᵀ(w q) = eᵀ(f w q / t).

Where C is one class y, that class is left out of the sums, and ℓ = softplus(log Σ_{j≠y} exp N_j − N_y): nothing cancels
however confident the row, and p_y − 1 = −sigmoid(log Σ_{j≠y} exp N_j − N_y) keeps its digits too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from xentflow.kernels.chunked import LOG2E, exponentiate, tiles_of_logits
from xentflow.kernels.matmul import is_doubled, nn, tn
from xentflow.kernels.tiles import Tiling, spans, widened


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
    n, S, _ = q.shape
    shared = k.shape[0] == 1
    wide = widened(q[:0]).dtype
    values = torch.empty(n, S, dtype=wide, device=q.device)
    grads = Gradients(
        q.new_empty(q.shape) if wants_q else None,
        torch.zeros(k.shape, dtype=wide, device=k.device) if wants_k else None,
        torch.zeros(k.shape[:2], dtype=wide, device=k.device) if wants_b and problem.bias is not None else None,
    )
    keeps = grads.k is not None or grads.b is not None
    # Masks and given targets lie row by row; without them nothing does.
    turned = problem.one_class and problem.mask is None and is_doubled(q)
    tiling = Tiling.of(S, k.shape[-2], keeps, turned)
    for index in range(n):
        of_key = 0 if shared else index
        for start, stop in spans(S, tiling.rows):
            rows = slice(start, stop)
            block = _Block(problem, index, rows, weights[index, rows].to(wide), tiling, wants_q, keeps)
            values[index, rows] = block.ell
            if grads.q is not None:
                grads.q[index, rows] = block.of_q()
            if grads.k is not None:
                block.add_of_k(grads.k[of_key])
            if grads.b is not None:
                block.add_of_b(grads.b[of_key])
            # Before the next block is made: its tiles are most of the memory.
            del block
    dk = grads.k if grads.k is None else grads.k.to(k.dtype)
    db = grads.b if grads.b is None else grads.b.to(k.dtype)
    return values, Gradients(grads.q, dk, db)


class _Tile(NamedTuple):
    """e of a tile ``(r, c)`` and, of each row, its maximum there ``(r,)``, −∞ where nothing takes part."""

    columns: slice
    e: Tensor
    m: Tensor


class _Block:
    """A block of rows of one matrix, against all keys: ℓ and ek at once, and e in tiles for the other gradients."""

    def __init__(
        self,
        problem: Problem,
        index: int,
        rows: slice,
        weights: Tensor,
        tiling: Tiling,
        gathers: bool,
        keeps: bool,
    ) -> None:
        self.problem, self.index, self.rows, self.weights, self.tiling = problem, index, rows, weights, tiling
        of_key = 0 if problem.k.shape[0] == 1 else index
        self.k = widened(problem.k[of_key])
        self.q = widened(problem.q[index, rows])
        self.labels = None if problem.labels is None else problem.labels[index, rows]
        bias = None if problem.bias is None else problem.bias[of_key : of_key + 1].to(self.q.dtype)
        mask = None if problem.mask is None else problem.mask[index : index + 1, rows]
        self.tiles: list[_Tile] = []
        self.m, self.total = torch.full_like(weights, -torch.inf), torch.zeros_like(weights)
        self.pulled = torch.zeros_like(self.q) if gathers else None
        tiles = tiles_of_logits(self.q[None], self.k[None], bias, mask, False, rows.start, tiling)
        ell = self._of_one_class(tiles, keeps) if problem.one_class else self._of_many(tiles, keeps)
        # Nothing left by the mask: silent, not NaN.
        self.dead = self.total == 0
        self.ell = ell.masked_fill(self.dead, 0)
        self.scale = (weights / self.total).masked_fill(self.dead, 0)

    def _of_one_class(self, tiles: Iterator[tuple[slice, Tensor]], keeps: bool) -> Tensor:
        assert self.labels is not None
        own = torch.empty_like(self.weights)
        # Labels in the order of their tiles, so that each tile finds its own at once.
        order = self.labels.argsort()
        edges = torch.tensor([end for _, end in spans(len(self.k), self.tiling.columns)], device=order.device)
        cuts = [0, *torch.searchsorted(self.labels[order].contiguous(), edges).tolist()]
        for number, (columns, N) in enumerate(tiles):
            mine = order[cuts[number] : cuts[number + 1]]
            at = self.labels[mine] - columns.start
            own[mine] = N[0, mine, at]
            N[0, mine, at] = -torch.inf
            m = N.amax(-1, keepdim=True)
            self._take(_Tile(columns, exponentiate(N, _present(m))[0], m[0, :, 0]), keeps)
        own -= _present(self.m)
        away = self.total.log() - own
        self.missed = torch.sigmoid(away) * self.weights
        self.total += own.exp()
        # softplus is the identity beyond 20, where e⁻²⁰ is still seen in float64.
        return torch.where(away > 20, away + torch.log1p(torch.exp(-away)), torch.nn.functional.softplus(away))

    def _of_many(self, tiles: Iterator[tuple[slice, Tensor]], keeps: bool) -> Tensor:
        # ⟨C, N − M⟩ by tiles: ⟨C, N − m⟩ + (m − M) ΣC.
        linear, counted = torch.zeros_like(self.weights), []
        for columns, N in tiles:
            m = N.amax(-1, keepdim=True)
            N.sub_(_present(m))
            C = self.problem.targets_of(self.index, self.rows, columns)
            linear += (C * N[0].masked_fill(N[0].isneginf(), 0)).sum(-1)
            counted.append((m[0, :, 0], C.sum(-1)))
            self._take(_Tile(columns, N.mul_(LOG2E).exp2_()[0], m[0, :, 0]), keeps)
        for m, count in counted:
            linear += (m - self.m).masked_fill(m.isneginf(), 0) * count
        return self.total.log() - linear

    def _take(self, tile: _Tile, keeps: bool) -> None:
        """One more tile's part of t and ek, to the maximum of all that came."""
        before, self.m = self.m, torch.maximum(self.m, tile.m)
        fallen, f = self._to_maximum(before), self._to_maximum(tile.m)
        self.total.mul_(fallen).addcmul_(tile.e.sum(-1), f)
        if self.pulled is not None:
            part = nn(tile.e[None], self.k[None, tile.columns])[0]
            self.pulled.mul_(fallen.unsqueeze(-1)).addcmul_(part, f.unsqueeze(-1))
        if keeps:
            self.tiles.append(tile)

    def _to_maximum(self, m: Tensor) -> Tensor:
        """f = exp(m − M), at most one."""
        return exponentiate(m.clone(), _present(self.m))

    def of_q(self) -> Tensor:
        """∂q of the block; it is made of ek, and that is used up."""
        assert self.pulled is not None
        pulled = self.pulled.mul_(self.scale.unsqueeze(-1))
        if self.problem.one_class:
            return pulled.sub_(self._of_label().unsqueeze(-1) * self.k[self.labels])
        for begin, end in spans(len(self.k), self.tiling.columns):
            C = self.problem.targets_of(self.index, self.rows, slice(begin, end))
            pulled -= self._counted().unsqueeze(-1) * nn(C[None], self.k[None, begin:end])[0]
        return pulled

    def add_of_k(self, dk: Tensor) -> None:
        """What the block adds to ∂k ``(K, F)``."""
        # What came last is still in the cache.
        for columns, e, m in reversed(self.tiles):
            scaled = self.q * (self.scale * self._to_maximum(m)).unsqueeze(-1)
            dk[columns] += tn(e[None], scaled[None])[0]
        if self.problem.one_class:
            assert self.labels is not None
            dk.index_add_(0, self.labels, self.q * self._of_label().unsqueeze(-1), alpha=-1)
            return
        weighted = self.q * self._counted().unsqueeze(-1)
        for columns, _, _ in self.tiles:
            C = self.problem.targets_of(self.index, self.rows, columns)
            dk[columns] -= tn(C[None], weighted[None])[0]

    def add_of_b(self, db: Tensor) -> None:
        """What the block adds to ∂b ``(K,)``."""
        for columns, e, m in self.tiles:
            db[columns] += e.mT @ (self.scale * self._to_maximum(m))
        if self.problem.one_class:
            assert self.labels is not None
            db.index_add_(0, self.labels, self._of_label(), alpha=-1)
            return
        for columns, _, _ in self.tiles:
            db[columns] -= self.problem.targets_of(self.index, self.rows, columns).mT @ self._counted()

    def _of_label(self) -> Tensor:
        """w (1 − p_y)."""
        return self.missed.masked_fill(self.dead, 0)

    def _counted(self) -> Tensor:
        return self.weights.masked_fill(self.dead, 0)


def _present(m: Tensor) -> Tensor:
    """Maxima, zero of rows without entries."""
    return m.masked_fill(m.isneginf(), 0)
