"""How far to go: a certified step where the curvature of ℓ is bounded, a line search elsewhere.

For an affine model ∂²ℓ ≼ c‖A‖₂² on either axis, with c the potential's curvature and A the linear part of the model
(heads stacked), since the Hessian of ⟨1, Ω⟩ in N is block-diagonal with blocks ≼ c. For LogSumExp at temperature 1 that
is L = ½‖θ‖₂². Then any step h < 2/L keeps an Euler step from raising ℓ. The quadratic model has no such L: its
curvature grows with Z.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from xentflow.errors import XentflowError
from xentflow.flow import GradientFlow
from xentflow.models import Features, Model
from xentflow.objective import Objective

Step = Float[Tensor, "*broadcastable"]


def curvature_bound(objective: Objective, model: Model) -> Step:
    """L with ∂²ℓ/∂Z² ≼ L: one number, or one for each sample, shaped to broadcast against Z."""
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
    return 1 / curvature_bound(objective, model)


@dataclass(frozen=True)
class LineSearch:
    """Armijo backtracking along the velocity: the first of ``initial · shrink^k`` that lowers ℓ by ``slope · h ‖Ż‖²``.

    Each sample has its own step. One for which no step lowers ℓ, as at a minimum, gets zero.
    """

    initial: float = 1.0
    shrink: float = 0.5
    slope: float = 1e-4
    trials: int = 60

    def __post_init__(self) -> None:
        if not (0 < self.initial < float("inf") and 0 < self.shrink < 1 and 0 < self.slope < 1 and self.trials > 0):
            raise XentflowError(
                "LineSearch: expected initial > 0, 0 < shrink < 1, 0 < slope < 1 and trials > 0, "
                f"got {self.initial!r}, {self.shrink!r}, {self.slope!r} and {self.trials!r}"
            )

    @torch.no_grad()
    def __call__(self, flow: GradientFlow, Z: Features) -> Float[Tensor, "*batch 1 1"]:
        """The step of each sample, shaped to broadcast against Z."""
        if not flow.is_gradient:
            raise XentflowError("LineSearch: expected a gradient flow; a game has no common energy to search on")
        velocity, energy = flow.velocity(Z), flow.energy(Z)
        wanted = self.slope * velocity.square().sum((-2, -1))
        step = torch.full_like(energy, self.initial)
        accepted = torch.zeros_like(energy, dtype=torch.bool)
        for _ in range(self.trials):
            lower = flow.energy(flow.retract(Z, step[..., None, None] * velocity))
            # Rounding can hide a tiny fall, never excuse a rise: the comparison is with what was computed.
            accepted |= (lower <= energy - step * wanted) & (lower <= energy)
            if accepted.all():
                break
            step = torch.where(accepted, step, step * self.shrink)
        return torch.where(accepted, step, 0.0)[..., None, None]
