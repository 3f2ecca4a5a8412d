"""The two products every attention term is made of, pk and pᵀq with p = ∇Ω(qkᵀ + b), without keeping N.

A distribution has an owner, the row on the classes axis and the column on the sequence axis. Softmax attention of the
owners over their entries gives both products at once, so the softmax along either axis and the exact gradient of the
quadratic model are one pass of one operator. Other potentials are gone through in blocks of distributions, each
computed again in the backward pass.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from xentflow.axes import Axis
from xentflow.kernels import tiles
from xentflow.kernels.dispatch import Backend, attend, attend_both, logits_of
from xentflow.kernels.tiles import spans
from xentflow.masks import Masking, both
from xentflow.potentials import LogSumExp, Potential


class Products(NamedTuple):
    """pk ``(*batch, S, F)`` and pᵀq ``(*batch, K, F)``; None where not asked for."""

    rows: Tensor | None
    columns: Tensor | None


def attention_products(
    potential: Potential,
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    masking: Masking,
    *,
    rows: bool,
    columns: bool,
    backend: Backend = "auto",
) -> Products:
    """pk and pᵀq for q ``(*batch, S, F)``, k ``(*batch, K, F)``, bias ``(*batch, K)``; leading dimensions broadcast."""
    if not isinstance(potential, LogSumExp):
        return _blockwise(potential, q, k, bias, masking, rows, columns)
    scaled_q = q if potential.temperature == 1 else q / potential.temperature
    scaled_b = bias if bias is None or potential.temperature == 1 else bias / potential.temperature
    if potential.axis == "classes":
        own, other = _softmax(scaled_q, k, q, k, scaled_b, masking, rows, columns, backend)
        return Products(own, other)
    dense = masking.dense
    if dense is not None:
        dense = dense.mT if dense.ndim > 1 else dense.unsqueeze(-1)
    turned = Masking(dense, masking.columns, masking.rows, masking.causal)
    # A bias is the same for all entries of a column: its softmax does not see it.
    own, other = _softmax(k, scaled_q, k, q, None, turned, columns, rows, backend)
    return Products(other, own)


def _softmax(
    a: Tensor,
    c: Tensor,
    a_values: Tensor,
    c_values: Tensor,
    bias: Tensor | None,
    masking: Masking,
    wants_own: bool,
    wants_other: bool,
    backend: Backend,
) -> tuple[Tensor | None, Tensor | None]:
    """The owners' and the entries' product; rows of ``masking`` are owners."""
    seen = _of_present(bias, masking.columns, c)
    shared = c.ndim < a.ndim and masking.dense is None and not masking.causal and seen is bias
    if shared and not wants_other and masking.rows is None:
        return _for_shared_keys(a, c, c_values, bias, backend), None
    real = None if masking.rows is None else masking.rows.unsqueeze(-1)
    # An owner that is padding owns nothing: neither gathers nor gives.
    given = None if not wants_other else a_values if real is None else a_values.masked_fill(~real, 0)
    values = c_values if wants_own else None
    own, other, _ = attend_both(a, c, given, values, seen, masking.dense, masking.causal, backend)
    return own if own is None or real is None else own.masked_fill(~real, 0), other


def _for_shared_keys(a: Tensor, c: Tensor, values: Tensor, bias: Tensor | None, backend: Backend) -> Tensor:
    """Keys that all samples share: the samples' queries are one long matrix, and the keys are not repeated."""
    heads = c.ndim == 3
    moved = a.movedim(-3, 0) if heads else a
    flat = moved.flatten(1, -2) if heads else moved.flatten(0, -2)
    own, _ = attend(flat, c, values, bias, None, False, backend)
    # Heads may share queries, whose head dimension then has size one.
    found = own.reshape(*(own.shape[:1] if heads else ()), *moved.shape[1 if heads else 0 : -1], values.shape[-1])
    return found.movedim(0, -3) if heads else found


def _of_present(bias: Tensor | None, present: Tensor | None, c: Tensor) -> Tensor | None:
    """The bias, −∞ at entries that padding leaves out."""
    if present is None:
        return bias
    zero = torch.zeros(present.shape, dtype=c.dtype, device=c.device) if bias is None else bias
    return zero.masked_fill(~present, -torch.inf)


def _blockwise(
    potential: Potential, q: Tensor, k: Tensor, bias: Tensor | None, masking: Masking, rows: bool, columns: bool
) -> Products:
    """Any potential: blocks of whole distributions, one after another."""
    classes = potential.axis == "classes"
    like = logits_of(q, k)
    samples = like[..., 0, 0].numel()
    length, width = like.shape[-2:] if classes else like.shape[:-3:-1]
    size = max(1, tiles.KEPT // (samples * width))

    def part(span: slice, q: Tensor, k: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        a, c = (q[..., span, :], k) if classes else (q, k[..., span, :])
        beta = bias if bias is None or classes else bias[..., span]
        N = a @ c.mT
        N = N if beta is None else N + beta.unsqueeze(-2)
        p = potential.gradient(N, _mask_of(masking, span, N, potential.axis))
        return p @ c, p.mT @ a

    first, second = [], None
    plain = torch._C._are_functorch_transforms_active() or not torch.is_grad_enabled()
    for begin, end in spans(length, size):
        arguments = (slice(begin, end), q, k, bias)
        of_rows, of_columns = part(*arguments) if plain else checkpoint(part, *arguments, use_reentrant=False)
        own, other = (of_rows, of_columns) if classes else (of_columns, of_rows)
        first.append(own)
        second = other if second is None else second + other
    owned = torch.cat(first, -2)
    found = (owned, second) if classes else (second, owned)
    return Products(found[0] if rows else None, found[1] if columns else None)


def _mask_of(masking: Masking, span: slice, N: Tensor, axis: Axis) -> Tensor | None:
    """The part of the mask that a block of distributions sees."""
    classes = axis == "classes"
    dense, rows, columns, causal = masking
    if dense is not None:
        dense = dense if dense.ndim > 1 else dense[None]
        if dense.shape[-2 if classes else -1] != 1:
            dense = dense[..., span, :] if classes else dense[..., span]
    if rows is not None and classes:
        rows = rows[..., span]
    if columns is not None and not classes:
        columns = columns[..., span]
    whole = Masking(dense, rows, columns).tensor(N, axis)
    if causal:
        owners = torch.arange(span.start, span.stop, device=N.device)
        entries = torch.arange(N.shape[-1] if classes else N.shape[-2], device=N.device)
        seen = entries[None] <= owners[:, None]
        whole = both(whole, seen if classes else seen.mT)
    return whole
