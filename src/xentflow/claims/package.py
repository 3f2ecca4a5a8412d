"""The identities the package adds to the paper's: every potential and model, heads, roles, masks, steps, duals."""

import torch
from torch import Tensor

from xentflow.axes import Axis, dimension
from xentflow.claims import Claim, Comparison, Draw, Verdict, derivative, on_both_axes
from xentflow.constraints import Dual
from xentflow.flow import GradientFlow
from xentflow.gradient import feature_gradient
from xentflow.integrators import Euler
from xentflow.models import Bilinear, Functional, Linear, Model, Quadratic
from xentflow.objective import CrossEntropy, Objective
from xentflow.potentials import Entmax, HalfSquare, LogSumExp, Potential, Softplus
from xentflow.splitting import LieTrotter, Strang
from xentflow.steps import curvature_bound

HOLDS = Verdict.HOLDS
S, F, K, H = 6, 5, 4, 3


def _potentials(axis: Axis) -> list[Potential]:
    return [LogSumExp(axis, 0.7), Softplus(axis), HalfSquare(axis), Entmax(axis, 1.5), Entmax(axis, 2.0)]


def _models(draw: Draw) -> list[Model]:
    network = draw.normal(F, K)
    return [
        Linear(draw.normal(K, F), draw.normal(K)),
        Linear(draw.normal(H, K, F), draw.normal(H, K)),
        Quadratic(draw.normal(F, F)),
        Quadratic(draw.normal(H, F, F)),
        Quadratic.from_factor(draw.normal(H, F, 2)),
        Bilinear(draw.normal(F, 3), draw.normal(2, K, 3)),
        Bilinear(draw.normal(H, F, 3), draw.normal(K, 3)),
        Functional(lambda Z: torch.tanh(Z @ network)),
    ]


def _weights_are_the_gradient(draw: Draw, axis: Axis) -> Comparison:
    N = 2 * draw.normal(S, K)
    claimed = [potential.gradient(N) for potential in _potentials(axis)]
    actual = [derivative(lambda N, p=p: p.value(N).sum(), N) for p in _potentials(axis)]  # type: ignore[misc]
    return Comparison(torch.stack(claimed), torch.stack(actual))


def _fenchel_young_equality(draw: Draw, axis: Axis) -> Comparison:
    N = 2 * draw.normal(S, K)
    claimed, actual = [], []
    for potential in _potentials(axis):
        p = potential.gradient(N)
        claimed.append(potential.value(N) + potential.conjugate(p))
        actual.append((p * N).sum(potential.dim))
    return Comparison(torch.stack(claimed), torch.stack(actual))


def _fenchel_young_gap(draw: Draw, axis: Axis) -> Comparison:
    N, C = 2 * draw.normal(S, K), draw.distributions(S, K, axis=axis)
    gaps = torch.stack([Objective(potential).gap(N, C) for potential in _potentials(axis)])
    violation = (-gaps - 1e-13).clamp_min(0)
    return Comparison(violation, torch.zeros_like(violation))


def _accurate_form(draw: Draw, axis: Axis) -> Comparison:
    N, C = 2 * draw.normal(S, K), draw.distributions(S, K, axis=axis)
    dim = dimension(axis)
    claimed = [Objective(potential).per_distribution(N, C) for potential in _potentials(axis)]
    actual = [potential.value(N) - (C * N).sum(dim) for potential in _potentials(axis)]
    return Comparison(torch.stack(claimed), torch.stack(actual))


def _residual(draw: Draw, axis: Axis) -> Comparison:
    N, C = 2 * draw.normal(S, K), draw.distributions(S, K, axis=axis)
    losses = [Objective(potential) for potential in _potentials(axis)]
    claimed = [loss.residual(N, C) for loss in losses]
    actual = [derivative(lambda N, loss=loss: loss.value(N, C).sum(), N) for loss in losses]  # type: ignore[misc]
    return Comparison(torch.stack(claimed), torch.stack(actual))


def _every_gradient(draw: Draw, axis: Axis) -> Comparison:
    Z = draw.normal(2, S, F)
    claimed, actual = [], []
    for model in _models(draw):
        for potential in _potentials(axis):
            C = draw.distributions(*model.logits(Z).shape, axis=axis)
            loss = Objective(potential)
            claimed.append(feature_gradient(loss, model, Z, C).total)
            actual.append(derivative(lambda Z, m=model, loss=loss, C=C: loss.value(m.logits(Z), C).sum(), Z))  # type: ignore[misc]
    return Comparison(torch.stack(claimed), torch.stack(actual))


