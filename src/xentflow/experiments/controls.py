"""The controls: the same block, passes and measure as the paper's row, with one thing changed at a time.

The paper's row gives the true labels of the very images it is judged on. Each control says what such a table shows
when the block is given something else.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from xentflow.derive import derive
from xentflow.experiments.passes import Passes, measure, through_logits
from xentflow.models import Linear
from xentflow.objective import CrossEntropy, Objective
from xentflow.oracles import Given, NearestNeighbours, Oracle, SelfPrediction, Uniform
from xentflow.steps import CertifiedStep


@dataclass(frozen=True)
class Control:
    """What is given to the block as C.

    uses_labels: whether the true labels of the images judged are given to the block; named: whether C names a class
    for each image from outside.
    """

    title: str
    sees: str
    uses_labels: bool
    named: bool = False


PAPER = "true labels"

CONTROLS: Mapping[str, Control] = {
    PAPER: Control("True labels (the paper)", "the true label of each image, at every pass", True),
    "shuffled labels": Control("Shuffled labels", "the label of another image, drawn at random, at every pass",
                               False, named=True),
    "own prediction": Control("Own prediction", "the class the classifier prefers before each pass", False),
    "uniform": Control("Uniform", "the same weight on every class", False),
    "nearest neighbours": Control("Nearest neighbours",
                                  "the mean label of the nearest training images to the image before the first pass",
                                  False, named=True),
    "certified step": Control("Certified step", "the true labels, with the step that is certified to lower ℓ", True),
}  # fmt: skip
"""The paper's row and its controls, in the order of the tables."""


@dataclass(frozen=True)
class Setting:
    """What every control of one seed and start shares.

    model: θ and b; Z: the features before the first pass ``(S, F)``; labels: the true ones ``(S,)``.
    """

    model: Linear
    Z: Tensor
    labels: Tensor
    passes: int

    @property
    def objective(self) -> Objective:
        """Cross-entropy with a softmax over the classes of each image."""
        return CrossEntropy("classes")

    def run(
        self, oracle: Oracle, targets: Tensor | None = None, step: float | CertifiedStep = 1.0, named: bool = False
    ) -> Passes:
        """Passes with targets from ``oracle``."""
        block = derive(self.objective, self.model, oracle=oracle, step=step)
        points = through_logits(block, self.Z, self.passes, targets)
        return measure(points, self.labels, self.objective, named)


def shuffled(labels: Tensor, seed: int) -> Tensor:
    """The same labels, handed out to other images at random: the classes are as frequent, and mostly wrong."""
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]


def run_controls(setting: Setting, seed: int) -> dict[str, Passes]:
    """Every control that takes nothing but the images and labels at hand."""
    return {
        "shuffled labels": setting.run(Given(), shuffled(setting.labels, seed), named=True),
        "own prediction": setting.run(SelfPrediction(hard=True)),
        "uniform": setting.run(Uniform()),
        "certified step": setting.run(Given(), setting.labels, step=CertifiedStep()),
    }


def run_neighbours(setting: Setting, memory: NearestNeighbours) -> tuple[Passes, float]:
    """The control that looks up labels, and how often the class it looks up is the true one.

    Asked once, for the images as they come in, since a search through the training set costs more than everything
    else; held for all passes, as the paper holds C.
    """
    with torch.no_grad():
        C = memory(setting.Z, setting.model.logits(setting.Z), "classes")
    right = float((C.argmax(-1) == setting.labels).double().mean())
    return setting.run(Given(), C, named=True), right


def remember(images: Tensor, labels: Tensor, classes: int, k: int) -> NearestNeighbours:
    """The training images ``(M, F)`` with their labels, to look up the ``k`` nearest in."""
    return NearestNeighbours(k).remember(images, torch.nn.functional.one_hot(labels, classes).to(images.dtype))
