"""Softmax attention and its gradients tile by tile, from torch's public operations: memory linear in S and K.

Everything but one exponential is a matrix product on augmented matrices. With a running reference m_i of each row,

    [q, 1, −m] [k, b, 1]ᵀ = N − m        exp(N − m) [v, 1] = [Σ_j e_j v_j, Σ_j e_j]

so bias, reference and normaliser cost no pass over the tile of their own. m is the row's maximum over the first tile,
which leaves room for others e⁸⁰ times larger; in the rare block of rows where that overflows, m follows the maximum from
tile to tile and what was summed before is rescaled. In the same way, with D as in ``reference``,

    [q, 1, −R] [k, b, 1]ᵀ = N − R        [Ȯ, −D] [v, 1]ᵀ = Ȯvᵀ − D.
"""

import torch
from torch import Tensor

from xentflow.axes import holds
from xentflow.kernels.tiles import TILE, Tiling, spans


def widened(X: Tensor) -> Tensor:
    """Half precision in float32, in which tiles are computed."""
    return X.float() if X.dtype in (torch.float16, torch.bfloat16) else X


class Columns:
    """A scratch copy of a piece of a matrix with further columns beside it."""

    def __init__(self, like: Tensor, rows: int, *constants: float) -> None:
        width = like.shape[-1]
        self.width = width
        self.scratch = torch.empty(rows, width + len(constants), dtype=widened(like[:0]).dtype, device=like.device)
        for offset, constant in enumerate(constants):
            self.scratch[:, width + offset] = constant

    def of(self, X: Tensor, *columns: Tensor | None) -> Tensor:
        """X and its further columns; None leaves the constant."""
        piece = self.scratch[: X.shape[0]]
        piece[:, : self.width] = X
        for offset, column in enumerate(columns):
            if column is not None:
                piece[:, self.width + offset] = column
        return piece


def left_out(mask: Tensor | None, causal: bool, rows: slice, columns: slice, device: torch.device) -> Tensor | None:
    """Which entries of a tile take no part; None where all do."""
    out = None if mask is None else ~mask[rows, columns]
    if causal and columns.stop - 1 > rows.start:
        places = torch.arange(rows.start, rows.stop, device=device)[:, None]
        later = torch.arange(columns.start, columns.stop, device=device)[None] > places
        out = later if out is None else out | later
    return out


