"""Attention terms over logits that are spread over processes; see ``kernels/products.py`` for the two passes.

Where both roles of a token matter, as in self-attention, each process keeps its queries, and the keys come to it one
process's piece at a time: partial results (O, R) of pieces combine exactly, and no process holds more than two pieces.
The backward pass has them come again, and sends each piece's gradient back to where it belongs.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from xentflow.axes import Axis, dimension, require_alike, require_features, require_finite, require_float_tensor
from xentflow.errors import XentflowError
from xentflow.kernels import attend
from xentflow.models import Features, Roles
from xentflow.sharded.collectives import Group, copied, log_sum_exp, pieces, require_group, summed, wide


def cross_attention(
    Z: Features, theta: Float[Tensor, "K F"], *, axis: Axis, shard: Axis, group: Group = None
) -> Features:
    """CA(Z, θ) = pθ ``(*batch, S, F)``, S being this process's tokens with ``shard="sequence"``.

    Z: ``(*batch, S, F)``; theta: θ ``(K, F)``; axis: where p sums to one; shard: see the package.
    """
    dimension(shard)
    dimension(axis)
    require_group(group)
    require_features(Z)
    require_float_tensor("theta", theta, "(K, F)", 2)
    require_finite("theta", theta)
    require_alike("theta", theta, "Z", Z)
    if theta.ndim != 2 or theta.shape[-1] != Z.shape[-1]:
        raise XentflowError(f"theta: expected (K, {Z.shape[-1]}) to match Z, got {tuple(theta.shape)}")
    if shard == "classes":
        Z = copied(Z, group)
    else:
        theta = copied(theta, group)
    if axis == "classes":
        O, R = attend(Z, theta, theta)
        if shard == "sequence":
            return O
        # Every process has a part of each row: R is used by each with its own part.
        whole = copied(log_sum_exp(R, group), group)
        return summed((R - whole).exp().to(O.dtype).unsqueeze(-1) * O, group)
    _, R = attend(theta, Z, Z[..., :1])
    if shard == "sequence":
        R = copied(log_sum_exp(R, group), group)
    found = _entries(*attend(Z, theta, theta, -R.to(Z.dtype)))
    return found if shard == "sequence" else summed(found, group)


def self_attention(X: Features, *, axis: Axis, group: Group = None) -> Features:
    """SA(X) = softmax(XXᵀ)X for this process's tokens ``(*batch, S, F)``, who see those of all."""
    dimension(axis)
    require_group(group)
    require_features(X, "X")
    if axis == "classes":
        return attend_all(X, X, None, None, group)[0]
    _, R = attend_all(X, X, X[..., :1], None, group)
    return _entries(*attend_all(X, X, None, -R, group))


def quadratic_attention(
    Z: Features, theta: Float[Tensor, "F F"], *, axis: Axis, roles: Roles = "both", group: Group = None
) -> Features:
    """The quadratic model's attention term for this process's tokens: pZθᵀ + pᵀZθ, p = softmax(ZθZᵀ) over all tokens.

    Z: ``(*batch, S, F)``; theta: θ ``(F, F)``, the same on every process; roles: "own" leaves the role in which a token
    owns its distribution.
    """
    dimension(axis)
    require_group(group)
    require_features(Z)
    require_float_tensor("theta", theta, "(F, F)", 2)
    require_finite("theta", theta)
    require_alike("theta", theta, "Z", Z)
    F = Z.shape[-1]
    if theta.shape != (F, F):
        raise XentflowError(f"theta: expected ({F}, {F}) to match Z, got {tuple(theta.shape)}")
    if roles not in ("both", "own"):
        raise XentflowError(f'roles: expected "both" or "own", got {roles!r}')
    theta = copied(theta, group)
    q = Z @ theta
    if axis == "classes":
        rows, R = attend_all(q, Z, None, None, group)
        found = rows @ theta.mT
        return found if roles == "own" else found + _entries(*attend_all(Z, q, Z, -R, group)) @ theta
    columns, R = attend_all(Z, q, Z, None, group)
    found = columns @ theta
    return found if roles == "own" else found + _entries(*attend_all(q, Z, None, -R, group)) @ theta.mT


