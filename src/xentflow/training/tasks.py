"""Tasks: what a network is shown, and what it is asked.

A task draws a *plan* for many steps at once, from a generator on the CPU, and makes the batch of one step from its row
of the plan. So what a step sees is a function of the seed and its number, wherever it runs; drawing happens once in a
while, and making a batch is tensor operations on the device, with nothing for the host to wait for.

Labels are integers, one for each decision; ``IGNORED`` where none is asked for.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from xentflow.data.idx import LabelledImages
from xentflow.errors import XentflowError
from xentflow.ledger import digest
from xentflow.networks import Inputs

Rows = dict[str, Tensor]
"""A plan: tensors whose first dimension counts steps and whose second samples; or one row of it, samples only."""

Held = Literal["validation", "test"]

IGNORED = -1


class Task(ABC):
    """Batches to train on, and samples held out; ``labels_used`` says where true labels enter."""

    inputs: Inputs
    labels_used: str
    digest: str
    """Of the data: runs on other data go other ways."""

    @abstractmethod
    def steps_per_pass(self, batch: int) -> int:
        """How many steps are planned at once; the network is judged after each such pass."""

    @abstractmethod
    def plan(self, generator: torch.Generator, steps: int, batch: int) -> Rows:
        """What the next steps are made from, on the CPU."""

    @abstractmethod
    def batch(self, row: Rows) -> tuple[Tensor, Tensor]:
        """Inputs and labels of one step, from its row on the task's device."""

    @abstractmethod
    def held_out(self, part: Held) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and labels that no step sees, in chunks."""


class Images(Task):
    """Images cut into square patches; a tenth of the training images is held out for validation.

    train, test: of the same size; patch: side of a patch, which must divide the image; shift: a training image is moved
    by up to so many pixels each way and mirrored every other time; shuffled: training labels permuted, the control in
    which nothing can be learned; seed: of the split and of that permutation.
    """

    MEAN, DEVIATION = 0.2860, 0.3530
    """Of Fashion-MNIST's training pixels."""

    def __init__(
        self,
        train: LabelledImages,
        test: LabelledImages,
        patch: int,
        *,
        shift: int = 2,
        shuffled: bool = False,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        side = train.images.shape[-1]
        if train.images.shape[1:] != test.images.shape[1:] or train.images.shape[1] != side:
            raise XentflowError(
                f"images: expected square ones, alike in both splits, got {tuple(train.images.shape[1:])} and "
                f"{tuple(test.images.shape[1:])}"
            )
        if patch < 1 or side % patch:
            raise XentflowError(f"patch: expected a side that divides {side}, got {patch}")
        if not 0 <= shift < side:
            raise XentflowError(f"shift: expected 0 to {side - 1} pixels, got {shift}")
        self.patch, self.shift, self.side = patch, shift, side
        self.inputs = Inputs((side // patch) ** 2, train.classes, patch=patch**2)
        self.labels_used = "training labels in the loss" + (", shuffled" if shuffled else "") + "; none at inference"
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
        held = max(1, len(train) // 10)
        labels = train.labels
        if shuffled:
            labels = labels[torch.randperm(len(train), generator=torch.Generator().manual_seed(seed + 1))]
        self._images, self._labels = train.images[order[held:]].to(device), labels[order[held:]].to(device)
        self._held = {
            "validation": (train.images[order[:held]].to(device), train.labels[order[:held]].to(device)),
            "test": (test.images.to(device), test.labels.to(device)),
        }
        self._places = torch.arange(side, device=device)
        self.digest = digest(train.images, train.labels, test.images, test.labels)

    def steps_per_pass(self, batch: int) -> int:
        if not 1 <= batch <= len(self._labels):
            raise XentflowError(f"batch: expected 1 to {len(self._labels)} images, got {batch}")
        return len(self._labels) // batch

    def plan(self, generator: torch.Generator, steps: int, batch: int) -> Rows:
        order = torch.randperm(len(self._labels), generator=generator)[: steps * batch]
        moves = torch.randint(-self.shift, self.shift + 1, (steps, batch, 2), generator=generator)
        mirrored = torch.randint(2, (steps, batch), generator=generator)
        return {"index": order.view(steps, batch), "moves": moves, "mirrored": mirrored * (self.shift > 0)}

    def batch(self, row: Rows) -> tuple[Tensor, Tensor]:
        index, (down, right) = row["index"], row["moves"].unbind(-1)
        rows, columns = self._places - down[:, None], self._places - right[:, None]
        columns = torch.where(row["mirrored"][:, None] > 0, self.side - 1 - columns, columns)
        last = self.side - 1
        there = ((rows >= 0) & (rows <= last))[:, :, None] & ((columns >= 0) & (columns <= last))[:, None, :]
        moved = self._images[index[:, None, None], rows.clamp(0, last)[:, :, None], columns.clamp(0, last)[:, None, :]]
        return self._tokens(moved * there), self._labels[index]

    def held_out(self, part: Held) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = self._held[part]
        parts = (images.split(1000), labels.split(1000))  # type: ignore[no-untyped-call]
        for some, true in zip(*parts, strict=True):
            yield self._tokens(some), true

    def _tokens(self, images: Tensor) -> Tensor:
        """Standardised pixels ``(n, S, patch²)``."""
        pixels = (images.float() / 255 - self.MEAN) / self.DEVIATION
        n, cut = self.side // self.patch, self.patch
        return pixels.view(-1, n, cut, n, cut).transpose(2, 3).reshape(-1, n * n, cut * cut)


class Recall(Task):
    """Associative recall: pairs of key and value, then every key again in another order; each must name its value.

    Keys of a sequence differ, and which value goes with which key is drawn anew for each sequence: only looking it up
    helps. Chance is one in ``values``.
    """

    def __init__(self, pairs: int = 8, keys: int = 32, values: int = 32, device: str = "cpu") -> None:
        if not 1 <= pairs <= keys or values < 2:
            raise XentflowError(f"recall: expected 1 to {keys} pairs and at least 2 values, got {pairs} and {values}")
        self.pairs, self.keys, self.values = pairs, keys, values
        self.inputs = Inputs(tokens=3 * pairs, classes=values, vocabulary=keys + values)
        self.labels_used = "generated answers in the loss; none at inference"
        self.digest = "generated"
        self._device = device

    def steps_per_pass(self, batch: int) -> int:
        return 100

    def plan(self, generator: torch.Generator, steps: int, batch: int) -> Rows:
        keys = torch.rand(steps, batch, self.keys, generator=generator).argsort(-1)[..., : self.pairs]
        values = torch.randint(self.values, (steps, batch, self.pairs), generator=generator)
        order = torch.rand(steps, batch, self.pairs, generator=generator).argsort(-1)
        return {"keys": keys, "values": values, "order": order}

    def batch(self, row: Rows) -> tuple[Tensor, Tensor]:
        keys, values, order = row["keys"], row["values"], row["order"]
        shown = torch.stack([keys, self.keys + values], -1).flatten(-2)
        asked, answers = keys.gather(-1, order), values.gather(-1, order)
        return torch.cat([shown, asked], -1), torch.cat([torch.full_like(shown, IGNORED), answers], -1)

    def held_out(self, part: Held) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed({"validation": 2**40, "test": 2**40 + 1}[part])
        plan = {name: rows.to(self._device) for name, rows in self.plan(generator, 4, 500).items()}
        for step in range(4):
            yield self.batch({name: rows[step] for name, rows in plan.items()})


class Text(Task):
    """The next character of a text: its first nine tenths to train on, a twentieth each for validation and test."""

    def __init__(self, text: str, tokens: int = 128, device: str = "cpu") -> None:
        characters = sorted(set(text))
        if len(text) < 40 * (tokens + 1) or len(characters) < 2:
            raise XentflowError(
                f"text: expected at least {40 * (tokens + 1)} characters of more than one kind, got {len(text)} of "
                f"{len(characters)}"
            )
        numbers = {character: number for number, character in enumerate(characters)}
        content = torch.tensor([numbers[character] for character in text])
        first, second = len(content) * 9 // 10, len(content) * 19 // 20
        self.inputs = Inputs(tokens, len(characters), vocabulary=len(characters))
        self.labels_used = "the next character in the loss; none at inference"
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self._text = content[:first].to(device)
        self._held = {"validation": content[first:second].to(device), "test": content[second:].to(device)}
        self._places = torch.arange(tokens + 1, device=device)

    def steps_per_pass(self, batch: int) -> int:
        return 100

    def plan(self, generator: torch.Generator, steps: int, batch: int) -> Rows:
        return {"start": torch.randint(len(self._text) - len(self._places), (steps, batch), generator=generator)}

    def batch(self, row: Rows) -> tuple[Tensor, Tensor]:
        return self._pair(self._text[row["start"][:, None] + self._places])

    def held_out(self, part: Held) -> Iterator[tuple[Tensor, Tensor]]:
        windows = self._held[part].unfold(0, len(self._places), len(self._places) - 1)
        yield from map(self._pair, windows.split(64))  # type: ignore[no-untyped-call]

    @staticmethod
    def _pair(windows: Tensor) -> tuple[Tensor, Tensor]:
        return windows[:, :-1], windows[:, 1:]
