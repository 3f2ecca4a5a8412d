"""What trained networks do through depth: energies layer by layer, and how far each layer is from descent.

Two energies are asked about. Each half of a derived transformer has *its own*, ℓ(·, C) at the C of its oracle, which
its step descends by construction (for ``roles="own"``, as a game). The *read-out's* energy belongs to any network: at
features Z it is the cross-entropy, to the true labels, of what the network would say if Z were its last features. The
true labels serve to measure here; no network sees them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from xentflow.meter import Faithfulness, measure_faithfulness
from xentflow.networks import DerivedTransformer, PaperStack, Transformer, energies
from xentflow.training.tasks import IGNORED, Task

SAMPLES, CONTROLS = 100, 20


def through_depth(network: nn.Module, task: Task) -> dict[str, Any] | None:
    """Figures of every layer on test samples; None for the paper's stack, which ``reproduce`` looks into."""
    if isinstance(network, PaperStack):
        return None
    assert isinstance(network, DerivedTransformer | Transformer)
    network.eval()
    x, y = (part[:SAMPLES] for part in next(task.held_out("test")))
    Z = network.embedding(x).detach()

    def readout_energy(Z: Tensor) -> Tensor:
        logits = network.read(Z)
        losses = cross_entropy(logits.flatten(0, -2), y.flatten(), ignore_index=IGNORED, reduction="none")
        return losses.view(len(Z), -1).sum(-1)

    met = measure_faithfulness(_Through(network), readout_energy, Z, controls=CONTROLS)
    asked = float((y != IGNORED).sum()) / len(y)
    found: dict[str, Any] = {
        "readout": [_figures(layer, asked) for layer in met.layers],
        "readout_energy_at_start": float(readout_energy(Z).detach().mean()) / asked,
    }
    if isinstance(network, DerivedTransformer) and network.derivation.has_energies:
        found["own_energy"] = energies(network, x).tolist()
        found["own_cosine"] = _own(network, Z)
    network.train()
    return found


def _figures(met: Faithfulness, asked: float) -> dict[str, float]:
    return {
        "cosine": met.cosine,
        "control_deviation": met.control_cosine[1],
        "change_of_energy": float(met.energy_change.detach().mean()) / asked,
        "descending": met.fraction_descending,
    }


@torch.no_grad()
def _own(network: DerivedTransformer, Z: Tensor) -> list[float]:
    """The cosine of each half's step with the velocity of its own flow."""
    cosines = []
    for block in network.stack.sequence():
        Z = block.constraint.place(Z)
        cosines.append(measure_faithfulness(block, block.flow(Z), Z, layers=(), controls=2).cosine)
        Z = block(Z)
    return cosines


class _Through(nn.Module):
    """A network's layers as a map of features."""

    def __init__(self, network: DerivedTransformer | Transformer) -> None:
        super().__init__()
        self.network = network

    def forward(self, Z: Tensor) -> Tensor:
        return self.network.through(Z)
