"""Small datasets, and statistics with their own standard error."""

import math

import torch
from torch import Tensor

from xentflow.data import LabelledImages

MANY = 4.5
"""Standard errors: exceeded by chance once in 150,000 times; seeds are fixed, so a pass stays a pass."""


def prototypes(n: int = 600, classes: int = 10, side: int = 8, seed: int = 0) -> LabelledImages:
    """Images that are one prototype for each class plus pixel noise: separable, but not at once."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=generator)
    centres = torch.randint(40, 216, (classes, side, side), generator=generator)
    images = centres[labels] + 60 * torch.randn(n, side, side, generator=generator)
    return LabelledImages(images.clamp(0, 255).to(torch.uint8), labels, tuple(str(k) for k in range(classes)))


def correlation(a: Tensor, b: Tensor) -> float:
    """The correlation of two samples in standard errors."""
    a, b = a.double().flatten(), b.double().flatten()
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).mean() / (a.square().mean() * b.square().mean()).sqrt()) * math.sqrt(len(a))


def surprise(count: int, trials: int, probability: float) -> float:
    """How far a binomial count is from its mean, in standard errors."""
    return (count - trials * probability) / math.sqrt(trials * probability * (1 - probability))
