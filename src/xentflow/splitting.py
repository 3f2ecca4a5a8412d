"""Operator splittings over the terms of a flow: attention half-step, then target half-step.

Each sub-step is an explicit integrator's (``substep``), or exact where the term allows (``exact=True``): a constant
term by one addition, a linear one by its exponential, applied without forming the operator. A splitting's order is the
lower of its own and its sub-step's. With Euler sub-steps Lie–Trotter is the paper's transformer block.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from xentflow.axes import require_type
from xentflow.errors import XentflowError
from xentflow.flow import FlowTerm, GradientFlow
from xentflow.integrators import RK4, Euler, Heun, Integrator, Method, StepSize
from xentflow.models import Features


class Splitting(Method):
    """A composition of sub-flows of the terms."""

    substep: Integrator
    exact: bool
    _own_order: ClassVar[int]

    def __post_init__(self) -> None:
        require_type("substep", self.substep, Integrator)

    @property
    def order(self) -> int:
        return min(self._own_order, self.substep.order)

    @abstractmethod
    def schedule(self) -> Sequence[tuple[int, float]]:
        """(term, fraction of the step) in the order of application; term 0 is attention, term 1 the target."""

    def advance(self, flow: GradientFlow, Z: Features, h: StepSize) -> Features:
        *_, (_, _, end) = self.stages(flow, Z, h)
        return end

    def stages(self, flow: GradientFlow, Z: Features, h: StepSize) -> Iterator[tuple[str, float, Features]]:
        """Each sub-step's term, the fraction of h that has gone by after it (the terms' mean), and Z there."""
        terms, gone = flow.terms, 0.0
        for index, fraction in self.schedule():
            Z = self.substep_on(terms[index], Z, fraction * h)
            gone += fraction / len(terms)
            yield terms[index].name, gone, Z

    def substep_on(self, term: FlowTerm, Z: Tensor, h: StepSize) -> Tensor:
        """One term alone, for a step h."""
        if self.exact and term.degree == 0:
            return Euler().advance(term, Z, h)
        if self.exact and term.degree == 1:
            assert term.norm is not None
            return exponential_action(term.velocity, Z, h, term.norm(Z))
        return self.substep.advance(term, Z, h)


@dataclass(frozen=True)
class LieTrotter(Splitting):
    """Attention, then target: order 1. With Euler sub-steps, the paper's Eq. (7) and (9)."""

    substep: Integrator = Euler()
    exact: bool = False
    _own_order: ClassVar[int] = 1

    def schedule(self) -> Sequence[tuple[int, float]]:
        return ((0, 1.0), (1, 1.0))


@dataclass(frozen=True)
class Strang(Splitting):
    """Half the target, attention, half the target: order 2. The cheap term is the one halved."""

    substep: Integrator = Heun()
    exact: bool = False
    _own_order: ClassVar[int] = 2

    def schedule(self) -> Sequence[tuple[int, float]]:
        return ((1, 0.5), (0, 1.0), (1, 0.5))


@dataclass(frozen=True)
class Yoshida(Splitting):
    """Three Strang steps of lengths w, 1 − 2w, w with w = 1/(2 − 2^⅓): order 4. The middle one goes back in time."""

    substep: Integrator = RK4()
    exact: bool = False
    _own_order: ClassVar[int] = 4

    def schedule(self) -> Sequence[tuple[int, float]]:
        w = 1 / (2 - 2 ** (1 / 3))
        middle = 1 - 2 * w
        return ((1, w / 2), (0, w), (1, (w + middle) / 2), (0, middle), (1, (w + middle) / 2), (0, w), (1, w / 2))


_LONGEST = 1e4


def exponential_action(apply: Callable[[Tensor], Tensor], Z: Tensor, h: StepSize, norm: Tensor) -> Tensor:
    """exp(hA)Z for a linear map A given by its action and a bound on its norm: Taylor series over short sub-steps."""
    largest = h.abs().max() if isinstance(h, Tensor) else abs(h)
    bound = float((largest * norm).detach())
    if not math.isfinite(bound):
        return Z * math.nan
    if bound > _LONGEST:
        raise XentflowError(
            f"exact: expected a step times the norm of the target term of at most {_LONGEST:g}, got {bound:.3g}; "
            "take a smaller step"
        )
    repeats = int(bound) + 1
    # With ‖hA‖ ≤ 1 the k-th term is at most 1/k!: the series ends where that is below rounding.
    count = 20 if Z.dtype == torch.float64 else 12
    for _ in range(repeats):
        term = Z
        for k in range(1, count + 1):
            term = (h / (repeats * k)) * apply(term)
            Z = Z + term
    return Z
