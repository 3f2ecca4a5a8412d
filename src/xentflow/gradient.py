"""The feature gradient ∂_Z ℓ = pullback(∇Ω(N)) − pullback(C): attention minus target.

For the linear model the attention term is cross-attention pθ and the target term Cθ (the paper's Eq. 4); for the
quadratic model they are pZθᵀ + pᵀZθ and CZθᵀ + CᵀZθ (Eq. 8, corrected: see ``printed_form``).
"""

from dataclasses import dataclass

from torch import Tensor

from xentflow.axes import require_alike, require_features
from xentflow.errors import XentflowError
from xentflow.models import Features, Model, Quadratic
from xentflow.objective import Objective, Targets
from xentflow.potentials import Logits, Mask


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
    C = _checked_targets(objective, model, Z, C, mask)
    return FeatureGradient(attention_term(objective, model, Z, mask), target_term(objective, model, Z, C))


def printed_form(
    objective: Objective, model: Quadratic, Z: Features, C: Targets, mask: Mask | None = None
) -> FeatureGradient:
    """The paper's Eq. (8) as printed: 2pZθᵀ − (CZθᵀ + CᵀZθ), which takes pᵀ = p. Not the gradient of ℓ.

    Kept so that Eq. (9) can be run as the paper has it and compared; ``docs/errata.md`` has the measured difference.
    """
    if not isinstance(model, Quadratic) or not model.is_gradient:
        raise XentflowError('printed_form: expected a Quadratic model with roles="both", the only one the paper prints')
    C = _checked_targets(objective, model, Z, C, mask)
    return FeatureGradient(printed_attention_term(objective, model, Z, mask), target_term(objective, model, Z, C))


def attention_term(objective: Objective, model: Model, Z: Features, mask: Mask | None = None) -> Features:
    """pullback(∇Ω(N(Z))), on features already checked."""
    return model.pullback(Z, objective.potential.gradient(model.logits(Z), mask), objective.axis)


def target_term(objective: Objective, model: Model, Z: Features, C: Logits) -> Features:
    """pullback(C), on targets already checked."""
    return model.pullback(Z, C, objective.axis)


def printed_attention_term(objective: Objective, model: Quadratic, Z: Features, mask: Mask | None = None) -> Features:
    """2pZθᵀ, the attention term of Eq. (8) as printed."""
    p = objective.potential.gradient(model.logits(Z), mask)
    return 2 * model.query_pullback(Z, p)


def _checked_targets(objective: Objective, model: Model, Z: Features, C: Targets, mask: Mask | None) -> Tensor:
    require_features(Z)
    for parameter in (*model.parameters(), *model.buffers()):
        require_alike("Z", Z, "the model", parameter)
    return objective.targets(C, model.logits(Z), mask)
