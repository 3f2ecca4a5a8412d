"""The two products every attention term is made of, pk and pᵀq with p = ∇Ω(qkᵀ + b), without keeping N.

A distribution has an owner, the row on the classes axis and the column on the sequence axis. With a the owners, c what
they attend to, and β the part of the bias that their distributions see,

    owners' product     O, R = attend(a, c, c, β)            Σ over entries of p c
    entries' product    O′, R′ = attend(c, a, a, −R)         exp(R′ + β) O′ = pᵀa

since p = exp(N − R) is softmax attention the other way round, up to the factor exp(R′) ≤ S. So the softmax along either
axis, and the exact gradient of the quadratic model, are one or two passes of one operator. Other potentials are gone
through in blocks of distributions, each computed again in the backward pass.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from xentflow.axes import Axis
from xentflow.kernels.dispatch import Backend, attend
from xentflow.kernels.tiles import KEPT, spans
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
    turned = Masking(None if masking.dense is None else masking.dense.mT, masking.columns, masking.rows, masking.causal)
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
    dense, causal = masking.dense, masking.causal
    if wants_other and causal:
        dense, causal = Masking(dense, causal=True).tensor(_logits_of(a, c), "classes"), False
    seen = _of_present(bias, masking.columns, c)
    shared = c.ndim < a.ndim and dense is None and seen is bias
    if shared and not wants_other and masking.rows is None:
        return _for_shared_keys(a, c, c_values, bias, backend), None
    own, R = attend(a, c, c_values, seen, dense, causal, backend)
    if masking.rows is not None:
        own = own.masked_fill(~masking.rows.unsqueeze(-1), 0)
        R = R.masked_fill(~masking.rows, -torch.inf)
    if not wants_other:
        return own, None
    # An owner without entries owns nothing: as a key of the second pass it is absent.
    reverse = (-R).masked_fill(R == -torch.inf, -torch.inf).to(a.dtype)
    other, back = attend(c, a, a_values, reverse, None if dense is None else dense.mT, False, backend)
    factor = back if bias is None else back + bias
    other = other * factor.exp().to(other.dtype).unsqueeze(-1)
    if masking.columns is not None:
        other = other.masked_fill(~masking.columns.unsqueeze(-1), 0)
    return (own if wants_own else None), other


def _for_shared_keys(a: Tensor, c: Tensor, values: Tensor, bias: Tensor | None, backend: Backend) -> Tensor:
    """Keys that all samples share: the samples' queries are one long matrix, and the keys are not repeated."""
    heads = c.ndim == 3
    moved = a.movedim(-3, 0) if heads else a
    flat = moved.flatten(1, -2) if heads else moved.flatten(0, -2)
    own, _ = attend(flat, c, values, bias, None, False, backend)
    own = own.reshape(*moved.shape[:-1], values.shape[-1])
    return own.movedim(0, -3) if heads else own


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
    like = _logits_of(q, k)
    samples = like[..., 0, 0].numel()
    length, width = like.shape[-2:] if classes else like.shape[:-3:-1]
    size = max(1, KEPT // (samples * width))

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
        dense = torch.atleast_2d(dense)
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


def _logits_of(q: Tensor, k: Tensor) -> Tensor:
    """A tensor of the shape of the logits, to be looked at for that alone."""
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    return q.new_empty(()).expand(*batch, q.shape[-2], k.shape[-2])
