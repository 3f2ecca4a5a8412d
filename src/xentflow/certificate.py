"""The certificate of a block: what it claims to be, measured on random input.

Errors are relative to the gradient, in float64. A gradient flow is compared with autograd of its energy and with the
rate at which that energy falls; a game with autograd of each token's own energy; whatever has no common energy is told
how far it is from the gradient. The order is measured by halving steps.
"""

import copy
import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from xentflow.axes import is_finite
from xentflow.block import DerivedBlock, trace
from xentflow.constraints import Constraint, Dual, Free, Sphere, Whitened
from xentflow.derive import is_one_euler_step
from xentflow.errors import XentflowError
from xentflow.flow import GradientFlow
from xentflow.integrators import Method, integrate
from xentflow.models import Quadratic
from xentflow.steps import curvature_bound


@dataclass(frozen=True)
class Certificate:
    """What was measured; None where a line makes no sense for the block."""

    kind: str
    gradient_error: float
    """Velocity against autograd in the features: of ℓ, or for a game of each token's own ℓ."""
    dissipation_error: float | None
    """dℓ/dt along the velocity against the dissipation, which is ‖Ż‖² but for ``Dual``."""
    constraint_error: float | None
    """How far one step leaves the constraint set: norms of tokens on a sphere, ZᵀZ/S where whitened."""
    curvature: float | None
    """L, where it bounds the curvature of ℓ."""
    certified: bool
    """Whether a pass is one gradient step of free features below 2/L, and so cannot raise ℓ."""
    step: float
    """h, averaged where it differs."""
    declared_order: int
    measured_order: float | None
    """None where nothing moves, or from the origin, or so exactly that only rounding is left."""
    energy: list[float]
    """ℓ summed over the samples, at the start and after each of ten passes, for the targets of the pass before."""
    rises: int
    """In how many of samples × passes ℓ rose, for the targets of that pass."""
    parameters: int
    flops: int
    """Multiplications and additions of matrix products in one pass."""
    least_bytes: int
    """θ and the features read once, the features written once, in float32."""

    def record(self) -> dict[str, Any]:
        """As it goes into ``result.json``."""
        return asdict(self)


def certify(block: DerivedBlock, Z: Tensor, inputs: dict[str, Tensor | None], passes: int = 10) -> Certificate:
    """Measure a float64 copy of ``block`` at Z (converted); ``inputs`` as for the block."""
    block, Z = copy.deepcopy(block).double(), Z.double()
    inputs = {name: _doubled(value) for name, value in inputs.items()}
    Z = block.constraint.place(Z)
    flow = block.flow(Z, **inputs)
    with torch.no_grad():
        energy, rises = _descent(block, Z, inputs, passes)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        moved = block(Z, **inputs)
    step = float(trace([block], Z, inputs).times[-1].mean())
    slope, curvature = _slope(block, flow, Z), _curvature(flow)
    parameters = sum(parameter.numel() for parameter in block.parameters())
    one_step = isinstance(block.constraint, Free) and is_one_euler_step(block.splitting) and flow.is_gradient
    return Certificate(
        kind=block.kind,
        gradient_error=_gradient_error(flow, Z, slope),
        dissipation_error=_dissipation_error(flow, Z, slope) if flow.is_gradient else None,
        constraint_error=_constraint_error(block.constraint, Z, moved),
        curvature=curvature,
        certified=one_step and curvature is not None and step * curvature < 2,
        step=step,
        declared_order=block.splitting.order,
        measured_order=_measured_order(flow, Z, block.splitting),
        energy=energy,
        rises=rises,
        parameters=parameters,
        flops=int(counter.get_total_flops()),
        least_bytes=4 * (parameters + Z.numel() + moved.numel()),
    )


def _descent(block: DerivedBlock, Z: Tensor, inputs: dict[str, Tensor | None], passes: int) -> tuple[list[float], int]:
    """ℓ pass by pass, and how often it rose; each pass is judged by its own targets."""
    energies, rises = [], 0
    for count in range(1, passes + 1):
        flow = block.flow(Z, **inputs)
        before, Z = flow.energy(Z), block(Z, **inputs)
        after = flow.energy(Z) if is_finite(Z) else Z
        if not is_finite(after):
            raise XentflowError(
                f"certificate: expected features and ℓ that stay finite over {passes} passes, got others after pass "
                f"{count}, where ℓ was {float(before.sum()):.3g}; take a smaller step"
            )
        energies.append(float(before.sum()))
        rises += int((after > before + 1e-12 * (1 + before.abs())).sum())
    return [*energies, float(after.sum())], rises


