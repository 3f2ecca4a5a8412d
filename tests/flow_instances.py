"""Random instances the tests share. Every draw comes from a generator with a seed of its own, so any order will do."""

import torch
from torch import Tensor, nn

import xentflow as xf

AXES = ("sequence", "classes")
KINDS = ("linear", "quadratic", "bilinear", "functional")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def potentials(axis: str) -> list[xf.Potential]:
    return [
        xf.LogSumExp(axis),
        xf.LogSumExp(axis, temperature=0.5),
        xf.Softplus(axis),
        xf.HalfSquare(axis),
        xf.Entmax(axis),
        xf.Entmax(axis, alpha=2.0),
    ]


def random_targets(potential: xf.Potential, generator: torch.Generator, *shape: int) -> Tensor:
    """Targets in the domain of the potential's conjugate."""
    if isinstance(potential, xf.Softplus):
        return uniform(generator, *shape)
    if isinstance(potential, xf.HalfSquare):
        return normal(generator, *shape)
    return torch.softmax(normal(generator, *shape), potential.dim)


def random_model(
    kind: str, generator: torch.Generator, batch: tuple[int, ...] = (), heads: int | None = None, F: int = 3, K: int = 4
) -> xf.Model:
    H = () if heads is None else (heads,)
    if kind == "linear":
        return xf.Linear(normal(generator, *H, K, F), normal(generator, *H, K))
    if kind in ("quadratic", "own"):
        theta = normal(generator, *H, F, F) / F**0.5
        return xf.Quadratic(theta, roles="both" if kind == "quadratic" else "own")
    if kind == "bilinear":
        return xf.Bilinear(normal(generator, *H, F, 2), normal(generator, *batch, K, 2))
    assert kind == "functional"
    inner, outer = normal(generator, F, 6), normal(generator, 6, (heads or 1) * K)

    def network(Z: Tensor) -> Tensor:
        N = torch.tanh(Z @ inner) @ outer
        return N if heads is None else N.unflatten(-1, (heads, K)).movedim(-2, -3)

    return xf.Functional(network, heads)


def random_flow(
    kind: str,
    axis: str,
    seed: int = 0,
    *,
    potential: xf.Potential | None = None,
    constraint: xf.Constraint | None = None,
    batch: tuple[int, ...] = (),
    heads: int | None = None,
    S: int = 5,
    F: int = 3,
    K: int = 4,
) -> tuple[xf.GradientFlow, Tensor]:
    """A flow with random parameters and targets, and features on its constraint set."""
    generator = seeded(seed)
    potential = xf.LogSumExp(axis) if potential is None else potential
    model = random_model(kind, generator, batch, heads, F, K)
    Z = normal(generator, *batch, S, F)
    C = random_targets(potential, generator, *model.logits(Z).shape)
    constraint = xf.Free() if constraint is None else constraint
    return xf.GradientFlow(xf.Objective(potential), model, C, constraint=constraint), constraint.place(Z)


class TinyNetwork(nn.Module):
    """A network whose buffers are not all floating, as batch normalisation's are not."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, width * classes, dtype=torch.float64).reshape(width, classes))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, Z: Tensor) -> Tensor:
        return torch.tanh(Z @ self.weight)
