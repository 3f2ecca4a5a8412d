"""Potentials: a convex Ω along an axis, and the attention weights p = ∇Ω(N) it implies.

========== ============================== ============================ ===================== =============
potential  Ω(N)                           p = ∇Ω(N)                    domain of Ω*          curvature
========== ============================== ============================ ===================== =============
LogSumExp  T log Σ exp(N/T)               softmax(N/T)                 the simplex           1/(2T)
Softplus   Σ log(1 + exp N)               sigmoid(N)                   [0, 1] each           1/4
HalfSquare ½ Σ N²                         N                            everything            1
Entmax     max over the simplex of        sparse: zero below a         the simplex           1
           ⟨p, N⟩ − Ω*(p), Tsallis        threshold
========== ============================== ============================ ===================== =============

The conjugate Ω*(p) = sup ⟨p, N⟩ − Ω(N) gives the Fenchel–Young gap Ω(N) + Ω*(p) − ⟨p, N⟩ ≥ 0. Curvature is the
Lipschitz constant of ∇Ω, in the Euclidean norm along the axis.

A mask removes entries from Ω itself: Ω is then the potential of the entries that remain, its gradient is zero at the
others, and where nothing remains Ω = 0. So a masked attention is still exactly the gradient of a (masked) energy.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from xentflow import _entmax
from xentflow.axes import Axis, dimension, holds, is_number
from xentflow.errors import XentflowError

Logits = Float[Tensor, "*batch S K"]
PerDistribution = Float[Tensor, "*batch D"]
Mask = Bool[Tensor, "..."]


@dataclass(frozen=True)
class Potential(ABC):
    """A convex function of each distribution's logits, summed over nothing: one value per row or column."""

    axis: Axis
    curvature: ClassVar[float]
    """Lipschitz constant of ∇Ω; see the subclass where it depends on a parameter."""

    def __post_init__(self) -> None:
        dimension(self.axis)

    @property
    def dim(self) -> int:
        return dimension(self.axis)

    @abstractmethod
    def value(self, N: Logits, mask: Mask | None = None) -> PerDistribution:
        """Ω(N), one number for each distribution along the axis."""

    @abstractmethod
    def gradient(self, N: Logits, mask: Mask | None = None) -> Logits:
        """p = ∇Ω(N), of the shape of N."""

    @abstractmethod
    def conjugate(self, p: Logits) -> PerDistribution:
        """Ω*(p) = sup ⟨p, N⟩ − Ω(N); infinite (never finite by accident) outside its domain."""

    def tilted(self, N: Logits, p: Logits, mask: Mask | None = None) -> PerDistribution:
        """Ω(N) − ⟨p, N⟩ for p in the domain of Ω*; overridden where the plain difference would cancel."""
        inner = p * N if mask is None else (p * N).masked_fill(~mask, 0)
        return self.value(N, mask) - inner.sum(self.dim)

    @abstractmethod
    def require_domain(self, name: str, p: Logits, mask: Mask | None = None) -> None:
        """Raise unless p lies in the domain of Ω*: outside it Ω(N) − ⟨p, N⟩ has no lower bound."""


class _OnSimplex(Potential):
    """What potentials with Ω(N + c1) = Ω(N) + c share: their weights are probability distributions.

    For them Ω(N) − ⟨p, N⟩ = (Ω(N) − max N) + ⟨p, max N − N⟩, in which both parts are non-negative whenever p is: no
    cancellation, at any logit size.
    """

    @abstractmethod
    def _excess(self, gaps: Logits, peak: Tensor) -> PerDistribution:
        """Ω(N) − max N from ``gaps = max N − N`` (huge or infinite where masked) and the index ``peak`` of max."""

    def tilted(self, N: Logits, p: Logits, mask: Mask | None = None) -> PerDistribution:
        N, alive = _present(_widened(N), mask, self.dim)
        peak = N.argmax(self.dim, keepdim=True)
        # A gap may overflow where both logits are finite, and 0 · ∞ is NaN.
        gaps = (N.gather(self.dim, peak) - N).clamp_max(torch.finfo(N.dtype).max)
        linear = p * (gaps if mask is None else gaps.masked_fill(~mask, 0))
        tilted = self._excess(gaps, peak) + linear.sum(self.dim)
        return _silenced(tilted, alive, self.dim).to(p.dtype)

    def require_domain(self, name: str, p: Logits, mask: Mask | None = None) -> None:
        tolerance = torch.finfo(p.dtype).eps ** 0.5
        wide = _widened(p)
        if not holds(wide >= -tolerance):
            raise XentflowError(f"{name}: expected no negative weight, got a least weight of {wide.min():.3g}")
        totals = wide.sum(self.dim) if mask is None else wide.masked_fill(~mask, 0).sum(self.dim)
        errors = (totals - 1).abs()
        if mask is not None:
            errors = errors.masked_fill(~mask.expand(p.shape).any(self.dim), 0)
        if not holds(errors <= tolerance):
            raise XentflowError(
                f'{name}: expected every distribution along axis="{self.axis}" to sum to one, '
                f"got sums from {totals.min():.6g} to {totals.max():.6g} (tolerance {tolerance:.1g})"
            )

    def _outside(self, p: Logits) -> Tensor:
        tolerance = torch.finfo(p.dtype).eps ** 0.5
        off: Tensor = (p.sum(self.dim) - 1).abs() > tolerance
        return off | (p < 0).any(self.dim)