def _gradient_without_logits(draw: Draw, axis: Axis) -> Comparison:
    Z, dim = draw.normal(2, S, F), dimension(axis)
    claimed, actual = [], []
    for model in _models(draw):
        N = model.logits(Z)
        labels = draw.normal(*N.shape).argmax(dim)
        one_hot = torch.zeros_like(N).scatter(dim, labels.unsqueeze(dim), 1)
        # Softmax goes tile by tile, every other potential by blocks of distributions.
        for potential in (LogSumExp(axis, 0.7), Entmax(axis)):
            loss = Objective(potential)
            claimed.append(feature_gradient(loss, model, Z, labels, backend="chunked").total)
            actual.append(derivative(lambda Z, m=model, loss=loss, C=one_hot: loss.value(m.logits(Z), C).sum(), Z))  # type: ignore[misc]
    return Comparison(torch.stack(claimed), torch.stack(actual))


def _heads_add_up(draw: Draw, axis: Axis) -> Comparison:
    Z, thetas, C = draw.normal(S, F), draw.normal(H, F, F), draw.distributions(H, S, S, axis=axis)
    loss = CrossEntropy(axis)
    each = [feature_gradient(loss, Quadratic(thetas[h]), Z, C[h]).total for h in range(H)]
    return Comparison(feature_gradient(loss, Quadratic(thetas), Z, C).total, torch.stack(each).sum(0))


def _own_role(draw: Draw, axis: Axis) -> Comparison:
    Z, theta, C = draw.normal(S, F), draw.normal(F, F), draw.distributions(S, S, axis=axis)
    dim = dimension(axis)

    def own_energy(moving: Tensor) -> Tensor:
        N = moving @ theta @ Z.mT if axis == "classes" else Z @ theta @ moving.mT
        return torch.logsumexp(N, dim).sum() - (C * N).sum()

    claimed = feature_gradient(CrossEntropy(axis), Quadratic(theta, roles="own"), Z, C).total
    return Comparison(claimed, derivative(own_energy, Z))


def _masked_gradient(draw: Draw, axis: Axis) -> Comparison:
    Z, theta = draw.normal(S, F), draw.normal(F, F)
    mask = draw.normal(S, S) > -0.5
    mask[:, 0] = True
    mask[0, :] = True
    mask[1 if axis == "classes" else slice(None), slice(None) if axis == "classes" else 1] = False
    dim = dimension(axis)
    C = torch.softmax(draw.normal(S, S).masked_fill(~mask, -torch.inf), dim).nan_to_num(0.0)
    alive = mask.any(dim)

    def masked_energy(Z: Tensor) -> Tensor:
        N = Z @ theta @ Z.mT
        exponentials = torch.exp(N) * mask
        return torch.log(exponentials.sum(dim)[alive]).sum() - (C * N).sum()

    claimed = feature_gradient(CrossEntropy(axis), Quadratic(theta), Z, C, mask).total
    return Comparison(claimed, derivative(masked_energy, Z))


def _linear_splitting_is_one_gradient_step(draw: Draw, axis: Axis) -> Comparison:
    Z, theta, C = draw.normal(S, F), draw.normal(K, F), draw.distributions(S, K, axis=axis)
    flow = GradientFlow(CrossEntropy(axis), Linear(theta), C)
    return Comparison(LieTrotter().advance(flow, Z, 0.3), Euler().advance(flow, Z, 0.3))


def _safe_steps_never_raise(draw: Draw, axis: Axis) -> Comparison:
    Z, theta, C = 3 * draw.normal(S, F), draw.normal(K, F), draw.distributions(S, K, axis=axis)
    rises = []
    for potential in _potentials(axis):
        loss, model = Objective(potential), Linear(theta)
        flow = GradientFlow(loss, model, C)
        largest = 2 / curvature_bound(loss, model)
        before, after = flow.energy(Z), flow.energy(Euler().advance(flow, Z, largest))
        rises.append((after - before - 1e-13 * (1 + before.abs())).clamp_min(0))
    violation = torch.stack(rises)
    return Comparison(violation, torch.zeros_like(violation))


