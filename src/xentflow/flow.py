"""The gradient flow Ż = target − attention as two named terms, with its energy and dissipation. Nothing steps here."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from xentflow.axes import require_features
from xentflow.constraints import Constraint, Free
from xentflow.errors import XentflowError
from xentflow.gradient import attention_term, printed_attention_term, target_term
from xentflow.models import Features, Model, Quadratic
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
    """Ż = −P ∂_Z ℓ(Z), P the tangent projection of the constraint.

    For a model with ``roles="own"`` this is the flow of a game: every token descends its own ℓ, and the total need not
    fall. ``printed_form`` takes the paper's attention term for the quadratic model as printed (see ``gradient``), which
    is no gradient flow either; ``is_gradient`` says.

    C: targets like the logits, or integer labels; mask: True where a logit takes part.
    """

    def __init__(
        self,
        objective: Objective,
        model: Model,
        C: Targets,
        constraint: Constraint | None = None,
        mask: Mask | None = None,
        printed_form: bool = False,
    ) -> None:
        if printed_form and not (isinstance(model, Quadratic) and model.is_gradient):
            raise XentflowError('printed_form: expected a Quadratic model with roles="both"')
        self.objective = objective
        self.model = model
        self.constraint = Free() if constraint is None else constraint
        self.mask = mask
        self.is_gradient = model.is_gradient and not printed_form
        self._given = C
        self._checked: tuple[tuple[int, ...], Tensor] | None = None
        attention = printed_attention_term if printed_form else attention_term
        self._attention: Callable[[Tensor], Tensor] = partial(attention, objective, model, mask=mask)  # type: ignore[arg-type]

    def targets(self, Z: Features) -> Tensor:
        """C as a floating tensor of the shape of the logits, validated when Z first has a shape."""
        if self._checked is None or self._checked[0] != tuple(Z.shape):
            require_features(Z)
            C = self.objective.targets(self._given, self.model.logits(Z), self.mask)
            self._checked = (tuple(Z.shape), C)
        return self._checked[1]

    @property
    def terms(self) -> tuple[FlowTerm, FlowTerm]:
        """The attention term −P·attention and the target term P·target, in the order of the paper's half-steps."""
        retract = self.constraint.retract
        degree = self.model.pullback_degree if isinstance(self.constraint, Free) else None
        return (
            FlowTerm("attention", self._attention_velocity, retract),
            FlowTerm("target", self._target_velocity, retract, degree, self._target_norm),
        )

    def velocity(self, Z: Features) -> Features:
        """Ż at Z."""
        gradient = self._attention(Z) - target_term(self.objective, self.model, Z, self.targets(Z))
        return -self.constraint.tangent(Z, gradient)

    def retract(self, Z: Features, V: Features) -> Features:
        """Z moved by V, within the constraint."""
        return self.constraint.retract(Z, V)

    def energy(self, Z: Features) -> PerSample:
        """ℓ of each sample: all its distributions and heads summed."""
        values = self.objective.value(self.model.logits(Z), self.targets(Z), self.mask)
        return values if self.model.heads is None else values.sum(-1)

    def dissipation(self, Z: Features) -> PerSample:
        """−dℓ/dt along the flow, each sample: ‖Ż‖² for a gradient flow (the paper prints half of that)."""
        if not self.is_gradient:
            raise XentflowError(
                "dissipation: expected a gradient flow; with the own role or the printed form ℓ need not fall"
            )
        return self.velocity(Z).square().sum((-2, -1))

    def _attention_velocity(self, Z: Features) -> Features:
        return -self.constraint.tangent(Z, self._attention(Z))

    def _target_velocity(self, Z: Features) -> Features:
        return self.constraint.tangent(Z, target_term(self.objective, self.model, Z, self.targets(Z)))

    def _target_norm(self, Z: Tensor) -> Tensor:
        assert isinstance(self.model, Quadratic)
        return self.model.pullback_norm(self.targets(Z))