@dataclass(frozen=True)
class LogSumExp(_OnSimplex):
    """Ω(N) = T log Σ exp(N / T), the potential of softmax attention; Ω*(p) = T Σ p log p."""

    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.temperature):
            raise XentflowError(f"temperature: expected a positive finite number, got {self.temperature!r}")

    @property
    def curvature(self) -> float:  # type: ignore[override]  # a class constant elsewhere, a function of T here
        return 0.5 / self.temperature

    def value(self, N: Logits, mask: Mask | None = None) -> PerDistribution:
        present, alive = _present(_widened(N), mask, self.dim)
        values = self.temperature * torch.logsumexp(present / self.temperature, self.dim)
        return _silenced(values, alive, self.dim).to(N.dtype)

    def gradient(self, N: Logits, mask: Mask | None = None) -> Logits:
        present, alive = _present(_widened(N), mask, self.dim)
        p = torch.softmax(present / self.temperature, self.dim).to(N.dtype)
        return p if alive is None else p.masked_fill(~alive, 0)

    def conjugate(self, p: Logits) -> PerDistribution:
        inside = p.clamp_min(0)
        negentropy = self.temperature * torch.xlogy(inside, inside).sum(self.dim)
        return negentropy.masked_fill(self._outside(p), float("inf"))

    def _excess(self, gaps: Logits, peak: Tensor) -> PerDistribution:
        # log1p of the *other* terms keeps every digit of a confident row; log Σ would round it to zero.
        others = torch.exp(-gaps / self.temperature).scatter(self.dim, peak, 0.0)
        return self.temperature * torch.log1p(others.sum(self.dim))


@dataclass(frozen=True)
class Entmax(_OnSimplex):
    """Ω* is the Tsallis negentropy (Σ p^α − p) / (α(α−1)): α-entmax, sparse attention; α = 2 is sparsemax.

    1 < α ≤ 2; as α → 1 it tends to LogSumExp. Beyond 2 the weights are no longer Lipschitz in the logits. Peters,
    Niculae and Martins (2019); the threshold comes from the ``entmax`` package.
    """

    alpha: float = 1.5
    curvature: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.alpha, above=1) or self.alpha > 2:
            raise XentflowError(f"alpha: expected 1 < alpha <= 2 (1 is LogSumExp), got {self.alpha!r}")

    def value(self, N: Logits, mask: Mask | None = None) -> PerDistribution:
        present, alive = _present(_widened(N), mask, self.dim)
        peak = present.argmax(self.dim, keepdim=True)
        highest = present.gather(self.dim, peak)
        values = highest.squeeze(self.dim) + self._excess(highest - present, peak)
        return _silenced(values, alive, self.dim).to(N.dtype)

    def gradient(self, N: Logits, mask: Mask | None = None) -> Logits:
        present, alive = _present(_widened(N), mask, self.dim)
        p = _entmax.weights(present, self.alpha, self.dim).to(N.dtype)
        return p if alive is None else p.masked_fill(~alive, 0)

    def conjugate(self, p: Logits) -> PerDistribution:
        return self._negentropy(p.clamp_min(0)).masked_fill(self._outside(p), float("inf"))

    def _negentropy(self, p: Logits) -> PerDistribution:
        return (p**self.alpha - p).sum(self.dim) / (self.alpha * (self.alpha - 1))

    def _excess(self, gaps: Logits, peak: Tensor) -> PerDistribution:
        p = _entmax.weights(-gaps, self.alpha, self.dim)
        reached = gaps.masked_fill(p == 0, 0)
        # Weights of zero and one add nothing to Ω*, but p^α has an infinite second derivative at zero.
        excess = -(p * reached).sum(self.dim) - self._negentropy(p.masked_fill(p == 0, 1))
        # The exact excess is not negative; rounding may be. Its derivative is kept either way.
        return excess + (excess.clamp_min(0) - excess).detach()


