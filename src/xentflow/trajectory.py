"""The record of features on their way through blocks, half-step by half-step.

Features, times and stage names are kept as the blocks pass them; energies and gradient norms are computed when first
asked for, so that a trace costs little more than the pass itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from xentflow.errors import XentflowError
from xentflow.flow import GradientFlow


@dataclass(frozen=True)
class Point:
    """Features after one stage, and the flow that brought them there."""

    stage: str
    time: Float[Tensor, "*batch"]
    Z: Float[Tensor, "*batch S F"]
    flow: GradientFlow
    ends_block: bool


class Trajectory:
    """Z, ℓ per sample, gradient norm per sample and time at each half-step, the start included.

    ``passes`` holds the features at the start and after each whole block.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = points
        self._versions = _versions(points)

    def __len__(self) -> int:
        return len(self._points)

    @property
    def stages(self) -> list[str]:
        """ "start", then the term or integrator of each stage."""
        return [point.stage for point in self._points]

    @property
    def ends(self) -> list[int]:
        """Which points lie between blocks: the start, and the end of each."""
        return [index for index, point in enumerate(self._points) if point.ends_block]

    @cached_property
    def Z(self) -> Float[Tensor, "points *batch S F"]:
        """The features at every half-step."""
        return torch.stack([point.Z for point in self._points])

    @cached_property
    def times(self) -> Float[Tensor, "points *batch"]:
        """The time at every half-step; after the first of two half-steps, half a step has gone by."""
        return torch.stack([point.time for point in self._points])

    @cached_property
    def passes(self) -> Float[Tensor, "blocks *batch S F"]:
        """The features at the start and after each block."""
        return self.Z[self.ends]

    @cached_property
    def logits(self) -> Float[Tensor, "blocks *batch S K"]:
        """The logits at the start and after each block, of the block that brought the features there."""
        self._require_unchanged()
        return torch.stack([point.flow.logits(point.Z) for point in self._points if point.ends_block])

    @cached_property
    def energy(self) -> Float[Tensor, "points *batch"]:
        """ℓ of each sample at every half-step, for the targets of the block it is in."""
        self._require_unchanged()
        return torch.stack([point.flow.energy(point.Z) for point in self._points])

    @cached_property
    def gradient_norm(self) -> Float[Tensor, "points *batch"]:
        """The norm of the velocity of each sample at every half-step: for a gradient flow, ‖P ∂ℓ‖."""
        self._require_unchanged()
        speeds = [point.flow.velocity(point.Z).square().sum((-2, -1)).sqrt() for point in self._points]
        return torch.stack(speeds)

    def _require_unchanged(self) -> None:
        if self._versions != _versions(self._points):
            raise XentflowError(
                "trajectory: expected the parameters of the trace, got changed ones; "
                "ask for energies and norms before the parameters are updated"
            )


def _versions(points: Sequence[Point]) -> list[tuple[int, int, int]]:
    """What changes when parameters do: an optimiser's step, or other tensors put in their place."""
    models = dict.fromkeys(model for point in points for model in (point.flow.model, point.flow.target_model))
    return [_version(tensor) for model in models for tensor in model.tensors()]


def _version(tensor: Tensor) -> tuple[int, int, int]:
    try:
        return id(tensor), 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()
    except RuntimeError:  # a tensor inside a transform has no storage to point to
        return id(tensor), 0, 0
