"""The objective ℓ = ⟨1, Ω(N)⟩ − ⟨C, N⟩ of logits N against targets C, and its residual R = p − C.

For Ω = LogSumExp and C summing to one along the axis this is the cross-entropy −⟨C, log p⟩. There is no model here.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from xentflow.axes import Axis, holds, require_alike, require_finite, require_float_tensor, require_mask
from xentflow.errors import XentflowError
from xentflow.masks import Masking
from xentflow.potentials import Logits, LogSumExp, Mask, PerDistribution, Potential

Targets = Float[Tensor, "..."] | Integer[Tensor, "..."] | Bool[Tensor, "..."]
"""Targets like N; or integer labels, one a distribution, where a one-hot C is meant."""


class Objective:
    """ℓ from a convex potential Ω.

    Targets C must lie in the domain of Ω*, or ℓ would have no lower bound: for LogSumExp and Entmax every distribution
    is non-negative and sums to one; for Softplus every entry is in [0, 1]; for HalfSquare anything goes.
    """

    def __init__(self, potential: Potential) -> None:
        if not isinstance(potential, Potential):
            raise XentflowError(f"potential: expected a Potential such as LogSumExp, got {type(potential).__name__}")
        self.potential = potential

    def __repr__(self) -> str:
        return f"Objective({self.potential!r})"

    @property
    def axis(self) -> Axis:
        return self.potential.axis

    def per_distribution(self, N: Logits, C: Targets, mask: Mask | None = None) -> PerDistribution:
        """ℓ of each row (axis "classes") or column (axis "sequence"), accurate for confident logits."""
        C = self._checked(N, C, mask)
        return self.potential.tilted(N, C, mask)

    def value(self, N: Logits, C: Targets, mask: Mask | None = None) -> Float[Tensor, "*batch"]:
        """ℓ of each sample: the distributions of one logit matrix summed."""
        return self.per_distribution(N, C, mask).sum(-1)

    def residual(self, N: Logits, C: Targets, mask: Mask | None = None) -> Logits:
        """R = ∇Ω(N) − C = ∂ℓ/∂N."""
        C = self._checked(N, C, mask)
        return self.potential.gradient(N, mask) - C

    def gap(self, N: Logits, C: Targets, mask: Mask | None = None) -> PerDistribution:
        """The Fenchel–Young gap Ω(N) + Ω*(C) − ⟨C, N⟩ ≥ 0 of each distribution, zero where p = C."""
        C = self._checked(N, C, mask)
        conjugate = self.potential.conjugate(C)
        if mask is not None:
            conjugate = conjugate.masked_fill(~mask.expand(N.shape).any(self.potential.dim), 0)
        return self.potential.tilted(N, C, mask) + conjugate

    def targets(self, C: Any, N: Tensor, mask: Mask | None = None) -> Tensor:
        """C as a validated floating tensor of the shape of the logits N, zero where masked.

        C has the shape of N, with size-one leading dimensions where it is shared, or is one ``(S, K)`` matrix for all;
        or it holds integer labels, in the shape of N without the axis.
        """
        return self.dense(self.checked(C, N, mask), N, mask)

    def checked(self, C: Any, N: Tensor, mask: Mask | Masking | None = None) -> Tensor:
        """C validated as by ``targets``; labels stay labels, int64 ``(*batch, D)``, taking no more memory."""
        masking = mask if isinstance(mask, Masking) else Masking(mask)
        compact = masking.dense is None and isinstance(C, Tensor) and not _like_logits(C, N)
        mask = None if compact else masking.tensor(N, self.axis)
        if mask is not None:
            require_mask(mask, N)
        if not isinstance(C, Tensor):
            raise XentflowError(f"C: expected a torch.Tensor of targets or labels, got {type(C).__name__}")
        if C.dtype == torch.bool:
            C = C.to(N.dtype)
        elif not (C.is_floating_point() or C.is_complex()):
            if C.shape != N.shape:
                labels = self._labels(C, N)
                self._require_present(labels, N, masking, mask)
                return labels
            C = C.to(N.dtype)
        require_float_tensor("C", C, "like the logits", 2)
        require_alike("C", C, "the features", N)
        if not _is_shared_form_of(C.shape, N.shape):
            raise XentflowError(
                f"C: expected the shape of the logits, {tuple(N.shape)} (leading dimensions may be 1), one matrix "
                f"{tuple(N.shape[-2:])} for all, or integer labels, got {tuple(C.shape)}"
            )
        require_finite("C", C)
        targets: Tensor = C.expand(N.shape)
        self.potential.require_domain("C", targets, mask)
        return targets if mask is None else targets.masked_fill(~mask, 0)

    def dense(self, C: Tensor, N: Tensor, mask: Mask | None = None) -> Tensor:
        """What ``targets`` gives, for C already validated: nothing is looked at."""
        if C.dtype == torch.bool:
            C = C.to(N.dtype)
        elif not C.is_floating_point():
            C = self._one_hot(C, N)
        full: Tensor = C.expand(N.shape)
        return full if mask is None else full.masked_fill(~mask, 0)

    def _labels(self, C: Tensor, N: Tensor) -> Tensor:
        dim = self.potential.dim
        shape = N.select(dim, 0).shape
        if not _is_shared_form_of(C.shape, shape, trailing=1):
            raise XentflowError(
                f'C: expected integer labels {tuple(shape)}, one for each distribution along axis="{self.axis}" '
                f"of the logits {tuple(N.shape)}, got {tuple(C.shape)}"
            )
        if C.device != N.device:
            raise XentflowError(f"C: expected the device of the features, {N.device}, got {C.device}")
        labels, classes = C.expand(shape).long(), N.shape[dim]
        if not holds((labels >= 0) & (labels < classes)):
            raise XentflowError(f"C: expected labels from 0 to {classes - 1}, got {labels.min()} to {labels.max()}")
        return labels

    def _require_present(self, labels: Tensor, N: Tensor, masking: Masking, mask: Mask | None) -> None:
        if mask is not None:
            self.potential.require_domain("C", self._one_hot(labels, N), mask)
            return
        present = masking.at_labels(labels, self.axis)
        owners = masking.rows if self.axis == "classes" else masking.columns
        if present is None:
            return
        wrong = ~present if owners is None else ~present & owners
        if not holds(~wrong):
            raise XentflowError(
                f"C: expected labels of entries that take part, got {int(wrong.sum())} of {wrong.numel()} that the "
                "mask leaves out"
            )

    def _one_hot(self, C: Tensor, N: Tensor) -> Tensor:
        if C.shape == N.shape:
            return C.to(N.dtype)
        dim = self.potential.dim
        labels = C.expand(N.select(dim, 0).shape).long().unsqueeze(dim)
        # Not zeros_like: inside torch.vmap that would carry N's batch, and a flow keeps its targets beyond it.
        return torch.zeros(N.shape, dtype=N.dtype, device=N.device).scatter(dim, labels, 1)

    def _checked(self, N: Tensor, C: Any, mask: Mask | None) -> Tensor:
        require_float_tensor("N", N, "(*batch, S, K)", 2)
        require_finite("N", N)
        return self.targets(C, N, mask)


class CrossEntropy(Objective):
    """ℓ = ⟨1, LSE(N)⟩ − ⟨C, N⟩, short for ``Objective(LogSumExp(axis, temperature))``."""

    def __init__(self, axis: Axis, temperature: float = 1.0) -> None:
        super().__init__(LogSumExp(axis, temperature))


def _is_shared_form_of(shape: torch.Size, full: torch.Size, trailing: int = 2) -> bool:
    """Whether a tensor means one of the full shape: leading dimensions equal or one, or absent altogether."""
    if shape[-trailing:] != full[-trailing:]:
        return False
    return len(shape) == trailing or (
        len(shape) == len(full) and all(came in (1, wanted) for came, wanted in zip(shape, full, strict=True))
    )


def _like_logits(C: Tensor, N: Tensor) -> bool:
    return C.is_floating_point() or C.is_complex() or C.dtype == torch.bool or C.shape == N.shape
