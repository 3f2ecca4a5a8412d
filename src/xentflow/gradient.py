"""The feature gradient ∂_Z ℓ = pullback(∇Ω(N)) − pullback(C): attention minus target.

For the linear model the attention term is cross-attention pθ and the target term Cθ (the paper's Eq. 4); for the
quadratic model they are pZθᵀ + pᵀZθ and CZθᵀ + CᵀZθ (Eq. 8, corrected: see ``printed_form``).
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from xentflow.axes import Axis, require_alike, require_features, require_type
from xentflow.errors import XentflowError
from xentflow.kernels import Backend, attention_products, chosen, is_plain, require_backend, returned
from xentflow.kernels.tiles import widened
from xentflow.masks import Masking
from xentflow.models import Factors, Features, Model, Quadratic
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
    objective: Objective,
    model: Model,
    Z: Features,
    C: Targets,
    mask: Mask | None = None,
    *,
    backend: Backend = "auto",
) -> FeatureGradient:
    """∂_Z ℓ of ``objective`` over ``model`` at Z for targets C; with ``roles="own"``, each token's own part of it.

    backend: how the attention term is computed; see ``kernels``.
    """
    require_backend(backend)
    C = checked_targets(objective, model, Z, C, mask)
    masking = Masking(mask)
    attention = attention_term(objective, model, Z, masking, backend=backend)
    return FeatureGradient(attention, target_term(objective, model, Z, C, masking))


def printed_form(
    objective: Objective, model: Quadratic, Z: Features, C: Targets, mask: Mask | None = None
) -> FeatureGradient:
    """The paper's Eq. (8) as printed: 2pZθᵀ − (CZθᵀ + CᵀZθ), which takes pᵀ = p. Not the gradient of ℓ.

    Kept so that Eq. (9) can be run as the paper has it and compared; ``docs/errata.md`` has the measured difference.
    """
    if not isinstance(model, Quadratic) or not model.is_gradient:
        raise XentflowError('printed_form: expected a Quadratic model with roles="both", the only one the paper prints')
    C = checked_targets(objective, model, Z, C, mask)
    masking = Masking(mask)
    printed = attention_term(objective, model, Z, masking, printed=True)
    return FeatureGradient(printed, target_term(objective, model, Z, C, masking))


def attention_term(
    objective: Objective,
    model: Model,
    Z: Features,
    masking: Masking = Masking(),
    head_weights: HeadWeights | None = None,
    *,
    printed: bool = False,
    backend: Backend = "auto",
) -> Features:
    """pullback(∇Ω(N(Z))), on features already checked; each head times its weight.

    printed: 2pZθᵀ instead, the attention term of Eq. (8) as printed.
    """
    like = model.logits_like(Z)

    def attended(part: _Part) -> Features:
        factors = part.factors
        pull_rows, pull_columns = factors.pull_rows, None if printed else factors.pull_columns
        products = attention_products(
            objective.potential,
            factors.q,
            factors.k,
            factors.bias,
            part.masking,
            rows=pull_rows is not None,
            columns=pull_columns is not None,
            backend=backend,
        )
        pulled = part.pulled((pull_rows, products.rows), (pull_columns, products.columns))
        return 2 * pulled if printed else pulled

    found = None
    if not is_plain(like, backend):
        found = _by_heads(model, Z, objective.axis, masking, head_weights, backend, attended)
    if found is not None:
        return found
    p = objective.potential.gradient(model.logits(Z), masking.tensor(like, objective.axis))
    p = p if head_weights is None else head_weights * p
    if printed:
        assert isinstance(model, Quadratic)
        return 2 * model.query_pullback(Z, p)
    return model.pullback(Z, p, objective.axis)


def target_term(
    objective: Objective,
    model: Model,
    Z: Features,
    C: Tensor,
    masking: Masking = Masking(),
    head_weights: HeadWeights | None = None,
) -> Features:
    """pullback(C), on targets already checked, C like the logits or labels; each head times its weight."""
    axis = objective.axis

    def picked(part: _Part) -> Features:
        factors, labels = part.factors, C if part.head is None else C.select(-2, part.head)
        present = part.masking.at_labels(labels, axis)
        owners, entries = (factors.q, factors.k) if axis == "classes" else (factors.k, factors.q)
        pulls = factors.pull_rows, factors.pull_columns
        of_owners, of_entries = pulls if axis == "classes" else pulls[::-1]
        own = None if of_owners is None else chosen(entries, labels, present)
        other = None if of_entries is None else returned(owners, labels, present, entries.shape[-2])
        return part.pulled((of_owners, own), (of_entries, other))

    found = None
    if not C.is_floating_point():
        found = _by_heads(model, Z, axis, masking, head_weights, "auto", picked)
    if found is not None:
        return found
    like = model.logits_like(Z)
    C = objective.dense(C, like, masking.tensor(like, axis))
    return model.pullback(Z, C if head_weights is None else head_weights * C, axis)


@dataclass(frozen=True)
class _Part:
    """What one head's part of a term is made of; head None: all heads' at once."""

    head: int | None
    factors: Factors
    masking: Masking
    weight: Tensor | None

    def pulled(self, *products: tuple[Callable[[Tensor], Tensor] | None, Tensor | None]) -> Features:
        """The pullback of the products that there are, weighted."""
        parts = [
            pull(product if self.weight is None else self.weight * product)
            for pull, product in products
            if pull is not None and product is not None
        ]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _by_heads(
    model: Model,
    Z: Features,
    axis: Axis,
    masking: Masking,
    head_weights: HeadWeights | None,
    backend: Backend,
    term: Callable[[_Part], Features],
) -> Features | None:
    """The term of all heads; None if the model has no factors.

    Heads of many logits come one after another where the model can tell them apart, so that what is made for one is
    gone when the next one comes.
    """
    many = model.heads is not None and not is_plain(model.logits_like(Z).select(-3, 0), backend)
    heads = [model.of_head(head) for head in range(model.heads or 0)] if many else []
    if not heads or None in heads:
        factors = model.factors(Z, axis)
        return None if factors is None else term(_Part(None, factors, masking, head_weights))
    total = None
    for head, one in enumerate(heads):
        assert one is not None
        factors = one.factors(Z, axis)
        if factors is None:
            return None
        part = _Part(head, factors, masking.of_head(head), None if head_weights is None else head_weights[head])
        found = term(part)
        kind = found.dtype
        # Half precision would round each sum; so many terms are added up wide and rounded once.
        total = widened(found) if total is None else total + found
        # Nothing of a head keeps a name while the next one is computed.
        del factors, part, found
    return total if total is None else total.to(kind)


def checked_targets(objective: Objective, model: Model, Z: Features, C: Targets, mask: Mask | Masking | None) -> Tensor:
    """C like the logits, or the labels it stands for, after all that a gradient is made of has been validated."""
    require_type("objective", objective, Objective)
    require_type("model", model, Model)
    require_features(Z)
    for held in model.tensors():
        # A network may count or index in integers; only what meets Z in a product must share its dtype.
        if held.is_floating_point():
            require_alike("Z", Z, "the model", held)
    return objective.checked(C, model.logits_like(Z), mask)
