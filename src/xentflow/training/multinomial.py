"""The minimum over θ and b of the regularised multinomial objective, to full accuracy.

    ℓ(θ, b) = mean over tokens of (LSE(N) − N_y) + ‖θ‖²/(2Cn),   N = Zθᵀ + b,

is scikit-learn's ``LogisticRegression``. For two classes that fits the single row w = θ₁ − θ₀ under ‖w‖²/2; with
θ₁ = −θ₀ = w/2 this is ‖θ‖², so there the penalty counts twice, and C means the same for any number of classes.

Each evaluation is two matrix products, in the precision of Z; sums over blocks of tokens are kept in float64. What
takes long on raw features is the number of evaluations: the Hessian Σ (diag p − ppᵀ) ⊗ zzᵀ is ill-conditioned. So
scipy's L-BFGS runs in coordinates V with θ = VL⁻¹, where LLᵀ is the class's own block of it, Σ p(1 − p)zzᵀ + I/C, from
some thousands of tokens, renewed every few steps. Adding one vector to all rows of θ leaves p as it is, and blocks know
nothing of that; so Σ_k θ_k = 0, which the minimum fulfils anyway, is imposed throughout.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xentflow.errors import XentflowError

_BLOCK = 8192
"""Tokens handled together: their logits stay in cache between the two products."""

_STAGE = 20
"""Steps between renewals of the coordinates."""

_SAMPLE = 8
"""Tokens for each feature that go into the coordinates."""

_DENSE = 2**27
"""Most entries that blocks of the Hessian may have, half of a gigabyte in float32; above it, their diagonals do."""


@dataclass(frozen=True, eq=False)
class MultinomialFit:
    """θ ``(K, F)`` and b ``(K,)`` in float64, ℓ there, the steps taken, and whether the tolerance was met."""

    theta: Tensor
    bias: Tensor
    objective: float
    iterations: int
    converged: bool


def fit_multinomial(
    Z: Tensor,
    labels: Tensor,
    classes: int,
    *,
    C: float = 1.0,
    bias: bool = True,
    tolerance: float = 3e-8,
    iterations: int = 500,
) -> MultinomialFit:
    """Minimise ℓ for tokens Z ``(n, F)`` and labels ``(n,)`` from 0 to K − 1.

    C: the inverse strength of the penalty, infinite for none; bias: whether b is fitted or stays 0; tolerance: relative
    to ℓ, of its expected further fall, half the squared gradient in the coordinates above; iterations: at most.
    """
    problem = _Problem(Z, labels, classes, (2 if classes == 2 else 1) / (C * len(Z)), bias)
    W = torch.zeros(classes, Z.shape[-1] + 1, dtype=torch.float64)
    objective, taken, converged = math.inf, 0, False
    while taken < iterations and not converged:
        W, found, steps, converged = _stage(problem, W, tolerance, min(_STAGE, iterations - taken))
        taken += steps
        if not math.isfinite(found):
            raise XentflowError(f"fit: expected a finite objective, got {found}; rescale the features")
        # A stage that changes nothing has met the rounding of Z's precision: there is no more to gain.
        converged = converged or steps == 0 or objective - found <= 1e-3 * tolerance * found
        objective = min(found, objective)
    return MultinomialFit(W[:, :-1].contiguous(), W[:, -1].contiguous(), objective, taken, converged)


class _Problem:
    """ℓ and its gradient in W = (θ, b), ``(K, F + 1)`` in float64."""

    def __init__(self, Z: Tensor, labels: Tensor, classes: int, penalty: float, bias: bool) -> None:
        self.Z, self.labels, self.classes, self.bias = Z, labels, classes, bias
        self.penalty = torch.full((Z.shape[-1] + 1,), penalty, dtype=torch.float64)
        self.penalty[-1] = 0
        stride = max(1, len(Z) // (_SAMPLE * (Z.shape[-1] + 1)))
        self.sample = torch.cat([Z[::stride], Z.new_ones(len(Z[::stride]), 1)], 1)

    def value_and_gradient(self, W: Tensor) -> tuple[float, Tensor]:
        """ℓ(W) and ∂ℓ/∂W: (p − C)ᵀZ/n + θ/(Cn) and Σ(p − C)/n."""
        weights = W.to(self.Z.dtype)
        theta, b = weights[:, :-1].mT, weights[:, -1]
        value, gradient = 0.0, torch.zeros_like(W)
        for Z, labels in self._blocks():
            log_p = torch.addmm(b, Z, theta).log_softmax(1)
            own = labels[:, None]
            value -= float(log_p.gather(1, own).sum(dtype=torch.float64))
            R = log_p.exp_().scatter_add_(1, own, torch.full_like(own, -1, dtype=Z.dtype))
            gradient[:, :-1] += R.mT @ Z
            gradient[:, -1] += R.sum(0, dtype=torch.float64)
        if not self.bias:
            gradient[:, -1] = 0
        n = len(self.Z)
        shrunk = self.penalty * W
        return value / n + 0.5 * float((shrunk * W).sum()), gradient / n + shrunk

    def coordinates(self, W: Tensor) -> Tensor:
        """L⁻¹ of each class ``(K or 1, F + 1, F + 1)``; the diagonals ``(K, F + 1)`` where that would be too large."""
        p = (self.sample @ W.to(self.sample.dtype).mT).softmax(1)
        # From zero, p is uniform and one block is every class's.
        weights = (p * (1 - p))[:, : self.classes if W.any() else 1]
        width = self.sample.shape[1]
        if self.classes * width**2 > _DENSE:
            moments = (weights.mT @ self.sample.square()).double() / len(self.sample) + self.penalty
            moments[moments == 0] = 1
            return moments.expand(self.classes, width).rsqrt()
        inverses = []
        for weight in weights.unbind(1):
            block = (self.sample.mT @ (self.sample * weight[:, None])).double() / len(self.sample)
            diagonal = block.diagonal()
            diagonal += self.penalty
            if not self.bias:
                block[-1], block[:, -1] = 0, 0
            # Rounding must not make it indefinite, nor a feature that is zero throughout make it singular.
            diagonal *= 1 + 10 * torch.finfo(self.Z.dtype).eps
            diagonal[diagonal == 0] = 1
            inverses.append(_inverse_factor(block))
        return torch.stack(inverses)

    def _blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(torch.split(self.Z, _BLOCK), torch.split(self.labels, _BLOCK), strict=True)


def _stage(problem: _Problem, start: Tensor, tolerance: float, iterations: int) -> tuple[Tensor, float, int, bool]:
    """Up to ``iterations`` steps in the coordinates of ``start``: W, ℓ, the steps taken, whether they sufficed."""
    from scipy.optimize import minimize

    inverse = problem.coordinates(start)
    last = (math.inf, math.inf)

    def place(v: Any) -> Tensor:
        V = torch.from_numpy(v).view(start.shape)
        return start + _centred(V * inverse if inverse.ndim == 2 else (V[:, None] @ inverse)[:, 0])

    def evaluate(v: Any) -> tuple[float, Any]:
        nonlocal last
        value, gradient = problem.value_and_gradient(place(v))
        gradient = _centred(gradient)
        pulled = gradient * inverse if inverse.ndim == 2 else (gradient[:, None] @ inverse.mT)[:, 0]
        last = value, 0.5 * float(pulled.square().sum())
        return value, pulled.flatten().numpy()

    def stop_early(_: Any) -> None:
        if last[1] <= tolerance * last[0]:
            raise StopIteration

    # Where rounding hides the fall of ℓ no line search succeeds, however long.
    options = {"maxiter": iterations, "maxcor": _STAGE, "gtol": 0.0, "ftol": 1e-3 * tolerance, "maxls": 8}
    found = minimize(
        evaluate, np.zeros(start.numel()), jac=True, method="L-BFGS-B", callback=stop_early, options=options
    )
    return place(found.x), float(found.fun), int(found.nit), last[1] <= tolerance * last[0]


def _inverse_factor(block: Tensor) -> Tensor:
    L, failed = torch.linalg.cholesky_ex(block)
    if failed:
        return torch.diag(block.diagonal().rsqrt())
    inverse: Tensor = torch.linalg.solve_triangular(L, torch.eye(len(L), dtype=L.dtype), upper=False)
    return inverse


def _centred(W: Tensor) -> Tensor:
    return W - W.mean(0)
