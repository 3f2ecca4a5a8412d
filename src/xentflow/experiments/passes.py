"""Passes through a derived block, in two ways that agree: through the block itself, and through its logits alone.

One Euler step of the linear block is Z ← Z + h(C − p)θ, with p = ∇Ω(N) and N = Zθᵀ + b. Multiplied by θᵀ,

    N ← N + h (C − p) θθᵀ,

so that K numbers for each image suffice where the pixels are not asked for. Images are tokens: Z is ``(S, F)``.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from xentflow.block import DerivedBlock
from xentflow.errors import XentflowError
from xentflow.models import Linear
from xentflow.objective import CrossEntropy, Objective
from xentflow.oracles import Given, SelfPrediction, Uniform
from xentflow.steps import CertifiedStep, safe_step

Point = tuple[Tensor, Tensor]
"""Logits N ``(S, K)`` before a pass, or after the last, and the targets C that the next pass would follow."""


@dataclass(frozen=True)
class Passes:
    """Means over the images, before the first pass and after each.

    accuracy: how often the largest logit is the true label's; agreement: how often it is that of the largest entry of
    C (None where C names no class from outside); energy: ℓ to C, the one the block descends; energy_to_labels: ℓ to
    the true labels.
    """

    accuracy: tuple[float, ...]
    agreement: tuple[float, ...] | None
    energy: tuple[float, ...]
    energy_to_labels: tuple[float, ...]


@torch.no_grad()
def through_block(block: DerivedBlock, Z: Tensor, passes: int, targets: Tensor | None = None) -> Iterator[Point]:
    """Each point of ``passes`` passes of Z ``(S, F)`` through the whole block."""
    for number in range(passes + 1):
        flow = block.flow(Z, targets)
        yield block.model.logits(Z), flow.targets(Z)
        if number < passes:
            Z = block(Z, targets=targets)


@torch.no_grad()
def through_logits(block: DerivedBlock, Z: Tensor, passes: int, targets: Tensor | None = None) -> Iterator[Point]:
    """The same points, by iterating N with θθᵀ; for linear blocks whose targets do not depend on the pixels."""
    model, potential = block.model, block.objective.potential
    if not isinstance(model, Linear) or model.heads is not None:
        raise XentflowError(f"through_logits: expected a Linear model without heads, got {type(model).__name__}")
    if not isinstance(block.oracle, Given | SelfPrediction | Uniform):
        raise XentflowError(
            f"through_logits: expected Given, SelfPrediction or Uniform, got {type(block.oracle).__name__}, "
            "whose targets depend on the features, which are not followed here"
        )
    N, gram = model.logits(Z), model.theta @ model.theta.mT
    step = step_size(block)
    for number in range(passes + 1):
        C = block.oracle(Z, N, block.objective.axis, None, targets)
        if isinstance(block.oracle, Given):
            C = block.objective.targets(C, N)
        yield N, C
        if number < passes:
            N = N + step * (C - potential.gradient(N)) @ gram


def step_size(block: DerivedBlock) -> float:
    """h of a block of a linear model: its number, or the certified one."""
    if isinstance(block.step, CertifiedStep):
        return float(safe_step(block.objective, block.model))
    if isinstance(block.step, float | int):
        return float(block.step)
    raise XentflowError(f"step: expected a number or CertifiedStep, got {block.step!r}")


def measure(points: Iterable[Point], labels: Tensor, objective: Objective, named: bool = False) -> Passes:
    """Accuracy, agreement and energies of each point.

    labels: the true ones ``(S,)``, to measure by; named: whether C names a class for each image from outside, so that
    agreement with it says something.
    """
    potential = CrossEntropy("classes").potential
    accuracy, agreement, energy, energy_to_labels = [], [], [], []
    with torch.no_grad():
        for N, C in points:
            predicted = N.argmax(-1)
            truth = torch.nn.functional.one_hot(labels, N.shape[-1]).to(N.dtype)
            accuracy.append(_mean(predicted == labels))
            agreement.append(_mean(predicted == C.argmax(-1)))
            energy.append(_mean(objective.potential.tilted(N, C)))
            energy_to_labels.append(_mean(potential.tilted(N, truth)))
    return Passes(tuple(accuracy), tuple(agreement) if named else None, tuple(energy), tuple(energy_to_labels))


def largest_gap(first: Iterable[Point], second: Iterable[Point]) -> float:
    """The largest difference of any logit at any point, relative to the largest logit."""
    gap, size = 0.0, 0.0
    for (N, _), (other, _) in zip(first, second, strict=True):
        gap, size = max(gap, float((N - other).abs().max())), max(size, float(N.abs().max()))
    return gap / size


@contextmanager
def one_thread() -> Iterator[None]:
    """Logits are small: a second thread costs more than it brings. And sums are the same bits on every machine load."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
