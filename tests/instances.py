"""The catalogue the suite runs through, and formulas written out a second time to hold the package against.

Nothing here calls the package's mathematics: reference logits are einsum, reference potentials are textbook formulas,
and the weights of the sparse ones come straight from the ``entmax`` package.
"""

from collections.abc import Callable
from dataclasses import dataclass

import entmax
import torch
from torch import Tensor, nn

import xentflow as xf

AXES = ("sequence", "classes")
HEADS = {"one-head": None, "four-heads": 4}
BATCHES = {"no-batch": (), "batch": (2, 2)}
S, F, K = 4, 3, 5
CONTEXT_LENGTH, CONTEXT_WIDTH = 6, 2

POTENTIALS: dict[str, Callable[[str], xf.Potential]] = {
    "logsumexp": lambda axis: xf.LogSumExp(axis),
    "logsumexp-T": lambda axis: xf.LogSumExp(axis, temperature=1.7),
    "softplus": lambda axis: xf.Softplus(axis),
    "half-square": lambda axis: xf.HalfSquare(axis),
    "entmax-1.5": lambda axis: xf.Entmax(axis, alpha=1.5),
    "sparsemax": lambda axis: xf.Entmax(axis, alpha=2.0),
    "entmax-1.3": lambda axis: xf.Entmax(axis, alpha=1.3),
}


def normal(shape, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def uniform(shape, generator: torch.Generator) -> Tensor:
    return torch.rand(tuple(shape), generator=generator, dtype=torch.float64)


def relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach(), expected.detach()
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))


def along(axis: str) -> int:
    return {"sequence": -2, "classes": -1}[axis]


def draw_targets(potential: xf.Potential, shape, generator: torch.Generator) -> Tensor:
    """Soft targets in the interior of the domain of Ω*."""
    if isinstance(potential, xf.HalfSquare):
        return normal(shape, generator)
    if isinstance(potential, xf.Softplus):
        return uniform(shape, generator)
    return normal(shape, generator).softmax(along(potential.axis))


def reference_weights(potential: xf.Potential, N: Tensor) -> Tensor:
    """p = ∇Ω(N)."""
    dim = along(potential.axis)
    match potential:
        case xf.LogSumExp(temperature=T):
            scaled = torch.exp((N - N.amax(dim, keepdim=True)) / T)
            return scaled / scaled.sum(dim, keepdim=True)
        case xf.Softplus():
            return 1 / (1 + torch.exp(-N))
        case xf.HalfSquare():
            return N
        case xf.Entmax(alpha=1.5):
            return entmax.entmax15(N, dim)
        case xf.Entmax(alpha=2.0):
            return entmax.sparsemax(N, dim)
        case xf.Entmax(alpha=alpha):
            return entmax.entmax_bisect(N, alpha, dim, n_iter=80)
    raise NotImplementedError(potential)


def reference_value(potential: xf.Potential, N: Tensor) -> Tensor:
    """Ω(N) of each distribution."""
    dim = along(potential.axis)
    match potential:
        case xf.LogSumExp(temperature=T):
            return T * torch.logsumexp(N / T, dim)
        case xf.Softplus():
            return torch.logaddexp(N, torch.zeros_like(N)).sum(dim)
        case xf.HalfSquare():
            return (N * N).sum(dim) / 2
        case xf.Entmax(alpha=alpha):
            p = reference_weights(potential, N)
            return (p * N).sum(dim) - (p**alpha - p).sum(dim) / (alpha * (alpha - 1))
    raise NotImplementedError(potential)


def support_margin(potential: xf.Potential, N: Tensor) -> float:
    """How far the logits are from a change of support, where derivatives of a sparse potential jump."""
    if not isinstance(potential, xf.Entmax):
        return float("inf")
    dim = along(potential.axis)
    scaled = (potential.alpha - 1) * N
    largest = reference_weights(potential, N).amax(dim, keepdim=True)
    threshold = scaled.amax(dim, keepdim=True) - largest ** (potential.alpha - 1)
    return float((scaled - threshold).abs().min())


def draw_logits(potential: xf.Potential, shape, generator: torch.Generator, scale: float = 1.5) -> Tensor:
    """Logits with no entry near a change of support, so that differences across a small step see none."""
    while True:
        N = normal(shape, generator, scale)
        if support_margin(potential, N) > 1e-3:
            return N


def central_differences(function: Callable[[Tensor], Tensor], X: Tensor, batch_ndim: int, step: float = 3e-5) -> Tensor:
    """The gradient of a per-sample function in the last dimensions of X, by fourth-order central differences.

    ``function`` maps ``(points, *batch, …)`` to ``(points, *batch)``: every perturbation of every sample at once.
    """
    inner = X.shape[batch_ndim:]
    directions = step * torch.eye(inner.numel(), dtype=X.dtype).view(-1, *[1] * batch_ndim, *inner)
    with torch.no_grad():
        near = function(X + directions) - function(X - directions)
        far = function(X + 2 * directions) - function(X - 2 * directions)
    return ((8 * near - far) / (12 * step)).movedim(0, -1).reshape(X.shape)


class SmallNetwork(nn.Module):
    """N = tanh(AZW)V with A mixing tokens: nonlinear, and no two of its axes can be confused."""

    def __init__(self, mixing: Tensor, inner: Tensor, outer: Tensor) -> None:
        super().__init__()
        self.mixing, self.inner, self.outer = nn.Parameter(mixing), nn.Parameter(inner), nn.Parameter(outer)

    def forward(self, Z: Tensor) -> Tensor:
        hidden = torch.tanh(self.mixing @ Z @ self.inner)
        return (hidden.unsqueeze(-3) if self.outer.ndim == 3 else hidden) @ self.outer


