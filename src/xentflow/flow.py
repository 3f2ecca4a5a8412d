"""The gradient flow Ż = target − attention as two named terms, with its energy and dissipation. Nothing steps here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from xentflow.axes import holds, require_type
from xentflow.constraints import Constraint, Free
from xentflow.errors import XentflowError
from xentflow.gradient import HeadWeights, attention_term, checked_targets, target_term
from xentflow.kernels import is_plain
from xentflow.masks import Masking
from xentflow.models import Features, Model, Quadratic, require_same_kind
from xentflow.objective import Objective, Targets
from xentflow.potentials import Mask

PerSample = Float[Tensor, "*batch"]


@dataclass(frozen=True)
class FlowTerm:
    """One part of a velocity, with what a splitting may know about it.

    ``degree`` in Z: 0 for a constant, 1 for a linear velocity whose operator norm is at most ``norm(Z)`` for features
    shaped like Z, None otherwise.
    """

    name: str
    velocity: Callable[[Tensor], Tensor]
    retract: Callable[[Tensor, Tensor], Tensor]
    degree: Literal[0, 1] | None = None
    norm: Callable[[Tensor], Tensor] | None = None


class GradientFlow:
    """Ż = −P ∂ℓ(X), P the tangent projection of the constraint and X its features at Z, which but for ``Dual`` are Z.

    For a model with ``roles="own"`` this is the flow of a game: every token descends its own ℓ, and the total need not
    fall. ``printed_form`` takes the paper's attention term for the quadratic model as printed (see ``gradient``), which
    is no gradient flow either; ``is_gradient`` says.

    C: targets like the logits, or integer labels; mask: True where a logit takes part; target_model: another θ for the
    target term (the paper's θ^(ℓ+½)), which leaves no common energy; head_weights: w in ℓ = Σ w_h ℓ_h.
    """

    def __init__(
        self,
        objective: Objective,
        model: Model,
        C: Targets,
        constraint: Constraint | None = None,
        mask: Mask | Masking | None = None,
        printed_form: bool = False,
        target_model: Model | None = None,
        head_weights: HeadWeights | None = None,
        validate: bool = True,
    ) -> None:
        require_type("objective", objective, Objective)
        require_type("model", model, Model)
        if printed_form and not (isinstance(model, Quadratic) and model.is_gradient):
            raise XentflowError('printed_form: expected a Quadratic model with roles="both"')
        self.objective = objective
        self.model = model
        self.constraint = Free() if constraint is None else constraint
        require_type("constraint", self.constraint, Constraint)
        if target_model is not None:
            require_same_kind(model, target_model)
        if head_weights is not None:
            _require_head_weights(head_weights, model)
        self.masking = mask if isinstance(mask, Masking) else Masking(mask)
        self.target_model = model if target_model is None else target_model
        self.head_weights = head_weights
        self.is_gradient = model.is_gradient and not printed_form and target_model is None
        self._given = C
        self._validate = validate
        self._known: tuple[tuple[torch.Size, torch.dtype, torch.device], tuple[int, ...]] | None = None
        self._printed_form = printed_form

    def logits(self, Z: Features) -> Tensor:
        """N at the features of Z."""
        return self.model.logits(self.constraint.features(Z))

    def mask(self, Z: Features) -> Mask | None:
        """Which logits at Z take part, as one tensor; None where all do."""
        return self.masking.tensor(self.model.logits_like(Z), self.objective.axis)

    def targets(self, Z: Features) -> Tensor:
        """C as a floating tensor of the shape of the logits."""
        like = self._like(Z)
        # Made anew each time, so that it follows C where C is edited, differentiated or vmapped.
        return self.objective.dense(self._given, like, self.masking.tensor(like, self.objective.axis))

    def _like(self, Z: Features) -> Tensor:
        """A tensor of the logits' shape, after Z has been found to fit.

        Everything is validated when features of a new kind (shape, dtype, device) come. Features of the same kind are
        points of a path then, and their values are on trust: where they overflow, so do velocity and energy.
        """
        kind = (Z.shape, Z.dtype, Z.device) if isinstance(Z, Tensor) else None
        if kind is None or self._known is None or self._known[0] != kind:
            if self._validate:
                checked_targets(self.objective, self.model, Z, self._given, self.masking)
            self._known = ((Z.shape, Z.dtype, Z.device), tuple(self.model.logits_like(Z).shape))
        return Z.new_empty(()).expand(self._known[1])

    @property
    def terms(self) -> tuple[FlowTerm, FlowTerm]:
        """The attention term −P·attention and the target term P·target, in the order of the paper's half-steps."""
        retract = self.constraint.retract
        degree = self.target_model.pullback_degree if isinstance(self.constraint, Free) else None
        return (
            FlowTerm("attention", self._attention_velocity, retract),
            FlowTerm("target", self._target_velocity, retract, degree, self._target_norm),
        )

    def velocity(self, Z: Features) -> Features:
        """Ż at Z."""
        apart = self.target_model is not self.model or self._printed_form
        if apart or not is_plain(self._like(Z), "auto"):
            return self.constraint.tangent(Z, self._target(Z) - self._attention(Z))
        # One θ for both terms: the pullback is linear, and so one of C − p does for two.
        X = self.constraint.features(Z)
        residual = self.targets(Z) - self.objective.potential.gradient(self.model.logits(X), self.mask(Z))
        if self.head_weights is not None:
            residual = self.head_weights * residual
        return self.constraint.tangent(Z, self.model.pullback(X, residual, self.objective.axis).to(Z.dtype))

    def retract(self, Z: Features, V: Features) -> Features:
        """Z moved by V, within the constraint."""
        return self.constraint.retract(Z, V)

    def energy(self, Z: Features) -> PerSample:
        """ℓ of each sample: all its distributions and heads summed."""
        return self.energy_at(self.constraint.features(Z))

    def energy_at(self, X: Features) -> PerSample:
        """ℓ of each sample where the model sees the features X."""
        C = self.targets(X)
        # Not ``objective.value``, which refuses logits that overflow: a line search must see that such a step is bad.
        values = self.objective.potential.tilted(self.model.logits(X), C, self.mask(X)).sum(-1)
        if self.model.heads is None:
            return values
        return (values if self.head_weights is None else values * self.head_weights.flatten()).sum(-1)

    def dissipation(self, Z: Features) -> PerSample:
        """−dℓ/dt along the flow, each sample: ‖Ż‖² (the paper prints half of that), by the constraint's metric."""
        if not self.is_gradient:
            raise XentflowError(
                "dissipation: expected a gradient flow; with the own role, the printed form or another θ for the "
                "target term ℓ need not fall"
            )
        return self.rate(Z, self.velocity(Z))

    def rate(self, Z: Features, V: Features) -> PerSample:
        """⟨V, metric(Z, V)⟩ of each sample: how fast ℓ falls, if V is the velocity of a gradient flow at Z."""
        return (V * self.constraint.metric(Z, V)).sum((-2, -1))

    def _attention_velocity(self, Z: Features) -> Features:
        self._like(Z)
        return -self.constraint.tangent(Z, self._attention(Z))

    def _target_velocity(self, Z: Features) -> Features:
        return self.constraint.tangent(Z, self._target(Z))

    def _attention(self, Z: Features) -> Features:
        # Under autocast products come in half precision; the features themselves keep theirs.
        printed = self._printed_form
        X = self.constraint.features(Z)
        term = attention_term(self.objective, self.model, X, self.masking, self.head_weights, printed=printed)
        return term.to(Z.dtype)

    def _target(self, Z: Features) -> Features:
        like = self._like(Z)
        C = self._given
        labels = not C.is_floating_point() and C.dtype != torch.bool and C.shape != like.shape
        if labels and not is_plain(like, "auto"):
            C = C.expand(like.select(self.objective.potential.dim, 0).shape).long()
        else:
            C = self.targets(Z)
        X = self.constraint.features(Z)
        term = target_term(self.objective, self.target_model, X, C, self.masking, self.head_weights)
        return term.to(Z.dtype)

    def _target_norm(self, Z: Tensor) -> Tensor:
        assert isinstance(self.target_model, Quadratic)
        C = self.targets(Z)
        return self.target_model.pullback_norm(C if self.head_weights is None else C * self.head_weights)


def _require_head_weights(weights: HeadWeights, model: Model) -> None:
    if model.heads is None or not isinstance(weights, Tensor) or weights.shape != (model.heads, 1, 1):
        came = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        wanted = "none, for a model without heads" if model.heads is None else f"a tensor {(model.heads, 1, 1)}"
        raise XentflowError(f"head_weights: expected {wanted}, got {came}")
    if not holds(weights >= 0):
        raise XentflowError(f"head_weights: expected none negative, got {float(weights.min()):.3g}")
