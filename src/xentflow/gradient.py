"""The feature gradient ∂_Z ℓ = pullback(∇Ω(N)) − pullback(C): attention minus target.

For the linear model the attention term is cross-attention pθ and the target term Cθ (the paper's Eq. 4); for the
quadratic model they are pZθᵀ + pᵀZθ and CZθᵀ + CᵀZθ (Eq. 8, corrected: see ``printed_form``).
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from xentflow.axes import require_alike, require_features, require_type
from xentflow.errors import XentflowError
from xentflow.models import Features, Logits, Model, Quadratic
from xentflow.objective import Objective, Targets
from xentflow.potentials import Mask

HeadWeights = Float[Tensor, "H 1 1"]
"""w in ℓ = Σ w_h ℓ_h, where heads do not count alike."""


@dataclass(frozen=True)
class FeatureGradient:
    """∂_Z ℓ as its two terms, each of the shape of Z."""

    attention: Features
    target: Features

    @property
    def total(self) -> Features:
        """attention − target."""
        return self.attention - self.target


def feature_gradient(
    objective: Objective, model: Model, Z: Features, C: Targets, mask: Mask | None = None
) -> FeatureGradient:
    """∂_Z ℓ of ``objective`` over ``model`` at Z for targets C; with ``roles="own"``, each token's own part of it."""
    C = checked_targets(objective, model, Z, C, mask)
    return FeatureGradient(attention_term(objective, model, Z, mask), target_term(objective, model, Z, C))


def printed_form(
    objective: Objective, model: Quadratic, Z: Features, C: Targets, mask: Mask | None = None
) -> FeatureGradient:
    """The paper's Eq. (8) as printed: 2pZθᵀ − (CZθᵀ + CᵀZθ), which takes pᵀ = p. Not the gradient of ℓ.

    Kept so that Eq. (9) can be run as the paper has it and compared; ``docs/errata.md`` has the measured difference.
    """
    if not isinstance(model, Quadratic) or not model.is_gradient:
        raise XentflowError('printed_form: expected a Quadratic model with roles="both", the only one the paper prints')
    C = checked_targets(objective, model, Z, C, mask)
    return FeatureGradient(printed_attention_term(objective, model, Z, mask), target_term(objective, model, Z, C))


def attention_term(
    objective: Objective, model: Model, Z: Features, mask: Mask | None = None, head_weights: HeadWeights | None = None
) -> Features:
    """pullback(∇Ω(N(Z))), on features already checked; each head times its weight."""
    p = objective.potential.gradient(model.logits(Z), mask)
    return model.pullback(Z, p if head_weights is None else head_weights * p, objective.axis)


def target_term(
    objective: Objective, model: Model, Z: Features, C: Logits, head_weights: HeadWeights | None = None
) -> Features:
    """pullback(C), on targets already checked; each head times its weight."""
    return model.pullback(Z, C if head_weights is None else head_weights * C, objective.axis)


def printed_attention_term(
    objective: Objective,
    model: Quadratic,
    Z: Features,
    mask: Mask | None = None,
    head_weights: HeadWeights | None = None,
) -> Features:
    """2pZθᵀ, the attention term of Eq. (8) as printed."""
    p = objective.potential.gradient(model.logits(Z), mask)
    return 2 * model.query_pullback(Z, p if head_weights is None else head_weights * p)


def checked_targets(objective: Objective, model: Model, Z: Features, C: Targets, mask: Mask | None) -> Logits:
    """C like the logits, after all that a gradient is made of has been validated."""
    require_type("objective", objective, Objective)
    require_type("model", model, Model)
    require_features(Z)
    for held in model.tensors():
        # A network may count or index in integers; only what meets Z in a product must share its dtype.
        if held.is_floating_point():
            require_alike("Z", Z, "the model", held)
    return objective.targets(C, model.logits_like(Z), mask)