class RunningSoftmax:
    """The reference m and the sums of a block of rows, tile after tile.

    q: ``(r, F)``; sums: ``(r, G + 1)``, which gathers exp(N − m)[v, 1]; careful: whether m follows the maximum beyond
    the first tile.
    """

    def __init__(self, queries: Columns, q: Tensor, sums: Tensor, careful: bool) -> None:
        self.queries = queries.of(q)
        self.queries[:, -1] = 0
        self.sums = sums
        self.careful = careful
        self.started = False

    @property
    def reference(self) -> Tensor:
        """m, by which the sums are relative."""
        return -self.queries[:, -1]

    @property
    def overflowed(self) -> bool:
        """Whether the block has to be done again, carefully."""
        return not (self.careful or holds(self.sums.isfinite()))

    def exponents(self, keys: Tensor, out: Tensor, absent: Tensor | None) -> Tensor | None:
        """N − m of a tile into ``out``; returns by how much m rose for it, where it did."""
        torch.mm(self.queries, keys.mT, out=out)
        if absent is not None:
            out.masked_fill_(absent, -torch.inf)
        if self.started and not self.careful:
            return None
        rise = out.amax(-1)
        # A row with nothing in it yet keeps its reference.
        rise.masked_fill_(rise == -torch.inf, 0)
        if self.started:
            rise.clamp_min_(0)
            self.sums.mul_(torch.exp(-rise).unsqueeze(-1))
        out.sub_(rise.unsqueeze(-1))
        self.queries[:, -1] -= rise
        return rise

    def add(self, e: Tensor, values: Tensor) -> None:
        """e[v, 1] joins the sums."""
        torch.addmm(self.sums, e, values, beta=1 if self.started else 0, out=self.sums)
        self.started = True


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """O ``(n, S, G)`` and R ``(n, S)`` of ``reference.attend``, for q ``(n, S, F)`` and k, v, bias, mask alike."""
    n, S, _ = q.shape
    K, G = v.shape[-2:]
    wide = widened(q[:0]).dtype
    O, R = q.new_empty(n, S, G), q.new_empty(n, S, dtype=wide)
    if S * K <= TILE:
        for a, b in spans(n, max(1, TILE // (S * K))):
            O[a:b], R[a:b] = _attend_whole(q[a:b], k[a:b], v[a:b], *_part(slice(a, b), bias, mask), causal)
        return O, R
    tiling = Tiling.of(S, K)
    e = torch.empty(tiling.rows * tiling.columns, dtype=wide, device=q.device)
    queries = Columns(q[0], tiling.rows, 1.0, 0.0)
    keys, values = Columns(k[0], tiling.columns, 0.0, 1.0), Columns(v[0], tiling.columns, 1.0)
    sums = torch.empty(tiling.rows, G + 1, dtype=wide, device=q.device)

    def block(index: int, rows: slice, careful: bool) -> RunningSoftmax:
        b_of, m_of = _part(index, bias, mask)
        running = RunningSoftmax(queries, q[index, rows], sums[: rows.stop - rows.start], careful)
        for begin, end in spans(K, tiling.columns):
            if causal and begin >= rows.stop:
                break
            columns = slice(begin, end)
            tile = e[: (rows.stop - rows.start) * (end - begin)].view(-1, end - begin)
            k_of = keys.of(k[index, columns], None if b_of is None else b_of[columns])
            running.exponents(k_of, tile, left_out(m_of, causal, rows, columns, q.device))
            running.add(tile.exp_(), values.of(v[index, columns]))
        return running

    for index in range(n):
        for start, stop in spans(S, tiling.rows):
            rows = slice(start, stop)
            running = block(index, rows, careful=False)
            if running.overflowed:
                running = block(index, rows, careful=True)
            total = running.sums[:, G:]
            O[index, rows] = running.sums[:, :G] / total.masked_fill(total == 0, 1)
            R[index, rows] = running.reference + total.squeeze(-1).log()
    return O, R


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    O: Tensor,
    R: Tensor,
    grad_O: Tensor,
    grad_R: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """∂q, ∂k, ∂v ``like q, k, v`` and ∂b ``(n, K)``, from O and R of the forward pass."""
    n, S, F = q.shape
    K = k.shape[-2]
    wide = R.dtype
    D = (grad_O.to(wide) * O.to(wide)).sum(-1) - grad_R
    # A row without any entry has p = 0: exp(N − ∞).
    R = R.masked_fill(R == -torch.inf, torch.inf)
    if S * K <= TILE:
        parts = []
        for a, b in spans(n, max(1, TILE // (S * K))):
            piece = slice(a, b)
            inputs = (q[piece], k[piece], v[piece], *_part(piece, bias, mask), causal)
            parts.append(_backward_whole(*inputs, R[piece], D[piece], grad_O[piece]))
        dq, dk, dv, db = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), db
    dq, dk, dv = (torch.zeros(X.shape, dtype=wide, device=X.device) for X in (q, k, v))
    db = torch.zeros(n, K, dtype=wide, device=q.device)
    tiling = Tiling.of(S, K)
    scratch = torch.empty(2, tiling.rows * tiling.columns, dtype=wide, device=q.device)
    queries, gradients = Columns(q[0], tiling.rows, 1.0, 0.0), Columns(grad_O[0], tiling.rows, 0.0)
    keys, values = Columns(k[0], tiling.columns, 0.0, 1.0), Columns(v[0], tiling.columns, 1.0)
    for index in range(n):
        b_of, m_of = _part(index, bias, mask)
        for start, stop in spans(S, tiling.rows):
            rows = slice(start, stop)
            q_of = queries.of(q[index, rows], None, -R[index, rows])
            g_of = gradients.of(grad_O[index, rows], -D[index, rows])
            for begin, end in spans(K, tiling.columns):
                if causal and begin >= stop:
                    break
                columns = slice(begin, end)
                p, dN = (piece[: (stop - start) * (end - begin)].view(stop - start, -1) for piece in scratch)
                k_of = keys.of(k[index, columns], None if b_of is None else b_of[columns])
                v_of = values.of(v[index, columns])
                torch.mm(q_of, k_of.mT, out=p)
                absent = left_out(m_of, causal, rows, columns, q.device)
                if absent is not None:
                    p.masked_fill_(absent, -torch.inf)
                p.exp_()
                torch.mm(g_of, v_of.mT, out=dN)
                dN.mul_(p)
                dv[index, columns].addmm_(p.mT, g_of[:, :-1])
                dq[index, rows].addmm_(dN, k_of[:, :F])
                dk[index, columns].addmm_(dN.mT, q_of[:, :F])
                db[index, columns] += dN.sum(0)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), db


def _attend_whole(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Samples whose logits fit a tile together."""
    q, k, v = widened(q), widened(k), widened(v)
    e = _exponents(q, k, bias, mask, causal)
    reference = e.amax(-1, keepdim=True)
    reference.masked_fill_(reference == -torch.inf, 0)
    e = e.sub_(reference).exp_()
    total = e.sum(-1, keepdim=True)
    O = (e @ v).div_(total.masked_fill(total == 0, 1))
    return O, (reference + total.log()).squeeze(-1)


def _backward_whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    R: Tensor,
    D: Tensor,
    grad_O: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, grad_O = widened(q), widened(k), widened(v), widened(grad_O)
    p = _exponents(q, k, bias, mask, causal).sub_(R.unsqueeze(-1)).exp_()
    dN = (grad_O @ v.mT).sub_(D.unsqueeze(-1)).mul_(p)
    return dN @ k, dN.mT @ q, p.mT @ grad_O, dN.sum(-2)


def _exponents(q: Tensor, k: Tensor, bias: Tensor | None, mask: Tensor | None, causal: bool) -> Tensor:
    N = q @ k.mT if bias is None else torch.baddbmm(bias.unsqueeze(-2).to(q.dtype), q, k.mT)
    S, K = N.shape[-2:]
    if causal:
        N.masked_fill_(~torch.ones(S, K, dtype=torch.bool, device=N.device).tril(), -torch.inf)
    return N if mask is None else N.masked_fill_(~mask, -torch.inf)


def _part(index: int | slice, bias: Tensor | None, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None if bias is None else bias[index], None if mask is None else mask[index])