def _exact_subflow(draw: Draw, axis: Axis) -> Comparison:
    Z, theta, C = draw.normal(3, 2), draw.normal(2, 2), draw.distributions(3, 3, axis=axis)
    flow = GradientFlow(CrossEntropy(axis), Quadratic(theta), C)
    operator = torch.kron(C, theta) + torch.kron(C.mT.contiguous(), theta.mT.contiguous())
    whole = (torch.matrix_exp(0.5 * operator) @ Z.flatten()).reshape(Z.shape)
    target_only = Strang(exact=True)
    claimed = target_only.substep_on(flow.terms[1], Z, 0.5)
    return Comparison(claimed, whole)


def _dual_dissipation(draw: Draw, axis: Axis) -> Comparison:
    loss, radius, dim = CrossEntropy(axis), F**0.5, dimension(axis)
    claimed, actual = [], []
    for model in (Linear(draw.normal(K, F)), Quadratic(draw.normal(F, F) / F)):
        Z = 3 * draw.normal(S, F)
        C = draw.distributions(*model.logits(Z).shape, axis=axis)

        def energy(X: Tensor, model: Model = model, C: Tensor = C) -> Tensor:
            N = model.logits(X)
            return torch.logsumexp(N, dim).sum() - (C * N).sum()

        def seen(Z: Tensor) -> Tensor:
            X: Tensor = radius * Z / torch.linalg.vector_norm(Z, dim=-1, keepdim=True)
            return X

        X = seen(Z)
        G = feature_gradient(loss, model, X, C).total
        across = G - X * (X * G).sum(-1, keepdim=True) / radius**2
        rate = (radius / torch.linalg.vector_norm(Z, dim=-1) * across.square().sum(-1)).sum()
        claimed += [-rate, -GradientFlow(loss, model, C, Dual(radius)).dissipation(Z)]
        V = -derivative(energy, X)
        time = torch.zeros((), dtype=Z.dtype)
        actual += [derivative(lambda t, Z=Z, V=V, energy=energy: energy(seen(Z + t * V)), time)] * 2  # type: ignore[misc]
    return Comparison(torch.stack(claimed), torch.stack(actual))


PACKAGE_CLAIMS = (
    Claim("p = ∇Ω(N) for every potential", "potentials", _weights_are_the_gradient, on_both_axes(HOLDS)),
    Claim("Ω(N) + Ω*(p) = ⟨p,N⟩ at p = ∇Ω(N)", "potentials", _fenchel_young_equality, on_both_axes(HOLDS)),
    Claim("the Fenchel–Young gap is never negative", "objective", _fenchel_young_gap, on_both_axes(HOLDS)),
    Claim("the accurate ℓ is Ω(N) − ⟨C,N⟩", "objective", _accurate_form, on_both_axes(HOLDS)),
    Claim("∂ℓ/∂N = p − C", "objective", _residual, on_both_axes(HOLDS)),
    Claim("∂ℓ for every potential × model", "gradient", _every_gradient, on_both_axes(HOLDS)),
    Claim("… without keeping N, C as labels", "gradient", _gradient_without_logits, on_both_axes(HOLDS)),
    Claim("heads: ℓ and gradients add up", "gradient", _heads_add_up, on_both_axes(HOLDS)),
    Claim("own role: each token's own gradient", "gradient", _own_role, on_both_axes(HOLDS)),
    Claim("masked ∂ℓ = gradient of the masked ℓ", "gradient", _masked_gradient, on_both_axes(HOLDS)),
    Claim("linear N: splitting = one gradient step", "splitting", _linear_splitting_is_one_gradient_step,
          on_both_axes(HOLDS)),
    Claim("a step of 2/L never raises ℓ", "steps", _safe_steps_never_raise, on_both_axes(HOLDS)),
    Claim("Ż = −∂ℓ(X): dℓ/dt = −Σ(r/‖z‖)‖P∂ℓ‖²", "constraints", _dual_dissipation, on_both_axes(HOLDS)),
    Claim("exact sub-flow = matrix exponential", "splitting", _exact_subflow, on_both_axes(HOLDS)),
)  # fmt: skip
