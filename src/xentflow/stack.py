"""A stack of derived blocks: the discrete flow through depth, with θ tied (one block, repeated) or untied.

Tied, a stack is ``depth`` steps of one flow. Untied, layer ℓ descends an energy of its own, θ^(ℓ).
"""

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xentflow.axes import require_type
from xentflow.block import DerivedBlock, trace
from xentflow.errors import XentflowError
from xentflow.models import Features, Functional, Quadratic
from xentflow.objective import Targets
from xentflow.potentials import Mask
from xentflow.trajectory import Trajectory


class Stack(nn.Module):
    """Blocks one after another, and a read-out.

    blocks: one after another, and all of them ``repeats`` times over; readout: any module of the final features, the
    model itself for example, which reads logits through the same θ; checkpointing: recompute each block in the backward
    pass, so that a deep stack keeps one block's intermediate results at a time.
    """

    def __init__(
        self,
        blocks: Sequence[DerivedBlock],
        *,
        repeats: int = 1,
        readout: nn.Module | None = None,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if not blocks or not all(isinstance(block, DerivedBlock) for block in blocks):
            raise XentflowError("blocks: expected at least one DerivedBlock and nothing else; derive() makes them")
        _require_count("repeats", repeats)
        self.blocks = nn.ModuleList(blocks)
        self.repeats = repeats
        self.readout = readout
        self.checkpointing = checkpointing

    @classmethod
    def of(
        cls,
        block: DerivedBlock,
        depth: int,
        *,
        tied: bool = True,
        readout: nn.Module | None = None,
        checkpointing: bool = False,
    ) -> "Stack":
        """``depth`` passes through ``block`` (tied), or through copies of it that train apart (untied)."""
        require_type("block", block, DerivedBlock)
        _require_count("depth", depth)
        blocks = [block] if tied else [block, *(copy.deepcopy(block) for _ in range(depth - 1))]
        repeats = depth if tied else 1
        return cls(blocks, repeats=repeats, readout=readout, checkpointing=checkpointing)

    @property
    def depth(self) -> int:
        """How many steps a pass takes."""
        return len(self.blocks) * self.repeats

    @property
    def uses_labels(self) -> bool:
        """Whether any block may see the true labels of the samples it acts on."""
        return any(block.uses_labels for block in self.sequence())

    def forward(
        self,
        Z: Features,
        targets: Targets | None = None,
        mask: Mask | None = None,
        padding: Tensor | None = None,
        context: Features | None = None,
    ) -> Tensor:
        """The features after all blocks, or the read-out of them; arguments as for a block."""
        for block in self.sequence():
            if self.checkpointing and torch.is_grad_enabled():
                Z = checkpoint(block, Z, targets, mask, padding, context, use_reentrant=False)
            else:
                Z = block(Z, targets, mask, padding, context)
        return Z if self.readout is None else self.readout(Z)

    def trajectory(self, Z: Features, **inputs: Tensor | None) -> Trajectory:
        """Z, ℓ, gradient norm and time at each half-step of every block."""
        return trace(self.sequence(), Z, inputs)

    def extra_repr(self) -> str:
        return f"depth={self.depth}, " + (f"tied, repeats={self.repeats}" if self.repeats > 1 else "untied")

    def sequence(self) -> list[DerivedBlock]:
        return [block for _ in range(self.repeats) for block in self.blocks]  # type: ignore[misc]


@torch.no_grad()
def initialise_(stack: Stack | DerivedBlock, generator: torch.Generator | None = None) -> None:
    """Draw every θ anew, so small that the whole depth is a short flow.

    A block's Jacobian is I − h·(curvature of its energy). Through ``depth`` blocks gradients neither vanish nor explode
    when depth · h · L is at most about 1, since a product of that many factors 1 ± 1/depth stays of order one: a deep
    stack starts as a finer discretisation of one short flow, not as a longer one. For affine models L = c‖θ‖₂². For the
    quadratic model, whose curvature grows with Z, features of unit mean square are supposed and the estimate is
    L ≈ 2‖θ‖₂ + cF‖θ‖₂². Gaussian K×F matrices have ‖θ‖₂ ≈ σ(√K + √F). A ``Functional`` keeps the weights its author
    gave it. With ``CertifiedStep`` the scale drops out, since h = 1/L.
    """
    blocks = stack.sequence() if isinstance(stack, Stack) else [stack]
    done: set[int] = set()
    for block in blocks:
        h = block.step if isinstance(block.step, float | int) else getattr(block.step, "initial", 1.0)
        allowed = 1 / (len(blocks) * h)
        c = block.objective.potential.curvature
        for model in (block.model, block.target_model):
            if isinstance(model, Functional):
                continue
            for name, theta in [] if model is None else model.named_parameters():  # type: ignore[attr-defined]
                if id(theta) in done:
                    continue
                done.add(id(theta))
                rows, width = theta.shape[-2:] if theta.ndim > 1 else (1, theta.shape[-1])
                if name == "bias":
                    theta.zero_()
                    continue
                heads = theta.shape[0] if theta.ndim == 3 else 1
                norm = math.sqrt(allowed / (c * heads))
                if isinstance(model, Quadratic):
                    factor = name in ("phi", "psi")
                    features = rows if factor else width
                    share = allowed / heads
                    # The positive root of c·F·x² + 2x = share.
                    norm = (math.sqrt(1 + c * features * share) - 1) / (c * features)
                    norm = math.sqrt(norm) if factor else norm
                deviation = norm / (math.sqrt(rows) + math.sqrt(width))
                theta.copy_(torch.randn(theta.shape, generator=generator).to(theta) * deviation)


def _require_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise XentflowError(f"{name}: expected a positive whole number, got {value!r}")
