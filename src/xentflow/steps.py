"""How far to go: a certified step where the curvature of ℓ is bounded, a line search elsewhere.

For an affine model ∂²ℓ ≼ c‖A‖₂² on either axis, with c the potential's curvature and A the linear part of the model
(heads stacked), since the Hessian of ⟨1, Ω⟩ in N is block-diagonal with blocks ≼ c. For LogSumExp at temperature 1 that
is L = ½‖θ‖₂². Then any step h < 2/L keeps an Euler step from raising ℓ. The quadratic model has no such L: its
curvature grows with Z.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from xentflow.axes import is_number, require_type
from xentflow.constraints import Free
from xentflow.errors import XentflowError
from xentflow.flow import GradientFlow
from xentflow.models import Features, Model
from xentflow.objective import Objective

Step = Float[Tensor, "*broadcastable"]


def curvature_bound(objective: Objective, model: Model) -> Step:
    """L with ∂²ℓ/∂Z² ≼ L: one number, or one for each sample, shaped to broadcast against Z."""
    require_type("objective", objective, Objective)
    require_type("model", model, Model)
    if model.pullback_degree != 0:
        raise XentflowError(
            f"curvature_bound: expected a model affine in Z, got {type(model).__name__}, whose curvature has no global "
            "bound; use LineSearch"
        )
    norm = model.operator_norm()
    L = objective.potential.curvature * norm.square()
    return L if L.ndim == 0 else L[..., None, None]


def safe_step(objective: Objective, model: Model) -> Step:
    """h = 1/L, the step that the descent lemma favours: an Euler step lowers ℓ by at least ½h‖∂ℓ‖².

    Every step below 2/L, twice this, is certified not to raise ℓ. Raises where no L exists.
    """
    L = curvature_bound(objective, model)
    # Where ℓ is constant any step is safe, as long as it is finite.
    return 1 / L.clamp_min(4 * torch.finfo(L.dtype).tiny)


Advance = Callable[[GradientFlow, Tensor, Tensor], Tensor]
"""How a method goes from Z by a step."""


@dataclass(frozen=True)
class CertifiedStep:
    """``safe_step`` of whatever flow comes, as a rule: for affine models, whose θ may change."""

    @torch.no_grad()
    def __call__(self, flow: GradientFlow, Z: Features) -> Step:
        """The step, shaped to broadcast against Z."""
        if not flow.is_gradient or not isinstance(flow.constraint, Free):
            raise XentflowError(
                "CertifiedStep: expected a gradient flow of Free features, for which its bound is proved, got "
                f"{flow.constraint!r} and a flow that is {'' if flow.is_gradient else 'not '}of a gradient"
            )
        if flow.head_weights is None:
            return safe_step(flow.objective, flow.model)
        # ∂²Σ w_h ℓ_h ≼ max w · L.
        return safe_step(flow.objective, flow.model) / flow.head_weights.amax()


class LearnedStep(nn.Module):
    """A positive step as a parameter, h = exp(log_step), started at ``initial``.

    One number; with ``features=F`` one for each feature, a diagonal preconditioner of the flow; with ``heads=H`` one
    for each head, the weights w of ℓ = Σ w_h ℓ_h followed for unit time.
    """

    def __init__(self, initial: float = 1.0, *, features: int | None = None, heads: int | None = None) -> None:
        super().__init__()
        if not is_number(initial):
            raise XentflowError(f"initial: expected a positive finite number, got {initial!r}")
        if features is not None and heads is not None:
            raise XentflowError("LearnedStep: expected features or heads, or neither, got both")
        self.initial, self.features, self.heads = initial, features, heads
        sizes = [size for size in (features, heads) if size is not None]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise XentflowError(f"LearnedStep: expected a positive whole number, got {sizes[0]!r}")
        # One number is a vector of one: ``fully_shard`` cuts no scalars.
        self.log_step = nn.Parameter(torch.full(sizes or [1], math.log(initial)))

    def extra_repr(self) -> str:
        kind = {"features": self.features, "heads": self.heads}
        return ", ".join([f"initial={self.initial:g}", *(f"{k}={n}" for k, n in kind.items() if n is not None)])

    def head_weights(self) -> Float[Tensor, "H 1 1"] | None:
        """The step of each head, where heads have their own."""
        return None if self.heads is None else self.log_step.exp()[:, None, None]

    def forward(self, flow: GradientFlow, Z: Features) -> float | Step:
        """The step, shaped to broadcast against Z; 1 where it is in the flow's head weights already."""
        if self.heads is not None:
            return 1.0
        h = self.log_step.exp()
        return h if self.features is not None else h.squeeze(0)


@dataclass(frozen=True)
class LineSearch:
    """Armijo backtracking: the first step h of ``initial · shrink^k`` that lowers ℓ by ``slope · h`` × dissipation.

    The step tried is an Euler step, or that of the method whose ``advance`` is given. Each sample has its own step. One
    that stands still, as at a minimum, or for which no step lowers ℓ, gets zero.
    """

    initial: float = 1.0
    shrink: float = 0.5
    slope: float = 1e-4
    trials: int = 60

    def __post_init__(self) -> None:
        fractions = is_number(self.shrink, below=1) and is_number(self.slope, below=1)
        if not (is_number(self.initial) and fractions and is_number(self.trials) and isinstance(self.trials, int)):
            raise XentflowError(
                "LineSearch: expected initial > 0, 0 < shrink < 1, 0 < slope < 1 and a whole number of trials > 0, "
                f"got {self.initial!r}, {self.shrink!r}, {self.slope!r} and {self.trials!r}"
            )

    @torch.no_grad()
    def __call__(self, flow: GradientFlow, Z: Features, advance: Advance | None = None) -> Float[Tensor, "*batch 1 1"]:
        """The step of each sample, shaped to broadcast against Z."""
        require_type("flow", flow, GradientFlow)
        if not flow.is_gradient:
            raise XentflowError("LineSearch: expected a gradient flow; a game has no common energy to search on")
        velocity, energy = flow.velocity(Z), flow.energy(Z)
        wanted = self.slope * flow.rate(Z, velocity)
        # Not by the rate: what stands at a dual origin has none, and can leave.
        accepted = (velocity == 0).all(-1).all(-1)
        step = torch.full_like(energy, self.initial).masked_fill(accepted, 0)
        for _ in range(self.trials):
            h = step[..., None, None]
            lower = flow.energy(flow.retract(Z, h * velocity) if advance is None else advance(flow, Z, h))
            # Rounding can hide a tiny fall, never excuse a rise: the comparison is with what was computed.
            accepted |= (lower <= energy - step * wanted) & (lower <= energy)
            if accepted.all():
                break
            step = torch.where(accepted, step, step * self.shrink)
        return torch.where(accepted, step, 0.0)[..., None, None]
