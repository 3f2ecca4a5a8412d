"""The toy task on which the meter shows what it tells apart: each token names the class of the token before it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from xentflow.derive import derive
from xentflow.flow import GradientFlow
from xentflow.integrators import Euler
from xentflow.meter import Faithfulness, measure_faithfulness
from xentflow.models import Linear
from xentflow.objective import CrossEntropy

CLASSES, WIDTH, TOKENS, SAMPLES = 8, 32, 16, 64


@runtime_checkable
class Settings(Protocol):
    """What of the command's configuration matters here."""

    @property
    def training_steps(self) -> int: ...

    @property
    def controls(self) -> int: ...


def measure_toy(settings: Settings, seed: int) -> Iterator[Faithfulness]:
    """Readings for one seed: derived block, doubled energy, transformer layer before and after training."""
    # Torch's own layers draw their first weights from the global generator: it is put back afterwards.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        embedding = nn.Embedding(CLASSES, WIDTH)
        position = nn.Parameter(torch.randn(TOKENS, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        readout = nn.Linear(WIDTH, CLASSES)
        tokens = torch.randint(CLASSES, (SAMPLES, TOKENS))
        targets = tokens.roll(1, dims=-1)

        def reading(name: str, module: nn.Module, scale: float = 1.0) -> Faithfulness:
            with torch.no_grad():
                Z = (embedding(tokens) + position).double()
            theta, bias = readout.weight.detach().double(), readout.bias.detach().double()
            flow = GradientFlow(CrossEntropy("classes"), Linear(theta, bias), targets)
            if name.startswith("derived"):
                module = _Planted(theta, bias, targets, scale)
            measured = measure_faithfulness(module.double(), flow, Z, controls=settings.controls, seed=seed)
            module.float()
            return replace(measured, name=f"{name}, seed {seed}")

        yield reading("derived block, h = 0.1", layer)
        yield reading("derived block, energy doubled", layer, scale=2.0)
        yield reading("transformer layer, untrained", layer)
        _train(settings.training_steps, embedding, position, layer, readout, seed)
        yield reading("transformer layer, trained", layer)


class _Planted(nn.Module):
    """The derived block of the energy measured with, or of a multiple of it."""

    def __init__(self, theta: Tensor, bias: Tensor, targets: Tensor, scale: float) -> None:
        super().__init__()
        self.block = derive(CrossEntropy("classes"), Linear(theta, bias), splitting=Euler(), step=0.1 * scale)
        self.targets = targets

    def forward(self, Z: Tensor) -> Tensor:
        stepped: Tensor = self.block(Z, targets=self.targets)
        return stepped


def _train(
    steps: int, embedding: nn.Embedding, position: nn.Parameter, layer: nn.Module, readout: nn.Module, seed: int
) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    parameters = [*embedding.parameters(), position, *layer.parameters(), *readout.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=3e-3)
    for _ in range(steps):
        tokens = torch.randint(CLASSES, (SAMPLES, TOKENS), generator=generator)
        logits = readout(layer(embedding(tokens) + position))
        loss = cross_entropy(logits.flatten(0, 1), tokens.roll(1, dims=-1).flatten())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