def _constraint_error(constraint: Constraint, Z: Tensor, moved: Tensor) -> float | None:
    if isinstance(constraint, Sphere):
        return _relative(moved.norm(dim=-1), Z.norm(dim=-1))
    if isinstance(constraint, Whitened):
        gram = moved.mT @ moved / moved.shape[-2]
        return _relative(gram, torch.eye(gram.shape[-1], dtype=gram.dtype).expand_as(gram))
    return None


def _slope(block: DerivedBlock, flow: GradientFlow, Z: Tensor) -> Tensor:
    """By autograd, the gradient in the features of ℓ, or for a game of each token's own ℓ."""
    # Of a dual state the features show but a part of the velocity, and all of it must be right.
    still = flow.constraint.features(Z.detach())
    moving = still.clone().requires_grad_()
    if block.kind == "game" and isinstance(flow.model, Quadratic):
        theta = flow.model.full_theta()
        queries, keys = (moving, still) if flow.objective.axis == "classes" else (still, moving)
        if flow.model.heads is not None:
            queries, keys = queries.unsqueeze(-3), keys.unsqueeze(-3)
        N = queries @ theta @ keys.mT
        energy = flow.objective.potential.tilted(N, flow.targets(still), flow.mask(still))
        if flow.head_weights is not None:
            energy = energy * flow.head_weights.squeeze(-1)
    else:
        energy = flow.energy_at(moving)
    (gradient,) = torch.autograd.grad(energy.sum(), moving)
    return gradient


def _gradient_error(flow: GradientFlow, Z: Tensor, slope: Tensor) -> float:
    with torch.no_grad():
        # Not relative to the projected gradient, of which a constraint may leave nothing but rounding.
        difference = flow.velocity(Z) + flow.constraint.tangent(Z, slope)
        return _ratio(difference.norm(), slope.norm())


def _dissipation_error(flow: GradientFlow, Z: Tensor, slope: Tensor) -> float:
    velocity = flow.velocity(Z).detach()
    moving = Z.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(flow.energy(moving).sum(), moving)
    difference = (gradient * velocity).sum((-2, -1)) + flow.dissipation(Z).detach()
    # As much slower as a dual token is longer than what is seen of it, ℓ falls: so is what the difference is held to.
    size = Z.norm(dim=-1, keepdim=True)
    share = (flow.constraint.features(Z).norm(dim=-1, keepdim=True) / size).masked_fill(size == 0, 0)
    return _ratio(difference.norm(), (share * slope.square()).sum((-2, -1)).norm())


def _curvature(flow: GradientFlow) -> float | None:
    if flow.model.pullback_degree != 0:
        return None
    with torch.no_grad():
        weight = 1.0 if flow.head_weights is None else float(flow.head_weights.max())
        return weight * float(curvature_bound(flow.objective, flow.model).max())


def _measured_order(flow: GradientFlow, Z: Tensor, method: Method) -> float | None:
    """log₂ of the ratio by which results come closer as steps are halved twice, while features move by about half."""
    with torch.no_grad():
        # What is seen of a dual token turns the faster the shorter that is, so none may move by more than half.
        dim = -1 if isinstance(flow.constraint, Dual) else None
        moving, size = flow.velocity(Z).norm(dim=dim), Z.norm(dim=dim)
        # What leaves the origin has no size to move by half of, and what is seen of a dual token jumps then.
        speed = float((moving / size).masked_fill(moving == 0, 0).max())
        if speed < 1e-14 or speed == math.inf:
            return None
        time = 0.5 / speed
        ends = [integrate(flow, Z, method, time / n, n).Z[-1] for n in (32, 64, 128)]
    first, second = (float((b - a).norm()) for a, b in pairwise(ends))
    return math.log2(first / second) if second >= 1e-14 * float(Z.norm()) else None


def _relative(value: Tensor, reference: Tensor) -> float:
    return _ratio((value - reference).norm(), reference.norm())


def _ratio(difference: Tensor, size: Tensor) -> float:
    return float(difference / size.clamp_min(1e-300))


def _doubled(value: Tensor | None) -> Tensor | None:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
