"""The paper's two-stage optimisation: features at fixed θ, then θ at fixed features, and so on.

Stage one moves the features of a batch along the flow, nothing learned: Z ← Z + h(Cθ − pθ), depth times. Stage two
holds them and descends ℓ(Zθᵀ + b, labels) in θ and b. The network that gives C, since there are no labels at inference,
is fitted in stage two as well, to the same labels at the features where the flow starts: −⟨labels, log C⟩.

Layer-wise training (``layer_wise``) differs in one thing: there the features are not held, so the loss reaches every θ,
and every step size, through the passes.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from xentflow.errors import XentflowError
from xentflow.networks import PaperStack


def two_stage(network: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of stage two at the features that stage one leaves; the logits there."""
    if not isinstance(network, PaperStack) or len(network.stack.blocks) > 1:
        raise XentflowError("two-stage: expected the paper's stack with one θ for all layers, which both stages share")
    start = network.features(x)
    with torch.no_grad():
        Z = network.stack(start)
    logits = network.read(Z)
    return cross_entropy(logits, y) + cross_entropy(network.guess(start), y), logits