@dataclass(frozen=True)
class ModelCase:
    """A family of models: ``draw`` its tensors, ``build`` the model of them, and its ``logits`` written as einsum."""

    draw: Callable[[torch.Generator, tuple[int, ...], tuple[int, ...]], tuple[Tensor, ...]]
    build: Callable[..., xf.Model]
    logits: Callable[..., Tensor]


def _draw_symmetric(generator, heads, batch):
    half = normal((*heads, F, F), generator, 0.6)
    return ((half + half.mT) / 2,)


def _draw_bilinear(generator, heads, batch):
    theta = normal((*heads, F, CONTEXT_WIDTH), generator)
    return theta, normal((*batch, CONTEXT_LENGTH, CONTEXT_WIDTH), generator)


def _draw_network(generator, heads, batch):
    return normal((S, S), generator), normal((F, 6), generator), normal((*heads, 6, K), generator)


def _linear_logits(Z, theta, bias=None):
    N = torch.einsum("...if,hkf->...hik" if theta.ndim == 3 else "...if,kf->...ik", Z, theta)
    return N if bias is None else N + bias[..., None, :]


def _quadratic_logits(Z, theta):
    return torch.einsum("...if,hfg,...jg->...hij" if theta.ndim == 3 else "...if,fg,...jg->...ij", Z, theta, Z)


def _factor_logits(Z, phi):
    formula = "...if,hfr,hgr,...jg->...hij" if phi.ndim == 3 else "...if,fr,gr,...jg->...ij"
    return torch.einsum(formula, Z, phi, phi, Z)


def _draw_factors(generator, heads, batch):
    return normal((*heads, F, 2), generator, 0.7), normal((*heads, F, 2), generator, 0.7)


def _factors_logits(Z, phi, psi):
    formula = "...if,hfr,hgr,...jg->...hij" if phi.ndim == 3 else "...if,fr,gr,...jg->...ij"
    return torch.einsum(formula, Z, phi, psi, Z)


def _bilinear_logits(Z, theta, context):
    return torch.einsum("...if,hfg,...kg->...hik" if theta.ndim == 3 else "...if,fg,...kg->...ik", Z, theta, context)


def _network_logits(Z, mixing, inner, outer):
    hidden = torch.tanh(torch.einsum("ts,...sf,fw->...tw", mixing, Z, inner))
    return torch.einsum("...tw,hwk->...htk" if outer.ndim == 3 else "...tw,wk->...tk", hidden, outer)


def _build_network(mixing, inner, outer):
    return xf.Functional(SmallNetwork(mixing, inner, outer), heads=outer.shape[0] if outer.ndim == 3 else None)


MODELS: dict[str, ModelCase] = {
    "linear": ModelCase(lambda g, heads, batch: (normal((*heads, K, F), g),), xf.Linear, _linear_logits),
    "linear-bias": ModelCase(
        lambda g, heads, batch: (normal((*heads, K, F), g), normal((*heads, K), g)), xf.Linear, _linear_logits
    ),
    "quadratic": ModelCase(lambda g, heads, batch: (normal((*heads, F, F), g, 0.6),), xf.Quadratic, _quadratic_logits),
    "quadratic-symmetric": ModelCase(_draw_symmetric, xf.Quadratic, _quadratic_logits),
    "quadratic-factor": ModelCase(
        lambda g, heads, batch: (normal((*heads, F, 2), g, 0.7),), xf.Quadratic.from_factor, _factor_logits
    ),
    "quadratic-two-factors": ModelCase(
        _draw_factors,
        lambda phi, psi, roles="both": xf.Quadratic.from_factor(phi, roles=roles, psi=psi),
        _factors_logits,
    ),
    "bilinear": ModelCase(_draw_bilinear, xf.Bilinear, _bilinear_logits),
    "functional": ModelCase(_draw_network, _build_network, _network_logits),
}


@dataclass(frozen=True)
class Instance:
    """One random problem: everything ``feature_gradient`` takes, and the energy written out independently."""

    potential: xf.Potential
    case: ModelCase
    tensors: tuple[Tensor, ...]
    Z: Tensor
    C: Tensor

    @property
    def objective(self) -> xf.Objective:
        return xf.Objective(self.potential)

    @property
    def model(self) -> xf.Model:
        return self.case.build(*self.tensors)

    def energy(self, Z: Tensor, model: xf.Model | None = None) -> Tensor:
        """ℓ of each sample as the package computes it."""
        model = self.model if model is None else model
        values = self.objective.value(model.logits(Z), self.C)
        return values if model.heads is None else values.sum(-1)

    def reference_energy(self, Z: Tensor) -> Tensor:
        """ℓ = ⟨1, Ω(N)⟩ − ⟨C, N⟩ of each sample as the paper defines it."""
        N, samples = self.case.logits(Z, *self.tensors), Z.ndim - 2
        return reference_value(self.potential, N).flatten(samples).sum(-1) - (self.C * N).flatten(samples).sum(-1)


def draw_instance(potential: xf.Potential, model: str, heads, batch, generator: torch.Generator) -> Instance:
    case = MODELS[model]
    while True:
        tensors = case.draw(generator, () if heads is None else (heads,), batch)
        Z = normal((*batch, S, F), generator)
        N = case.logits(Z, *tensors)
        if support_margin(potential, N) > 1e-3:
            return Instance(potential, case, tensors, Z, draw_targets(potential, N.shape, generator))