def attend_all(q: Tensor, k: Tensor, v: Tensor | None, bias: Tensor | None, group: Group) -> tuple[Tensor, Tensor]:
    """O ``(*batch, S, G)`` and R ``(*batch, S)`` of this process's queries over the keys of all.

    q: ``(*batch, S, F)``; k, v: this process's keys and values, the keys where v is None; bias: b of its keys.
    """
    batch = q.shape[:-2]
    flat = [X.reshape(-1, *X.shape[-2:]) for X in ((q, k) if v is None else (q, k, v))]
    b = None if bias is None else bias.reshape(-1, bias.shape[-1]).to(k.dtype)
    O, R = _AttendAll.apply(*flat[:2], flat[2] if v is not None else None, b, group)  # type: ignore[no-untyped-call]
    return O.reshape(*batch, *O.shape[-2:]), R.reshape(*batch, R.shape[-1])


def _entries(O: Tensor, R: Tensor) -> Tensor:
    """exp(R)O: what the second pass gives those that own nothing."""
    return R.exp().to(O.dtype).unsqueeze(-1) * O


class _AttendAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor | None, bias: Tensor | None, group: Group
    ) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.lengths = group, pieces(k.shape[-2], k, group)
        parts = _Pieces(k, v, bias, ctx.lengths, group)
        width = k.shape[-1] if v is None else v.shape[-1]
        O = torch.zeros(*q.shape[:-1], width, dtype=wide(q.dtype), device=q.device)
        # Combining rounds once for each process: that is one number a row, and may be done in 64 bits.
        R = torch.full(q.shape[:-1], -torch.inf, dtype=torch.float64, device=q.device)
        for source in range(len(ctx.lengths)):
            part, own = attend(q, *parts.of(source))
            both = torch.logaddexp(R, own.double())
            old, new = ((each - both).exp_().to(O.dtype).unsqueeze(-1) for each in (R, own))
            O.mul_(old).add_(new * part)
            R = both
        O, R = O.to(q.dtype), R.to(O.dtype)
        ctx.save_for_backward(q, k, v, bias, O, R)
        return O, R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_O: Tensor, grad_R: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, O, R = ctx.saved_tensors
        parts = _Pieces(k, v, bias, ctx.lengths, ctx.group)
        dq = torch.zeros(q.shape, dtype=R.dtype, device=q.device)
        mine: list[Tensor] = []
        for source in range(len(ctx.lengths)):
            key, value, b = parts.of(source)
            given = [X.requires_grad_() for X in (q.detach(), *dict.fromkeys((key, value)))]
            given += [] if b is None else [b.requires_grad_()]
            with torch.enable_grad():
                part, own = attend(given[0], key, value, b)
            # O = Σ w_r O_r with w_r = exp(R_r − R): each part's derivatives are those of its own O_r and R_r.
            weight = (own.detach() - R).exp()
            of_part = weight.unsqueeze(-1) * grad_O
            of_own = (of_part * (part.detach() - O)).sum(-1) + weight * grad_R
            of_q, *gradients = torch.autograd.grad((part, own), given, (of_part.to(part.dtype), of_own.to(own.dtype)))
            dq += of_q
            for gradient in gradients:
                sent = gradient.to(R.dtype).contiguous()
                dist.reduce(sent, group_dst=source, group=ctx.group)
                if source == parts.rank:
                    mine.append(sent.to(k.dtype))
        dk, *rest = mine
        dv = None if v is None else rest.pop(0)
        return dq.to(q.dtype), dk, dv, rest[0] if rest else None, None


class _Pieces:
    """Keys, values and bias, one process's after another's."""

    def __init__(self, k: Tensor, v: Tensor | None, bias: Tensor | None, lengths: list[int], group: Group) -> None:
        self.own, self.lengths, self.group = (k, v, bias), lengths, group
        self.rank = dist.get_rank(group)

    def of(self, source: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Those of one process."""
        k, v, bias = (self._sent(X, source, 1) for X in self.own)
        assert k is not None
        return k, k if v is None else v, bias

    def _sent(self, X: Tensor | None, source: int, dim: int) -> Tensor | None:
        if X is None:
            return None
        shape = list(X.shape)
        shape[dim] = self.lengths[source]
        sent = X.detach().clone(memory_format=torch.contiguous_format) if source == self.rank else X.new_empty(shape)
        dist.broadcast(sent, group_src=source, group=self.group)
        return sent
