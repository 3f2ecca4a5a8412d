"""The derived block: one step of a splitting of the flow of an objective, and nothing else.

Z ↦ splitting(flow of ℓ(·, C), h)(Z), with C from the oracle at the start of the step. No normalisation, projection,
dropout or residual is added to what the derivation gives: the residual connection *is* the Euler step.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Literal

import torch
from torch import Tensor, nn

from xentflow.axes import require_features, require_mask
from xentflow.constraints import Constraint, Whitened
from xentflow.derivation import Parts, write_derivation
from xentflow.errors import XentflowError
from xentflow.flow import GradientFlow
from xentflow.integrators import Method, StepSize, elapsed, require_step, step_for
from xentflow.kernels import is_plain
from xentflow.masks import Masking
from xentflow.models import Bilinear, Features, Model, Quadratic
from xentflow.objective import Objective, Targets
from xentflow.oracles import Given, Oracle
from xentflow.potentials import Mask
from xentflow.splitting import Splitting
from xentflow.steps import LearnedStep
from xentflow.trajectory import Point, Trajectory

StepRule = float | Callable[[GradientFlow, Tensor], Tensor]
"""A number, or what gives one for a flow at Z: LearnedStep, CertifiedStep, LineSearch."""


class DerivedBlock(nn.Module):
    """One step of ``splitting`` along the flow of ``objective`` over ``model``; made by ``derive``, which checks it.

    model holds θ of the attention term and, unless ``target_model`` has its own, of the target term.
    """

    def __init__(
        self,
        objective: Objective,
        model: Model,
        oracle: Oracle,
        splitting: Method,
        step: StepRule,
        constraint: Constraint,
        target_model: Model | None = None,
        causal: bool = False,
        printed_form: bool = False,
    ) -> None:
        super().__init__()
        self.objective = objective
        self.model = model
        self.target_model = target_model
        self.oracle = oracle
        self.splitting = splitting
        self.step = step
        self.constraint = constraint
        self.causal = causal
        self.printed_form = printed_form

    @property
    def uses_labels(self) -> bool:
        """Whether the true labels of the samples it acts on may enter."""
        return self.oracle.uses_labels

    @property
    def kind(self) -> Literal["gradient flow", "game", "no common energy"]:
        """What a step of it discretises."""
        if not self.model.is_gradient:
            return "game"
        return "gradient flow" if self.target_model is None and not self.printed_form else "no common energy"

    def forward(
        self,
        Z: Features,
        targets: Targets | None = None,
        mask: Mask | None = None,
        padding: Tensor | None = None,
        context: Features | None = None,
    ) -> Features:
        """Z after one step.

        targets: C or labels, for the oracle ``Given``; mask: True where a logit takes part, broadcasting to the logits;
        padding: True for real tokens, ``(*batch, S)``; context: Y, for a bilinear model without one of its own.
        """
        require_features(Z)
        Z = self.constraint.place(Z)
        flow = self.flow(Z, targets, mask, padding, context)
        return self.splitting.advance(flow, Z, self._step(flow, Z))

    def flow(
        self,
        Z: Features,
        targets: Targets | None = None,
        mask: Mask | None = None,
        padding: Tensor | None = None,
        context: Features | None = None,
    ) -> GradientFlow:
        """The flow that a step from Z follows: C is the oracle's at Z, and stays."""
        model, target_model = self._at(self.model, context), self._at(self.target_model, context)
        X = self.constraint.features(Z)
        like = model.logits_like(X)
        masking = self._masking(like, mask, padding)
        axis = self.objective.axis
        # Where logits are many, targets that can be named are not written out.
        named = targets is None and not is_plain(like, "auto")
        C = self.oracle.labels(like, axis, masking) if named else None
        if C is None:
            N = model.logits(X) if self.oracle.reads_logits else like
            dense = None if type(self.oracle) is Given else masking.tensor(like, axis)
            C = self.oracle(X, N, axis, dense, targets)
        if self.oracle.uses_labels:
            # Only these come from outside; what the other oracles give is right by construction.
            C = self.objective.checked(C, like, masking)
        return GradientFlow(
            self.objective,
            model,
            C,
            self.constraint,
            masking,
            self.printed_form,
            target_model,
            self.step.head_weights() if isinstance(self.step, LearnedStep) else None,
            validate=False,
        )

    def trajectory(self, Z: Features, *, steps: int = 1, **inputs: Tensor | None) -> Trajectory:
        """Z, ℓ, gradient norm and time at each half-step of ``steps`` passes; ``inputs`` as for the block itself."""
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise XentflowError(f"steps: expected a positive whole number, got {steps!r}")
        return trace([self] * steps, Z, inputs)

    def derivation(self, form: Literal["text", "latex"] = "text") -> str:
        """Objective, gradient, flow, splitting and the resulting block, written out for these parts."""
        parts = {field.name: getattr(self, field.name) for field in fields(Parts)}
        return write_derivation(Parts(**parts), form)

    def extra_repr(self) -> str:
        parts = [f"objective={self.objective!r}", f"splitting={self.splitting!r}", f"constraint={self.constraint!r}"]
        if not isinstance(self.step, nn.Module):
            parts.append(f"step={self.step!r}")
        parts += [name for name in ("causal", "printed_form") if getattr(self, name)]
        return ",\n".join(parts)

    def stages(self, flow: GradientFlow, Z: Features) -> Iterator[tuple[str, Tensor, Features]]:
        """Each stage of a step from Z: its name, the time gone by in each sample, and Z there."""
        h = self._step(flow, Z)
        whole = elapsed(h, Z)
        if isinstance(self.splitting, Splitting):
            for name, fraction, after in self.splitting.stages(flow, Z, h):
                yield name, fraction * whole, after
        else:
            yield type(self.splitting).__name__, whole, self.splitting.advance(flow, Z, h)

    def _step(self, flow: GradientFlow, Z: Features) -> StepSize:
        h = step_for(self.step, flow, Z, self.splitting)
        require_step(h, Z)
        return h

    def _at(self, model: Model | None, context: Features | None) -> Model:
        if context is None or model is None:
            return model  # type: ignore[return-value]  # None stands for the attention term's own θ
        if not isinstance(model, Bilinear):
            raise XentflowError(f"context: expected none for a {type(model).__name__} model; Bilinear takes one")
        return model.at(context)

    def _masking(self, like: Tensor, mask: Mask | None, padding: Tensor | None) -> Masking:
        if mask is not None:
            require_mask(mask, like)
        real = None if padding is None else self._padding(like, padding)
        columns = real if isinstance(self.model, Quadratic) else None
        return Masking(mask, real, columns, self.causal)

    def _padding(self, like: Tensor, padding: Tensor) -> Tensor:
        heads = self.model.heads is not None
        expected = (*like.shape[: -3 if heads else -2], like.shape[-2])
        if not isinstance(padding, Tensor) or padding.dtype != torch.bool or tuple(padding.shape) != expected:
            came = f"{padding.dtype} {tuple(padding.shape)}" if isinstance(padding, Tensor) else type(padding).__name__
            raise XentflowError(f"padding: expected a boolean tensor {expected}, True for real tokens, got {came}")
        if isinstance(self.constraint, Whitened):
            raise XentflowError("padding: expected none with Whitened features, which padded tokens would be part of")
        return padding.unsqueeze(-2) if heads else padding


def trace(blocks: list[DerivedBlock], Z: Features, inputs: dict[str, Tensor | None]) -> Trajectory:
    """Pass Z through blocks and keep every half-step."""
    require_features(Z)
    points: list[Point] = []
    gone = torch.zeros(Z.shape[:-2], dtype=Z.dtype, device=Z.device)
    for block in blocks:
        Z = block.constraint.place(Z)
        flow = block.flow(Z, **inputs)
        if not points:
            points.append(Point("start", gone, Z, flow, ends_block=True))
        stages = list(block.stages(flow, Z))
        for index, (name, passed, after) in enumerate(stages, start=1):
            points.append(Point(name, gone + passed, after, flow, ends_block=index == len(stages)))
        Z, gone = points[-1].Z, points[-1].time
    return Trajectory(points)
