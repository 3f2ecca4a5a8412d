"""Steppers over a vector field, and ``integrate``, which keeps the whole path. No attention is known here.

A vector field gives ``velocity(Z)`` and ``retract(Z, V)``. Every stage of a step is retracted onto the constraint set,
so a method keeps its order on a curved one; without a constraint this is the textbook method.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from xentflow.axes import holds, is_finite, is_number, require_alike, require_features, require_finite, require_type
from xentflow.errors import Diverged, XentflowError
from xentflow.flow import GradientFlow
from xentflow.models import Features
from xentflow.steps import LineSearch

StepSize = float | Tensor
"""One number, or a tensor that broadcasts against Z."""


@runtime_checkable
class VectorField(Protocol):
    """What a stepper needs: a velocity, and a way to move by it."""

    @property
    def velocity(self) -> Callable[[Tensor], Tensor]: ...

    @property
    def retract(self) -> Callable[[Tensor, Tensor], Tensor]: ...


class Method(ABC):
    """One way to advance a flow by a step."""

    @property
    @abstractmethod
    def order(self) -> int:
        """p: the error at a fixed time falls like h^p."""

    @abstractmethod
    def advance(self, flow: GradientFlow, Z: Features, h: StepSize) -> Features:
        """Z after a step h."""


class Integrator(Method):
    """An explicit one-step method that works on any vector field, a whole flow or a single term."""

    _order: ClassVar[int]

    @property
    def order(self) -> int:
        return self._order

    @abstractmethod
    def advance(self, flow: VectorField, Z: Features, h: StepSize) -> Features: ...


@dataclass(frozen=True)
class Euler(Integrator):
    """Z + hŻ: order 1, and one gradient step."""

    _order: ClassVar[int] = 1

    def advance(self, flow: VectorField, Z: Features, h: StepSize) -> Features:
        return flow.retract(Z, h * flow.velocity(Z))


@dataclass(frozen=True)
class Heun(Integrator):
    """The trapezoidal predictor-corrector: order 2."""

    _order: ClassVar[int] = 2

    def advance(self, flow: VectorField, Z: Features, h: StepSize) -> Features:
        first = flow.velocity(Z)
        second = flow.velocity(flow.retract(Z, h * first))
        return flow.retract(Z, h * (first + second) / 2)


@dataclass(frozen=True)
class RK4(Integrator):
    """The classical Runge–Kutta method: order 4."""

    _order: ClassVar[int] = 4

    def advance(self, flow: VectorField, Z: Features, h: StepSize) -> Features:
        first = flow.velocity(Z)
        second = flow.velocity(flow.retract(Z, h / 2 * first))
        third = flow.velocity(flow.retract(Z, h / 2 * second))
        fourth = flow.velocity(flow.retract(Z, h * third))
        return flow.retract(Z, h / 6 * (first + 2 * second + 2 * third + fourth))


@dataclass(frozen=True)
class Path:
    """Where a flow went: features, energies and times, step by step, the start included."""

    Z: Float[Tensor, "points *batch S F"]
    energy: Float[Tensor, "points *batch"]
    times: Float[Tensor, "points *batch"]


def integrate(
    flow: GradientFlow,
    Z0: Features,
    method: Method,
    step: StepSize | Callable[[GradientFlow, Tensor], Tensor],
    steps: int,
) -> Path:
    """Follow ``flow`` from Z0 for ``steps`` steps and return the whole path.

    Z0 is first placed on the flow's constraint set. step: h; a tensor that broadcasts against Z; or a rule that gives
    one at every point, such as ``LineSearch``. Raises ``Diverged``, which holds the path so far, when Z or ℓ stops
    being finite.
    """
    require_type("flow", flow, GradientFlow)
    require_features(Z0, "Z0")
    if not isinstance(method, Method):
        raise XentflowError(f"method: expected an integrator or a splitting such as Strang(), got {method!r}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise XentflowError(f"steps: expected a positive whole number, got {steps!r}")
    Z = flow.constraint.place(Z0)
    points, energies = [Z], [flow.energy(Z)]
    times = [torch.zeros_like(energies[0])]
    for count in range(1, steps + 1):
        h = step_for(step, flow, Z, method)
        require_step(h, Z)
        Z = method.advance(flow, Z, h)
        energy = flow.energy(Z) if is_finite(Z) else None
        if energy is None or not is_finite(energy):
            raise Diverged(
                f"integrate: {'Z' if energy is None else 'ℓ'} stopped being finite at step {count} of {steps} with "
                f"{type(method).__name__} and step {_shown(h)}; ℓ went {_shown(energies[0])} → {_shown(energies[-1])} "
                "before that. Try a smaller step, safe_step or LineSearch; the path so far is in this error's .path",
                Path(torch.stack(points), torch.stack(energies), torch.stack(times)),
            )
        points.append(Z)
        energies.append(energy)
        times.append(times[-1] + elapsed(h, Z))
    return Path(torch.stack(points), torch.stack(energies), torch.stack(times))


def step_for(
    step: StepSize | Callable[[GradientFlow, Tensor], Tensor], flow: GradientFlow, Z: Features, method: Method
) -> StepSize:
    """h at Z: what a rule gives, a line search searching along the method's own step; or the number itself."""
    if isinstance(step, LineSearch):
        return step(flow, Z, method.advance)
    return step(flow, Z) if callable(step) else step


def require_step(h: StepSize, Z: Features) -> None:
    """Raise unless a step is a positive number, or a tensor of numbers not negative that broadcasts to Z."""
    if not isinstance(h, Tensor):
        if not is_number(h):
            raise XentflowError(f"step: expected a positive finite number or a tensor of such, got {h!r}")
        return
    require_alike("step", h, "Z", Z)
    require_finite("step", h)
    if not holds(h >= 0):
        raise XentflowError(f"step: expected no negative step, got {_shown(h)}")
    trailing = Z.shape[Z.ndim - h.ndim :] if h.ndim <= Z.ndim else ()
    if len(trailing) != h.ndim or any(came not in (1, n) for came, n in zip(h.shape, trailing, strict=True)):
        raise XentflowError(
            f"step: expected a shape that broadcasts to Z {tuple(Z.shape)}, one step a sample being "
            f"{(*Z.shape[:-2], 1, 1)}, got {tuple(h.shape)}"
        )


def elapsed(h: StepSize, Z: Features) -> Float[Tensor, "*batch"]:
    """Time gone by in each sample; where features or tokens have steps of their own, their mean."""
    if not isinstance(h, Tensor):
        return torch.full(Z.shape[:-2], h, dtype=Z.dtype, device=Z.device)
    return h.detach().expand(Z.shape).mean((-2, -1)) if h.ndim else h.detach().expand(Z.shape[:-2])


def _shown(value: StepSize) -> str:
    if not isinstance(value, Tensor):
        return f"{value:g}"
    low, high = float(value.min()), float(value.max())
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