class Softplus(Potential):
    """Ω(N) = Σ log(1 + exp N), each entry for itself: sigmoid attention; Ω*(p) = Σ p log p + (1−p) log(1−p)."""

    curvature: ClassVar[float] = 0.25

    def value(self, N: Logits, mask: Mask | None = None) -> PerDistribution:
        return _kept(_softplus(_widened(N)), mask).sum(self.dim).to(N.dtype)

    def gradient(self, N: Logits, mask: Mask | None = None) -> Logits:
        return _kept(torch.sigmoid(N), mask)

    def conjugate(self, p: Logits) -> PerDistribution:
        inside = p.clamp(0, 1)
        negentropy = (torch.xlogy(inside, inside) + torch.xlogy(1 - inside, 1 - inside)).sum(self.dim)
        return negentropy.masked_fill(((p < 0) | (p > 1)).any(self.dim), float("inf"))

    def tilted(self, N: Logits, p: Logits, mask: Mask | None = None) -> PerDistribution:
        # p·softplus(−N) + (1−p)·softplus(N): the same number, with no difference of large ones.
        wide = _widened(N)
        return _kept(p * _softplus(-wide) + (1 - p) * _softplus(wide), mask).sum(self.dim).to(p.dtype)

    def require_domain(self, name: str, p: Logits, mask: Mask | None = None) -> None:
        tolerance = torch.finfo(p.dtype).eps ** 0.5
        if not holds((p >= -tolerance) & (p <= 1 + tolerance)):
            raise XentflowError(f"{name}: expected weights between 0 and 1, got {p.min():.6g} to {p.max():.6g}")


class HalfSquare(Potential):
    """Ω(N) = ½ Σ N², each entry for itself: linear attention, p = N; Ω*(p) = ½ Σ p²."""

    curvature: ClassVar[float] = 1.0

    def value(self, N: Logits, mask: Mask | None = None) -> PerDistribution:
        return _kept(0.5 * _widened(N).square(), mask).sum(self.dim).to(N.dtype)

    def gradient(self, N: Logits, mask: Mask | None = None) -> Logits:
        return _kept(N, mask)

    def conjugate(self, p: Logits) -> PerDistribution:
        return 0.5 * p.square().sum(self.dim)

    def tilted(self, N: Logits, p: Logits, mask: Mask | None = None) -> PerDistribution:
        wide = _widened(N)
        return _kept((0.5 * wide - p) * wide, mask).sum(self.dim).to(p.dtype)

    def require_domain(self, name: str, p: Logits, mask: Mask | None = None) -> None:
        """Every finite p is in the domain."""


def _softplus(N: Tensor) -> Tensor:
    # torch's softplus is the identity beyond 20, an error of 2e-9 that float64 sees.
    return -torch.nn.functional.logsigmoid(-N)


def _widened(N: Tensor) -> Tensor:
    """Half-precision logits in float32: their differences and sums overflow or round away in 16 bits."""
    return N.float() if N.dtype in (torch.float16, torch.bfloat16) else N


def _kept(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else values.masked_fill(~mask, 0)


def _present(N: Tensor, mask: Tensor | None, dim: int) -> tuple[Tensor, Tensor | None]:
    """Logits with masked entries at −∞, and which distributions have any entry left (None: all of them).

    A distribution with nothing left keeps its logits, so that no NaN arises; its result is silenced afterwards.
    """
    if mask is None:
        return N, None
    mask = mask.expand(N.shape)
    alive = mask.any(dim, keepdim=True)
    return N.masked_fill(~mask & alive, -float("inf")), alive


def _silenced(values: Tensor, alive: Tensor | None, dim: int) -> Tensor:
    return values if alive is None else values.masked_fill(~alive.squeeze(dim), 0)
