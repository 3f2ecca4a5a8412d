"""ℓ of the linear model as a loss, in memory linear in the number of classes.

N = Zθᵀ + b is never kept. Along the classes axis this is the usual cross-entropy of a classifier or of a language
model's last layer; along the sequence axis every class has a distribution over the tokens.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from xentflow.axes import (
    Axis,
    dimension,
    is_number,
    require_alike,
    require_features,
    require_mask,
)
from xentflow.errors import XentflowError
from xentflow.kernels import Backend, Problem, cross_entropy, require_backend
from xentflow.models import Features, Linear
from xentflow.objective import CrossEntropy, Targets

Reduction = Literal["mean", "sum", "none"]


def linear_cross_entropy(
    Z: Features,
    theta: Float[Tensor, "*H K F"],
    C: Targets,
    *,
    axis: Axis,
    bias: Float[Tensor, "*H K"] | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    reduction: Reduction = "mean",
    backend: Backend = "auto",
) -> Tensor:
    """ℓ of N = (Zθᵀ + b) / T against C, differentiable in Z, θ and b.

    Z: ``(*batch, S, F)``; theta: θ ``(K, F)`` or ``(H, K, F)``; C: targets like the logits, or integer labels, one for
    each distribution: ``(*batch, [H], S)`` on the classes axis, ``(*batch, [H], K)`` on the sequence axis; bias: b;
    mask: True where a logit takes part; temperature: T; label_smoothing: the share of each one-hot target that is
    spread evenly over what takes part; ignore_index: the label of distributions that do not count; reduction: over all
    distributions that count, as in torch's losses, ``"sum"`` being ℓ of all samples and ``"none"`` leaving one value a
    distribution; backend: see ``kernels``.
    """
    require_backend(backend)
    require_features(Z)
    model = Linear(theta, bias)
    require_alike("Z", Z, "theta", theta)
    like = model.logits_like(Z)
    objective = CrossEntropy(axis, temperature)
    if not (is_number(label_smoothing, above=-1, below=1) and label_smoothing >= 0):
        raise XentflowError(f"label_smoothing: expected a number from 0 to below 1, got {label_smoothing!r}")
    if reduction not in ("mean", "sum", "none"):
        raise XentflowError(f'reduction: expected "mean", "sum" or "none", got {reduction!r}')
    if mask is not None:
        require_mask(mask, like)
    distributions = like.select(dimension(axis), 0)
    counted = torch.ones(distributions.shape, dtype=torch.bool, device=Z.device)
    if mask is not None:
        counted = mask.expand(like.shape).any(dimension(axis))
    if ignore_index is not None:
        C, kept = _without_ignored(C, ignore_index, like, distributions, axis, mask)
        counted = counted & kept
    C = objective.checked(C, like, mask)
    if C.is_floating_point() and label_smoothing:
        raise XentflowError("label_smoothing: expected integer labels to smooth, got targets; smooth those themselves")
    problem = _problem(Z, model, C, like, axis, temperature, mask, label_smoothing)
    # Ω(N) = T log Σ exp N/T: ℓ is T times the cross-entropy of N/T.
    # In float32 at least: in half precision 1/n has few digits, or none.
    weights = temperature * counted.to(torch.promote_types(Z.dtype, torch.float32))
    if reduction == "none":
        ell = _like_distributions(cross_entropy(problem, None, backend), distributions, axis, model.heads)
        found = (ell * weights).to(Z.dtype)
    else:
        if reduction == "mean":
            weights = weights / counted.sum().clamp_min(1)
        found = cross_entropy(problem, _rows(weights, axis, model.heads), backend).to(Z.dtype)
    # On the sequence axis a bias cancels: it has a derivative all the same, zero.
    return found if bias is None or axis == "classes" else found + 0 * bias.sum()


def _problem(
    Z: Tensor,
    model: Linear,
    C: Tensor,
    like: Tensor,
    axis: Axis,
    temperature: float,
    mask: Tensor | None,
    smoothing: float,
) -> Problem:
    """The distributions as rows of as few matrices as share their keys."""
    heads = model.heads
    Z = Z if temperature == 1 else Z / temperature
    full = None if mask is None else mask.expand(like.shape)
    soft = C.is_floating_point()
    if axis == "classes":
        per_head = Z if heads is None else Z.unsqueeze(-3).expand(*like.shape[:-1], Z.shape[-1])
        bias = None if model.bias is None else model.bias.reshape(-1, like.shape[-1]) / temperature
        theta = model.theta.reshape(-1, *model.theta.shape[-2:])
        return Problem(
            _rows(per_head, axis, heads, 1),
            theta,
            bias,
            None if full is None else _rows(full, axis, heads, 1),
            None if soft else _rows(C, axis, heads),
            _rows(C, axis, heads, 1) if soft else None,
            smoothing,
        )
    owners = (
        model.theta.expand(*like.shape[:-2], *model.theta.shape[-2:]).flatten(0, -3)
        if like.ndim > 2
        else model.theta[None]
    )
    per_head = Z if heads is None else Z.unsqueeze(-3)
    entries = per_head.expand(*like.shape[:-1], Z.shape[-1])
    return Problem(
        owners,
        _rows(entries, axis, heads, 1),
        None,
        None if full is None else _rows(full.mT, axis, heads, 1),
        None if soft else _rows(C, axis, heads),
        _rows(C.mT, axis, heads, 1) if soft else None,
        smoothing,
    )


def _rows(X: Tensor, axis: Axis, heads: int | None, trailing: int = 0) -> Tensor:
    """What belongs to distributions, ``(*batch, [H], D, …)``, as ``(n, rows, …)``; see ``_problem``."""
    last = X.shape[X.ndim - trailing :]
    if axis == "sequence":
        return X.reshape(-1, X.shape[X.ndim - trailing - 1], *last)
    if heads is None:
        return X.reshape(1, -1, *last)
    return X.movedim(-2 - trailing, 0).reshape(heads, -1, *last)


def _like_distributions(rows: Tensor, distributions: Tensor, axis: Axis, heads: int | None) -> Tensor:
    """``_rows`` undone."""
    if axis == "sequence" or heads is None:
        return rows.reshape(distributions.shape)
    batch, D = distributions.shape[:-2], distributions.shape[-1]
    return rows.reshape(heads, *batch, D).movedim(0, -2)


def _without_ignored(
    C: Targets, ignore_index: int, like: Tensor, distributions: Tensor, axis: Axis, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Labels with any that take part in the place of ignored ones, and which distributions count."""
    if not isinstance(C, Tensor) or C.is_floating_point() or C.dtype == torch.bool:
        came = C.dtype if isinstance(C, Tensor) else type(C).__name__
        raise XentflowError(f"ignore_index: expected integer labels, some of which are to be ignored, got {came}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise XentflowError(f"ignore_index: expected a whole number, got {ignore_index!r}")
    if C.shape != distributions.shape:
        raise XentflowError(
            f"ignore_index: expected integer labels {tuple(distributions.shape)}, one for each distribution, got "
            f"{tuple(C.shape)}"
        )
    kept = C.ne(ignore_index)
    if mask is None:
        return torch.where(kept, C, 0), kept
    first = mask.expand(like.shape).int().argmax(dimension(axis))
    return torch.where(kept, C, first), kept.expand(first.shape)
