"""The one image that Figure 1 follows: chosen by a rule, and its path through the block."""

from dataclasses import dataclass

import torch
from torch import Tensor

from xentflow.data.idx import LabelledImages
from xentflow.derive import derive
from xentflow.errors import WrongRequest
from xentflow.experiments.controls import Setting
from xentflow.experiments.passes import Point
from xentflow.oracles import Given


@dataclass(frozen=True, eq=False)
class Sample:
    """An image on its way.

    image: its number in the data; original: X ``(F,)``; path: Z⁽⁰⁾, …, Z⁽ᴸ⁾ ``(L + 1, F)``; probabilities: softmax of
    the logits of X and of each Z ``(L + 2, K)``; rule: how it was chosen, in words.
    """

    image: int
    label: int
    rule: str
    original: Tensor
    path: Tensor
    probabilities: Tensor


def choose(points: list[Point], labels: Tensor, class_names: tuple[str, ...]) -> tuple[int, str]:
    """Which row to follow, and the rule in words.

    As in the paper, a T-shirt/top first taken for a bag and in the end for what it is; else any image first taken for
    something else and in the end for what it is; of several, the one whose true class gains most probability.
    """
    first, last = points[0][0], points[-1][0]
    rise = (last.softmax(-1) - first.softmax(-1)).gather(-1, labels[:, None])[:, 0]
    mended = (first.argmax(-1) != labels) & (last.argmax(-1) == labels)
    rules = [("the clearest correction", mended), ("the largest gain, since nothing was corrected", mended | True)]
    if {"T-shirt/top", "Bag"} <= set(class_names):
        shirt, bag = class_names.index("T-shirt/top"), class_names.index("Bag")
        as_in_paper = mended & (labels == shirt) & (first.argmax(-1) == bag)
        rules.insert(0, ("the clearest correction of a T-shirt/top first taken for a bag", as_in_paper))
    for rule, allowed in rules:
        if allowed.any():
            return int(rise.masked_fill(~allowed, -torch.inf).argmax()), rule
    raise AssertionError("the last rule allows every image")


def row_of(wanted: int, index: Tensor) -> int:
    """Where the image asked for stands among those held out, whose numbers are ``index``."""
    found = (index == wanted).nonzero()
    if not len(found):
        few = ", ".join(str(int(number)) for number in index.sort().values[:3])
        raise WrongRequest(f"sample: expected an image held out of training, such as {few}, got {wanted}")
    return int(found[0, 0])


def follow(
    setting: Setting, points: list[Point], original: Tensor, index: Tensor, data: LabelledImages, wanted: int | None
) -> Sample:
    """The chosen image's path through the whole block.

    setting, points: of the noisy start; original: X of the same images; index: their numbers in the data; wanted: the
    number of the image asked for.
    """
    if wanted is None:
        row, rule = choose(points, setting.labels, data.class_names)
    else:
        row, rule = row_of(wanted, index), "asked for"
    block = derive(setting.objective, setting.model, oracle=Given())
    with torch.no_grad():
        path = block.trajectory(setting.Z[row : row + 1], targets=setting.labels[row : row + 1], steps=setting.passes)
        Z = path.passes[:, 0]
        N = setting.model.logits(torch.cat([original[row : row + 1], Z]))
    return Sample(int(index[row]), int(setting.labels[row]), rule, original[row], Z, N.softmax(-1))
