"""Claims as objects that can be tried: a statement, many random instances of it, and a verdict read off the errors.

A claim *holds* when its two sides agree on every instance. It is *corrected* when one and the same constant mends every
instance, and *refuted as printed* when no constant does; either way the right form is tried beside it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor

from xentflow.axes import Axis, dimension
from xentflow.errors import XentflowError

TOLERANCE = 1e-11
"""Relative, in float64. Sums of some hundred terms lose three or four digits of sixteen; a slip loses nearly all."""


class Verdict(StrEnum):
    """What the instances say of a claim."""

    HOLDS = "holds"
    CORRECTED = "corrected"
    REFUTED = "refuted as printed"


class Draw:
    """Random float64 instances from one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Float[Tensor, "..."]:
        """Standard normal entries."""
        return torch.randn(*shape, dtype=torch.float64, generator=self._generator)

    def between(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return int(torch.randint(low, high + 1, (), generator=self._generator))

    def distributions(self, *shape: int, axis: Axis) -> Float[Tensor, "..."]:
        """Entries that are positive and sum to one along the axis."""
        return torch.softmax(self.normal(*shape), dimension(axis))

    def positive_definite(self, size: int) -> Float[Tensor, "F F"]:
        """θ = φφᵀ/F with standard normal φ: symmetric and positive definite, as the paper supposes."""
        phi = self.normal(size, size)
        return phi @ phi.mT / size


@dataclass(frozen=True)
class Comparison:
    """One instance: the side a claim states, what is true, and the right form where the claim fails.

    ``claimed`` may also be how far an inequality is violated, with ``actual`` zero.
    """

    claimed: Tensor
    actual: Tensor
    right: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Claim:
    """A statement that can be tried.

    trial: makes one random instance on one axis; expected: the verdict on each axis where the claim makes sense.
    """

    name: str
    source: str
    trial: Callable[[Draw, Axis], Comparison]
    expected: dict[Axis, Verdict]
    right_form: str = ""


@dataclass(frozen=True)
class Finding:
    """What trying a claim on one axis found. Errors are relative."""

    claim: Claim
    axis: Axis
    instances: int
    median_error: float
    max_error: float
    right_error: float | None
    constant: float | None
    verdict: Verdict

    @property
    def as_expected(self) -> bool:
        """Whether the verdict is the expected one, and the right form is right."""
        mended = self.right_error is None or self.right_error <= TOLERANCE
        return self.verdict is self.claim.expected[self.axis] and mended


def derivative(energy: Callable[[Tensor], Tensor], Z: Tensor) -> Tensor:
    """∂ energy/∂Z by autograd, which knows nothing of the package."""
    Z = Z.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(Z), Z)
    return gradient


def on_both_axes(verdict: Verdict) -> dict[Axis, Verdict]:
    """The same expectation on either axis."""
    return {"sequence": verdict, "classes": verdict}


def try_claims(claims: Sequence[Claim], instances: int, seed: int) -> Iterator[Finding]:
    """Try each claim on ``instances`` random instances an axis."""
    if instances < 2:
        raise XentflowError(f"instances: expected at least 2, got {instances}")
    for claim in claims:
        for axis in claim.expected:
            draw = Draw(seed)
            yield judge(claim, axis, [claim.trial(draw, axis) for _ in range(instances)])


def judge(claim: Claim, axis: Axis, comparisons: Sequence[Comparison]) -> Finding:
    """Read the verdict off the instances."""
    errors = [_relative_error(c.claimed, c.actual) for c in comparisons]
    rights = [_relative_error(c.right, c.actual) for c in comparisons if c.right is not None]
    constant = None
    if max(errors) <= TOLERANCE:
        verdict = Verdict.HOLDS
    else:
        constant = _common_constant(comparisons)
        verdict = Verdict.REFUTED if constant is None else Verdict.CORRECTED
    return Finding(
        claim, axis, len(errors), median(errors), max(errors), max(rights) if rights else None, constant, verdict
    )


def _relative_error(claimed: Tensor, actual: Tensor) -> float:
    if not torch.isfinite(claimed).all():
        return float("inf")
    scale = float(actual.norm())
    return float((claimed - actual).norm()) / (scale if scale > 0 else 1.0)


def _common_constant(comparisons: Sequence[Comparison]) -> float | None:
    """The c with c·claimed = actual on every instance, if there is one."""
    first = comparisons[0]
    square = float(first.claimed.square().sum())
    c = float((first.claimed * first.actual).sum()) / square if square else 0.0
    mended = (_relative_error(c * comparison.claimed, comparison.actual) for comparison in comparisons)
    return c if c and max(mended) <= TOLERANCE else None
