"""The claims of the paper, in its order, each tried against autograd of the plainest form of ℓ."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, scaled_dot_product_attention

from xentflow.attention import cross_attention, self_attention
from xentflow.axes import Axis, dimension
from xentflow.claims import Claim, Comparison, Draw, Verdict, derivative, on_both_axes
from xentflow.flow import GradientFlow
from xentflow.gradient import feature_gradient, printed_form
from xentflow.models import Bilinear, Functional, Linear, Model, Quadratic
from xentflow.objective import CrossEntropy
from xentflow.potentials import LogSumExp
from xentflow.splitting import LieTrotter

HOLDS, CORRECTED, REFUTED = Verdict.HOLDS, Verdict.CORRECTED, Verdict.REFUTED
S, F, K = 16, 8, 5


def _plain_energy(N: Tensor, C: Tensor, axis: Axis) -> Tensor:
    return torch.logsumexp(N, dimension(axis)).sum() - (C * N).sum()


def _softmax_is_the_gradient_of_lse(draw: Draw, axis: Axis) -> Comparison:
    N = 3 * draw.normal(S, K)
    actual = derivative(lambda N: torch.logsumexp(N, dimension(axis)).sum(), N)
    return Comparison(LogSumExp(axis).gradient(N), actual)


def _cross_entropy_is_lse_minus_inner(draw: Draw, axis: Axis) -> Comparison:
    N, C = 3 * draw.normal(S, K), draw.distributions(S, K, axis=axis)
    return Comparison(CrossEntropy(axis).value(N, C), -(C * log_softmax(N, dimension(axis))).sum())


def _cross_entropy_for_one_label_a_sample(draw: Draw, axis: Axis) -> Comparison:
    N = 3 * draw.normal(S, K)
    C = torch.eye(K, dtype=N.dtype)[[draw.between(0, K - 1) for _ in range(S)]]
    dim = dimension(axis)
    lse = torch.logsumexp(N, dim)
    printed = lse.sum() - (C * N).sum()
    right = (C.sum(dim) * lse).sum() - (C * N).sum()
    return Comparison(printed, -(C * log_softmax(N, dim)).sum(), right)


def _both_parts_are_convex(draw: Draw, axis: Axis) -> Comparison:
    A, B, C = 3 * draw.normal(S, K), 3 * draw.normal(S, K), draw.distributions(S, K, axis=axis)
    potential = LogSumExp(axis)
    excess = potential.value((A + B) / 2) - (potential.value(A) + potential.value(B)) / 2
    bend = (C * (A + B) / 2).sum() - ((C * A).sum() + (C * B).sum()) / 2
    # Rounding of sums near 40 is no violation.
    violation = torch.cat([excess.clamp_min(0), bend.abs().reshape(1)]).sub(1e-13 * A.numel()).clamp_min(0)
    return Comparison(violation, torch.zeros_like(violation))


def _order_three_tensor(draw: Draw, axis: Axis) -> Comparison:
    Z, theta = draw.normal(S, F), draw.normal(K, F)
    p = LogSumExp(axis).gradient(Linear(theta).logits(Z))
    jacobian = torch.func.jacrev(lambda Z: torch.logsumexp(Z @ theta.mT, dimension(axis)))(Z)
    return Comparison(torch.einsum("ij,jk->jik", p, theta), jacobian)


def _contraction_is_cross_attention(draw: Draw, axis: Axis) -> Comparison:
    Z, theta = draw.normal(S, F), draw.normal(K, F)
    jacobian = torch.func.jacrev(lambda Z: torch.logsumexp(Z @ theta.mT, dimension(axis)))(Z)
    return Comparison(cross_attention(Z, theta, axis=axis), jacobian.sum(0))


def _general_gradient(draw: Draw, axis: Axis) -> Comparison:
    Z = draw.normal(S, F)
    W, U = draw.normal(F, 6), draw.normal(6, K)
    context = draw.normal(K, 3)
    theta, bias, square, wide = draw.normal(K, F), draw.normal(K), draw.normal(F, F), draw.normal(F, 3)
    cases: list[tuple[Model, Callable[[Tensor], Tensor]]] = [
        (Linear(theta, bias), lambda Z: Z @ theta.mT + bias),
        (Quadratic(square), lambda Z: Z @ square @ Z.mT),
        (Bilinear(wide, context), lambda Z: Z @ wide @ context.mT),
        (Functional(lambda Z: torch.tanh(Z @ W) @ U), lambda Z: torch.tanh(Z @ W) @ U),
    ]
    claimed, actual = [], []
    for model, plain in cases:
        C = draw.distributions(*plain(Z).shape, axis=axis)
        claimed.append(feature_gradient(CrossEntropy(axis), model, Z, C).total)
        actual.append(derivative(lambda Z, plain=plain, C=C: _plain_energy(plain(Z), C, axis), Z))  # type: ignore[misc]
    return Comparison(torch.stack(claimed), torch.stack(actual))


def _linear_gradient(draw: Draw, axis: Axis) -> Comparison:
    Z, theta, C = draw.normal(S, F), draw.normal(K, F), draw.distributions(S, K, axis=axis)
    actual = derivative(lambda Z: _plain_energy(Z @ theta.mT, C, axis), Z)
    terms = feature_gradient(CrossEntropy(axis), Linear(theta), Z, C)
    printed = cross_attention(Z, theta, axis=axis) - C @ theta
    return Comparison(torch.stack([printed, terms.attention - terms.target]), torch.stack([actual, actual]))


def _softmax_is_symmetric(draw: Draw, axis: Axis) -> Comparison:
    Z, theta = draw.normal(S, F), draw.positive_definite(F)
    N = Quadratic(theta).logits(Z)
    other: Axis = "classes" if axis == "sequence" else "sequence"
    p = LogSumExp(axis).gradient(N)
    return Comparison(p, p.mT, LogSumExp(other).gradient(N))


def _quadratic_gradient(draw: Draw, axis: Axis) -> Comparison:
    Z, theta, C = draw.normal(S, F), draw.positive_definite(F), draw.distributions(S, S, axis=axis)
    loss, model = CrossEntropy(axis), Quadratic(theta)
    actual = derivative(lambda Z: _plain_energy(Z @ theta @ Z.mT, C, axis), Z)
    printed = printed_form(loss, model, Z, C).total
    return Comparison(printed, actual, feature_gradient(loss, model, Z, C).total)


def _factored_self_attention(draw: Draw, axis: Axis) -> Comparison:
    Z, phi = draw.normal(S, F), draw.normal(F, F).tril()
    theta = phi @ phi.mT
    printed = self_attention(Z @ phi, axis=axis) @ phi.mT
    return Comparison(printed, torch.softmax(Z @ theta @ Z.mT, dimension(axis)) @ Z @ theta)


def _dissipation(draw: Draw, axis: Axis) -> Comparison:
    Z, theta, C = draw.normal(S, F), draw.normal(K, F), draw.distributions(S, K, axis=axis)
    flow = GradientFlow(CrossEntropy(axis), Linear(theta), C)
    velocity = flow.velocity(Z)
    rate = (derivative(lambda Z: _plain_energy(Z @ theta.mT, C, axis), Z) * velocity).sum()
    return Comparison(-0.5 * velocity.square().sum(), rate, -flow.dissipation(Z))


def _linear_block(draw: Draw, axis: Axis) -> Comparison:
    Z, theta, C = draw.normal(S, F), draw.normal(K, F), draw.distributions(S, K, axis=axis)
    half = Z - cross_attention(Z, theta, axis=axis)
    flow = GradientFlow(CrossEntropy(axis), Linear(theta), C)
    return Comparison(half + C @ theta, LieTrotter().advance(flow, Z, 1.0))


def _printed_quadratic_block(Z: Tensor, phi: Tensor, C: Tensor, axis: Axis) -> Tensor:
    half = Z - 2 * self_attention(Z @ phi, axis=axis) @ phi.mT
    return half + (C + C.mT) @ half @ phi @ phi.mT


def _quadratic_block_of_printed_gradient(draw: Draw, axis: Axis) -> Comparison:
    Z, phi, C = draw.normal(S, F), 0.3 * draw.normal(F, F).tril(), draw.distributions(S, S, axis=axis)
    flow = GradientFlow(CrossEntropy(axis), Quadratic.from_factor(phi), C, printed_form=True)
    return Comparison(_printed_quadratic_block(Z, phi, C, axis), LieTrotter().advance(flow, Z, 1.0))


def _quadratic_block_of_true_gradient(draw: Draw, axis: Axis) -> Comparison:
    Z, phi, C = draw.normal(S, F), 0.3 * draw.normal(F, F).tril(), draw.distributions(S, S, axis=axis)
    theta = phi @ phi.mT
    gradient = derivative(lambda Z: torch.logsumexp(Z @ theta @ Z.mT, dimension(axis)).sum(), Z)
    half = Z - gradient
    flow = GradientFlow(CrossEntropy(axis), Quadratic.from_factor(phi), C)
    actual = half + (C + C.mT) @ half @ theta
    return Comparison(_printed_quadratic_block(Z, phi, C, axis), actual, LieTrotter().advance(flow, Z, 1.0))


def _expectation_commutes(draw: Draw, axis: Axis) -> Comparison:
    Z, theta, C = draw.normal(S, F), draw.normal(K, F), draw.distributions(7, S, K, axis=axis)
    each = feature_gradient(CrossEntropy(axis), Linear(theta), Z.expand(7, S, F), C).total
    actual = derivative(lambda Z: _plain_energy((Z @ theta.mT).expand(7, S, K), C, axis) / 7, Z)
    return Comparison(each.mean(0), actual)


def _usual_cross_attention(draw: Draw, axis: Axis) -> Comparison:
    Z, theta = draw.normal(S, F), draw.normal(K, F)
    usual = scaled_dot_product_attention(Z[None], theta[None], theta[None], scale=1.0)[0]
    return Comparison(cross_attention(Z, theta, axis=axis), usual, cross_attention(Z, theta, axis="classes"))


PAPER_CLAIMS = (
    Claim("CE = ⟨1,LSE⟩ − ⟨C,N⟩ if C sums to one", "Eq. 2–3", _cross_entropy_is_lse_minus_inner,
          on_both_axes(HOLDS)),
    Claim("… and for labels, one class a sample", "Eq. 2–3", _cross_entropy_for_one_label_a_sample,
          {"sequence": REFUTED, "classes": HOLDS}, "⟨1ᵀC, LSE⟩ − ⟨C,N⟩"),
    Claim("both parts are convex in N", "Eq. 2", _both_parts_are_convex, on_both_axes(HOLDS)),
    Claim("σ is the gradient of ⟨1,LSE⟩", "Lemma 1", _softmax_is_the_gradient_of_lse, on_both_axes(HOLDS)),
    Claim("∂LSE(Zθᵀ) is the order-3 tensor σᵀ ⊗̄ θ", "Theorem 1", _order_three_tensor, {"sequence": HOLDS}),
    Claim("its contraction with 1 is CA(Z,θ)", "Theorem 1", _contraction_is_cross_attention, on_both_axes(HOLDS)),
    Claim("∂ℓ = (σ(N) − C) : ∂N for any N", "Theorem 2", _general_gradient, on_both_axes(HOLDS)),
    Claim("expectation and gradient commute", "Theorem 2", _expectation_commutes, on_both_axes(HOLDS)),
    Claim("linear N: ∂ℓ = CA(Z,θ) − Cθ", "Eq. 4", _linear_gradient, on_both_axes(HOLDS)),
    Claim("CA with σ is the usual cross-attention", "Eq. 4", _usual_cross_attention,
          {"sequence": REFUTED, "classes": HOLDS}, "the classes axis is"),
    Claim("dℓ/dt = −½‖∂ℓ‖²", "Eq. 6", _dissipation, on_both_axes(CORRECTED), "−‖∂ℓ‖²"),
    Claim("the block = Lie–Trotter, Euler half-steps", "Eq. 7", _linear_block, on_both_axes(HOLDS)),
    Claim("pᵀ = p for symmetric θ", "Corollary 2", _softmax_is_symmetric, on_both_axes(REFUTED),
          "pᵀ is σ along the other axis"),
    Claim("quadratic N: ∂ℓ = 2pZθ − (C+Cᵀ)Zθ", "Eq. 8", _quadratic_gradient, on_both_axes(REFUTED),
          "(p+pᵀ)Zθ − (C+Cᵀ)Zθ"),
    Claim("pZθ = SA(Zφ)φᵀ for θ = φφᵀ", "Eq. 8", _factored_self_attention, on_both_axes(HOLDS)),
    Claim("the block splits the printed gradient", "Eq. 9", _quadratic_block_of_printed_gradient, on_both_axes(HOLDS)),
    Claim("the block splits the gradient flow of ℓ", "Eq. 9", _quadratic_block_of_true_gradient,
          on_both_axes(REFUTED), "its attention half-step with p+pᵀ"),
)  # fmt: skip
