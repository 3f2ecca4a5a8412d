"""The recipe that every way of fitting the classifier shares: its settings, its split, its start, its result.

A classifier N = Zθᵀ + b is fitted by Adam on the mean cross-entropy of batches of corrupted images, with noise drawn
anew at each load. θ and b start as those of ``torch.nn.Linear``: uniform on ±1/√F.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xentflow.data.idx import LabelledImages
from xentflow.errors import XentflowError
from xentflow.models import Linear
from xentflow.training.noise import STREAMS, Corruption

OnEpoch = Callable[[int, float], None]
"""Called after each epoch with its number from 1 and the mean cross-entropy over it."""


@dataclass(frozen=True)
class ClassifierConfig:
    """How to fit: the paper's settings by default.

    train_fraction: of the images, the rest is for validation; bias: whether b is fitted or stays 0.
    """

    epochs: int = 100
    batch: int = 1024
    learning_rate: float = 1e-3
    train_fraction: float = 0.8
    bias: bool = True
    corruption: Corruption = field(default_factory=Corruption)

    def __post_init__(self) -> None:
        if not 1 <= self.epochs < STREAMS:
            raise XentflowError(f"epochs: expected an integer from 1 to {STREAMS - 1}, got {self.epochs}")
        if self.batch < 1:
            raise XentflowError(f"batch: expected at least 1, got {self.batch}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise XentflowError(f"learning_rate: expected a finite number above 0, got {self.learning_rate}")
        if not 0 < self.train_fraction < 1:
            raise XentflowError(f"train_fraction: expected a number between 0 and 1, got {self.train_fraction}")


@dataclass(frozen=True, eq=False)
class FittedClassifier:
    """θ ``(K, F)`` and b ``(K,)``, with what they came from.

    train_index, validation_index: which images were fitted and which held out; history: the mean training
    cross-entropy of each epoch, taken as it went.
    """

    theta: Tensor
    bias: Tensor
    seed: int
    config: ClassifierConfig
    train_index: Tensor
    validation_index: Tensor
    history: tuple[float, ...]

    @property
    def model(self) -> Linear:
        """The model N = Zθᵀ + b (N = Zθᵀ where no bias was fitted)."""
        return Linear(self.theta, self.bias if self.config.bias else None)


@dataclass(frozen=True, eq=False)
class Start:
    """Everything a seed decides before the first step; ``generator`` goes on to shuffle."""

    theta: Tensor
    bias: Tensor
    train_index: Tensor
    validation_index: Tensor
    generator: torch.Generator


def start(data: LabelledImages, seed: int, config: ClassifierConfig) -> Start:
    """The initial parameters and the random split; the same for every way of fitting."""
    if not 0 <= seed < 2**63:
        raise XentflowError(f"seed: expected an integer from 0 to 2**63 - 1, got {seed}")
    n, pixels = len(data), data.images[0].numel()
    first = int(n * config.train_fraction)
    if not 0 < first < n:
        raise XentflowError(f"data: expected enough images to split by {config.train_fraction}, got {n}")
    generator = torch.Generator().manual_seed(seed)
    bound = 1 / math.sqrt(pixels)
    theta = torch.empty(data.classes, pixels).uniform_(-bound, bound, generator=generator)
    bias = torch.empty(data.classes).uniform_(-bound, bound, generator=generator)
    if not config.bias:
        bias.zero_()
    order = torch.randperm(n, generator=generator)
    return Start(theta, bias, order[:first], order[first:], generator)
