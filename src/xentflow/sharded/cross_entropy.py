"""ℓ of the linear model over logits that are spread over processes.

Where the cut goes through distributions with labels, process r knows R_r or, of rows whose label it holds, the ℓ_r of
its own part: softplus(d_r). All it sends is d_r, one number a row. With ℓ known, p_j = exp(R_r − R) p_j^r, and since
R_r − R = ℓ_r − ℓ where the label is, its gradients are those of its own part with weights exp(ℓ_r − ℓ), but for the
label's own −σ(D), D = log Σ_r exp d_r, of which its part says exp(ℓ_r − ℓ) σ(d_r); the difference is added.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid

from xentflow import losses
from xentflow.axes import Axis, dimension, holds, require_alike, require_features
from xentflow.errors import XentflowError
from xentflow.kernels import Problem, attend, cross_entropy
from xentflow.losses import Reduction
from xentflow.models import Features, Linear
from xentflow.sharded.collectives import Group, copied, largest, log_sum_exp, pieces, require_group, summed, wide


def linear_cross_entropy(
    Z: Features,
    theta: Float[Tensor, "K F"],
    C: Tensor,
    *,
    axis: Axis,
    shard: Axis,
    bias: Float[Tensor, " K"] | None = None,
    ignore_index: int | None = None,
    reduction: Reduction = "mean",
    group: Group = None,
) -> Tensor:
    """ℓ of N = Zθᵀ + b against C as ``xentflow.linear_cross_entropy`` has it, N being cut along ``shard``.

    Z: ``(*batch, S, F)``; theta: θ ``(K, F)``; bias: b ``(K,)``, which goes with θ; C: targets, cut as N is, or integer
    labels, one for each distribution that this process knows: among *all* classes or tokens, numbered through in the
    order of ranks; ignore_index: the label of distributions that do not count; reduction: over the distributions of all
    processes, ``"none"`` leaving those that this one knows.
    """
    dimension(shard)
    dimension(axis)
    require_group(group)
    require_features(Z)
    model = Linear(theta, bias)
    require_alike("theta", theta, "Z", Z)
    if theta.ndim != 2:
        raise XentflowError(f"theta: expected (K, F), without heads, got {tuple(theta.shape)}")
    like = model.logits_like(Z)
    if reduction not in ("mean", "sum", "none"):
        raise XentflowError(f'reduction: expected "mean", "sum" or "none", got {reduction!r}')
    if not isinstance(C, Tensor):
        raise XentflowError(f"C: expected targets or labels as a tensor, got {type(C).__name__}")
    if ignore_index is not None and C.is_floating_point():
        raise XentflowError(f"ignore_index: expected integer labels, some of which are to be ignored, got {C.dtype}")
    if shard == axis:
        return _reduced(_across(Z, theta, bias, C, like, axis, ignore_index, group), C, ignore_index, reduction)
    # Each distribution is whole on its process: only what all of them share has a derivative to be summed.
    if shard == "sequence":
        theta, bias = copied(theta, group), None if bias is None else copied(bias, group)
    else:
        Z = copied(Z, group)
    kind: Reduction = "none" if reduction == "none" else "sum"
    found = losses.linear_cross_entropy(Z, theta, C, axis=axis, bias=bias, ignore_index=ignore_index, reduction=kind)
    if reduction == "none":
        return found
    total = summed(found, group)
    if reduction == "sum":
        return total
    many = like.select(dimension(axis), 0).numel() if C.is_floating_point() else _counted(C, ignore_index)
    return total / summed(torch.as_tensor(many, dtype=total.dtype, device=total.device), group).clamp_min(1)


def _counted(labels: Tensor, ignore_index: int | None) -> Tensor:
    return (torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else torch.ne(labels, ignore_index)).sum()


def _reduced(ell: Tensor, C: Tensor, ignore_index: int | None, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return ell
    many = ell.numel() if C.is_floating_point() else _counted(C, ignore_index)
    return ell.sum() / torch.as_tensor(many, dtype=ell.dtype).clamp_min(1) if reduction == "mean" else ell.sum()


def _require_sums(C: Tensor, dim: int, group: Group) -> None:
    """Raise, on every process or none, unless C is non-negative and sums to one over all of them."""
    total = summed(C.detach().where(C.detach() >= 0, torch.nan).sum(dim), group)
    off = (total - 1).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    if not holds(off <= torch.finfo(C.dtype).eps ** 0.5):
        raise XentflowError(
            f"C: expected entries of at least 0 that sum to one over all processes, got sums from {total.min():.4g} to "
            f"{total.max():.4g}"
        )


def _across(
    Z: Tensor,
    theta: Tensor,
    bias: Tensor | None,
    C: Tensor,
    like: Tensor,
    axis: Axis,
    ignore_index: int | None,
    group: Group,
) -> Tensor:
    """ℓ of every distribution, of each of which this process holds a part."""
    classes = axis == "classes"
    entries = like.shape[dimension(axis)]
    owned = like.select(dimension(axis), 0)
    # Rows of q are distributions, rows of k their entries; on the sequence axis samples have entries of their own.
    q = Z.reshape(1, -1, Z.shape[-1]) if classes else theta.expand(owned.shape[:-1].numel(), *theta.shape)
    k = theta[None] if classes else Z.reshape(-1, *Z.shape[-2:])
    b = bias[None] if classes and bias is not None else None
    if C.is_floating_point():
        require_alike("C", C, "Z", Z)
        if C.shape != like.shape:
            raise XentflowError(f"C: expected {tuple(like.shape)} like this process's logits, got {tuple(C.shape)}")
        _require_sums(C, dimension(axis), group)
        targets = C.reshape(1, -1, entries) if classes else C.reshape(-1, *C.shape[-2:]).mT
        ell = _of_targets(q, k, b, targets, group)
    else:
        if C.shape != owned.shape or C.dtype == torch.bool:
            raise XentflowError(
                f"C: expected integer labels {tuple(owned.shape)} or targets {tuple(like.shape)}, got {C.dtype} "
                f"{tuple(C.shape)}"
            )
        lengths = pieces(entries, Z, group)
        kept = torch.ones_like(C, dtype=torch.bool) if ignore_index is None else torch.ne(C, ignore_index)
        labels = torch.where(kept, C, 0).long()
        if not holds((labels >= 0) & (labels < sum(lengths))):
            raise XentflowError(
                f"C: expected labels from 0 to {sum(lengths) - 1}, got {int(C.min())} to {int(C.max())}"
            )
        first = sum(lengths[: dist.get_rank(group)])
        found: Tensor = _OfLabels.apply(q, k, b, labels.reshape(q.shape[:2]), first, group)  # type: ignore[no-untyped-call]
        ell = found * kept.reshape(found.shape)
    found = ell.reshape(owned.shape).to(Z.dtype)
    # On the sequence axis a bias cancels: it has a derivative all the same, zero.
    return found if bias is None or classes else found + 0 * bias.sum()


def _of_targets(q: Tensor, k: Tensor, b: Tensor | None, C: Tensor, group: Group) -> Tensor:
    """R − ⟨C, N⟩, where ⟨C, N⟩ = ⟨Ck, q⟩ + Cb."""
    q = copied(q, group)
    _, R = attend(q, k, k[..., :1], b)
    linear = ((C @ k).to(R.dtype) * q).sum(-1)
    if b is not None:
        linear = linear + (C @ b.unsqueeze(-1)).squeeze(-1)
    return log_sum_exp(R, group) - summed(linear, group)


def _softplus(x: Tensor) -> Tensor:
    # torch's own leaves out exp(−x) beyond a threshold.
    return -logsigmoid(-x)


class _OfLabels(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, bias: Tensor | None, labels: Tensor, first: int, group: Group
    ) -> Tensor:
        here = (labels >= first) & (labels < first + k.shape[-2])
        local = torch.where(here, labels - first, 0)
        own = torch.zeros(labels.shape, dtype=wide(q.dtype), device=q.device)
        away = torch.empty_like(own)
        rows = [(here[i].nonzero().squeeze(-1), (~here[i]).nonzero().squeeze(-1)) for i in range(len(q))]
        for i, (mine, _) in enumerate(rows):
            part = _Part(i, q, k, bias)
            own[i, mine] = part.logits(mine, local[i, mine])
        dist.all_reduce(own, group=group)
        for i, (mine, others) in enumerate(rows):
            part = _Part(i, q, k, bias)
            if len(mine):
                ell = cross_entropy(part.problem(mine, local[i, mine]), None)[0]
                # softplus undone; −∞ where what is here weighs nothing against the label.
                away[i, mine] = ell + torch.log(-torch.expm1(-ell))
            if len(others):
                _, R = attend(part.q[:, others], part.k, part.k[..., :1], part.bias)
                away[i, others] = R[0] - own[i, others]
        peak = largest(away, group)
        total = (away - peak).exp()
        dist.all_reduce(total, group=group)
        whole = _softplus(peak + total.log())
        ctx.save_for_backward(q, k, bias, local, away, whole)
        ctx.rows, ctx.group = rows, group
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, bias, local, away, ell = ctx.saved_tensors
        dq, dk, db = (torch.zeros(shape, dtype=ell.dtype, device=q.device) for shape in (q.shape, k.shape, k.shape[:2]))
        for i, (mine, others) in enumerate(ctx.rows):
            part = _Part(i, q, k, bias)
            if len(mine):
                of_part = _softplus(away[i, mine])
                share = (of_part - ell[i, mine]).exp()
                of_q, of_k, of_b = part.gradients(mine, local[i, mine], upstream[i, mine] * share)
                missed = upstream[i, mine] * (share * torch.expm1(-of_part) - torch.expm1(-ell[i, mine]))
                at = local[i, mine]
                dq[i, mine] += of_q - missed.unsqueeze(-1) * part.k[0, at]
                dk[part.of_key] += of_k
                dk[part.of_key].index_add_(0, at, missed.unsqueeze(-1) * part.q[0, mine], alpha=-1)
                db[part.of_key] += of_b
                db[part.of_key].index_add_(0, at, missed, alpha=-1)
            if len(others):
                share = (away[i, others] - ell[i, others]).exp()
                of_q, of_k, of_b = part.gradients(others, None, upstream[i, others] * share)
                dq[i, others] += of_q
                dk[part.of_key] += of_k
                db[part.of_key] += of_b
        dist.all_reduce(dq, group=ctx.group)
        return dq.to(q.dtype), dk.to(k.dtype), None if bias is None else db.to(bias.dtype), None, None, None


class _Part:
    """One matrix of distributions, and the entries of them that this process holds."""

    def __init__(self, index: int, q: Tensor, k: Tensor, bias: Tensor | None) -> None:
        self.of_key = index if len(k) > 1 else 0
        self.q, self.k = q[index : index + 1], k[self.of_key : self.of_key + 1]
        self.bias = None if bias is None else bias[self.of_key : self.of_key + 1]

    def logits(self, rows: Tensor, entries: Tensor) -> Tensor:
        """N of one entry a row."""
        found = (self.q[0, rows].to(wide(self.q.dtype)) * self.k[0, entries]).sum(-1)
        return found if self.bias is None else found + self.bias[0, entries]

    def problem(self, rows: Tensor, labels: Tensor) -> Problem:
        """Rows whose labels are here, as if what is here were all."""
        return Problem(self.q[:, rows], self.k, self.bias, None, labels[None], None)

    def gradients(self, rows: Tensor, labels: Tensor | None, weights: Tensor) -> tuple[Tensor, Tensor, Tensor | float]:
        """Those of Σ w ℓ of these rows in q, k and b; of Σ w R where their labels are elsewhere."""
        with torch.enable_grad():
            q, k = (X.detach().requires_grad_() for X in (self.q[:, rows], self.k))
            b = None if self.bias is None else self.bias.detach().requires_grad_()
            if labels is None:
                _, R = attend(q, k, self.k[..., :1], b)
                total = (weights * R[0]).sum()
            else:
                total = cross_entropy(Problem(q, k, b, None, labels[None], None), weights[None])
            of_q, of_k, *of_b = torch.autograd.grad(total, [q, k] if b is None else [q, k, b])
        return of_q[0], of_k[0], of_b[0][0] if of_b else 0.0
