"""``xentflow reproduce --study``: every reading of the paper's protocol, and how far each is from the twelve cells.

The paper leaves unsaid how images are normalised, whether noise comes before that or after, whether noisy pixels are
clamped, whether the classifier has a bias and the block knows it, along which axis the softmax runs and over what, how
long a step is, and whether logits are scaled as ``scaled_dot_product_attention`` does unless told otherwise. Readings
that differ only in the passes share a fitted classifier.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from xentflow.data import LabelledImages
from xentflow.experiments import paper
from xentflow.experiments.passes import one_thread
from xentflow.ledger import Ledger, settings_of
from xentflow.potentials import LogSumExp
from xentflow.records import write_result, write_whole
from xentflow.training import ClassifierConfig, Corruption, FittedClassifier, fit_fast

if TYPE_CHECKING:
    from xentflow.experiments.reproduce import ReproduceConfig

Over = Literal["classes", "whole set", "batch"]
BATCH = 1024


@dataclass(frozen=True)
class Fit:
    """A reading of how the classifier was fitted."""

    normalisation: Literal["half", "unit", "standard"] = "half"
    when: Literal["before", "after"] = "before"
    clamp: bool = True
    bias: bool = True

    @property
    def name(self) -> str:
        """Short enough for a file."""
        words = (self.normalisation, self.when, "clamp" if self.clamp else "free", "bias" if self.bias else "plain")
        return "-".join(words)


@dataclass(frozen=True)
class Pass:
    """A reading of the passes.

    over: what a softmax runs over: the classes of an image, or the images, all or a batch of 1024; shared: over images
    only, each column of C divided by its sum, as an objective on that axis needs it, where the paper's labels sum to
    the number of images of a class; scaled: logits of the attention divided by √F; with_bias: whether the attention
    knows the classifier's bias.
    """

    over: Over = "classes"
    shared: bool = False
    step: float = 1.0
    scaled: bool = False
    with_bias: bool = True


FITS = tuple(
    Fit(normalisation, when, clamp, bias)  # type: ignore[arg-type]  # product loses the literals
    for normalisation in ("half", "unit", "standard")
    # Pixels in [0, 1] are x itself: before and after are the same.
    for when in (("before",) if normalisation == "unit" else ("before", "after"))
    for clamp, bias in product((True, False), repeat=2)
)
"""Every reading of how the classifier was fitted."""

OURS = (Fit(), Pass())
"""The reading that the table is made with."""


def passes_of(fit: Fit) -> Iterator[Pass]:
    """Every reading of the passes for a classifier."""
    overs: tuple[tuple[Over, bool], ...] = (
        ("classes", False), ("whole set", False), ("whole set", True), ("batch", False), ("batch", True),
    )  # fmt: skip
    for (over, shared), step, scaled, with_bias in product(overs, (1.0, 0.5), (False, True), (True, False)):
        if with_bias <= fit.bias:
            yield Pass(over, shared, step, scaled, with_bias)


def accuracies(reading: Pass, fitted: FittedClassifier, N: Tensor, labels: Tensor, passes: int) -> list[float]:
    """Accuracy before the first pass and after each, iterating N = Zθᵀ ``(S, K)``: N ← N + h (C − p) θθᵀ.

    The classifier that is asked always knows its bias. Written out here, and not by a block, since labels as they are
    do not sum to one over images: such a reading descends no ℓ.
    """
    batches = [(N, labels)]
    if reading.over == "batch":
        batches = list(zip(torch.split(N, BATCH), torch.split(labels, BATCH), strict=True))
    theta, bias = fitted.theta, fitted.bias
    right = torch.zeros(passes + 1, dtype=torch.int64)
    for some, true in batches:
        right += _right(reading, some, theta, bias, true, passes)
    return [int(count) / len(labels) for count in right]


def _right(reading: Pass, N: Tensor, theta: Tensor, bias: Tensor, labels: Tensor, passes: int) -> Tensor:
    axis: Literal["classes", "sequence"] = "classes" if reading.over == "classes" else "sequence"
    potential = LogSumExp(axis, theta.shape[-1] ** 0.5 if reading.scaled else 1.0)
    C = torch.nn.functional.one_hot(labels, len(theta)).to(N.dtype)
    if reading.shared:
        C = C / C.sum(0).clamp_min(1)
    seen = bias if reading.with_bias else torch.zeros_like(bias)
    right = [(N + bias).argmax(-1) == labels]
    gram = theta @ theta.mT
    for _ in range(passes):
        N = N + reading.step * (C - potential.gradient(N + seen)) @ gram
        right.append((N + bias).argmax(-1) == labels)
    return torch.stack([one.sum() for one in right])


def run(config: "ReproduceConfig", output: Path, data: LabelledImages, console: Console) -> int:
    """Try every reading; ``result.json`` and ``study.md`` in ``output / "study"``."""
    began = time.perf_counter()
    folder = output / "study"
    ledger = Ledger(folder / "fits", lambda message: console.print(message, soft_wrap=True, highlight=False))
    ledger.clear_leftovers()
    seeds = [config.first_seed + offset for offset in range(config.study_seeds)]
    work = list(product(seeds, FITS))
    common = settings_of(data, passes=config.passes, epochs=config.epochs)
    rows: dict[tuple[Fit, Pass], list[dict[str, Any]]] = {}
    terminal = console.is_terminal
    for number, (seed, fit) in enumerate(
        track(work, f"{len(work)} classifiers", console=console, transient=True, disable=not terminal), start=1
    ):
        settings = {**common, "seed": seed, "fit": asdict(fit)}
        name = f"seed-{seed}-{fit.name}"
        part = ledger.get(name, settings) or ledger.put(name, settings, *_try(config, data, seed, fit))
        for row in part[1]["readings"]:
            rows.setdefault((fit, Pass(**row["pass"])), []).append(row)
        if not terminal:
            console.print(f"{number}/{len(work)} {name} ({time.perf_counter() - began:.0f} s)", highlight=False)
    ranked = sorted(
        (_ranked(fit, reading, found) for (fit, reading), found in rows.items()), key=lambda row: row["rmse"]
    )
    figures = {"seeds": seeds, "readings": ranked}
    labels = "true labels of the validation images were given to the block in every reading"
    path = write_result(folder, "reproduce --study", asdict(config), figures, labels)
    tables = [_best(ranked, seeds), _one_change(ranked, seeds)]
    write_whole(folder / "study.md", _markdown(tables).encode())
    for title, heading, cells in tables:
        shown = Table(*heading, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for line in cells:
            shown.add_row(*line)
        console.print(shown)
        console.print()
    console.print(f"Written: {path} and {folder / 'study.md'}", soft_wrap=True, highlight=False)
    return 0


def _try(
    config: "ReproduceConfig", data: LabelledImages, seed: int, fit: Fit
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    corruption = Corruption(normalisation=fit.normalisation, when=fit.when, clamp=fit.clamp)
    fitted = fit_fast(data, seed, ClassifierConfig(epochs=config.epochs, bias=fit.bias, corruption=corruption))
    index = fitted.validation_index
    labels = data.labels[index]
    starts = {"clean": corruption.clean(data.images[index]), "noisy": corruption.apply(data.images, seed, 0, index)}
    readings = []
    with one_thread():
        logits = {start: Z @ fitted.theta.mT for start, Z in starts.items()}
        for reading in passes_of(fit):
            cells = {start: accuracies(reading, fitted, N, labels, config.passes) for start, N in logits.items()}
            readings.append({"pass": asdict(reading), "cells": cells, "rmse": paper.rmse(cells)})
    return {"theta": fitted.theta, "bias": fitted.bias}, {"readings": readings}


def _ranked(fit: Fit, reading: Pass, found: list[dict[str, Any]]) -> dict[str, Any]:
    cells = {
        start: [statistics.fmean(column) for column in zip(*(row["cells"][start] for row in found), strict=True)]
        for start in paper.STARTS
    }
    return {
        "fit": asdict(fit),
        "pass": asdict(reading),
        "cells": cells,
        "rmse": paper.rmse(cells),
        "furthest": paper.largest_difference(cells),
        "rmse_of_each_seed": [row["rmse"] for row in found],
    }


Shown = tuple[str, Sequence[str], Sequence[tuple[str, ...]]]


def _best(ranked: list[dict[str, Any]], seeds: list[int], count: int = 12) -> Shown:
    rows = [(str(place), _words(row), *_numbers(row)) for place, row in enumerate(ranked[:count], start=1)]
    heading = ("place", "reading", "RMSE", "single seeds", "furthest cell")
    return f"The {count} of {len(ranked)} readings nearest to the twelve cells, {_of(seeds)}", heading, rows


def _one_change(ranked: list[dict[str, Any]], seeds: list[int]) -> Shown:
    ours = {**asdict(OURS[0]), **asdict(OURS[1])}
    rows = []
    for row in ranked:
        values = {**row["fit"], **row["pass"]}
        changed = {key: value for key, value in values.items() if value != ours[key]}
        # A classifier without a bias has none for the attention to know.
        if changed.get("bias") is False:
            changed.pop("with_bias", None)
        if "over" in changed:
            changed.pop("shared", None)
        if len(changed) <= 1:
            noisy = " ".join(f"{cell:.3f}" for cell in row["cells"]["noisy"])
            rows.append((_change(values, changed), *_numbers(row), noisy))
    heading = ("reading", "RMSE", "single seeds", "furthest cell", "noisy row")
    return f"Ours, and every single change of it, {_of(seeds)}", heading, rows


def _change(values: dict[str, Any], changed: dict[str, Any]) -> str:
    if not changed:
        return "ours"
    ((key, value),) = changed.items()
    targets = "columns of C divided by their sums" if values["shared"] else "C as the labels are"
    texts = {
        "normalisation": {"unit": "pixels in [0, 1]", "standard": "pixels standardised"}.get(str(value), ""),
        "when": "noise after normalisation",
        "clamp": "no clamp",
        "bias": "classifier without bias",
        "with_bias": "attention without the bias",
        "over": f"softmax over the {'images of a batch' if value == 'batch' else 'whole validation set'}, {targets}",
        "step": f"step {value}",
        "scaled": "logits divided by √F",
    }
    return texts[key]


def _words(row: dict[str, Any]) -> str:
    fit, reading = row["fit"], row["pass"]
    when = "" if fit["normalisation"] == "unit" else f" {fit['when']} {fit['normalisation']}"
    words = [
        f"noise{when}" + (" (unit)" if not when else ""),
        "clamp" if fit["clamp"] else "no clamp",
        ("bias" if reading["with_bias"] else "bias, not in attention") if fit["bias"] else "no bias",
        f"over {reading['over']}" + (", C shared" if reading["shared"] else ""),
        f"step {reading['step']:g}",
    ]
    return ", ".join([*words, "÷√F"] if reading["scaled"] else words)


def _numbers(row: dict[str, Any]) -> tuple[str, str, str]:
    each = row["rmse_of_each_seed"]
    return f"{row['rmse']:.4f}", f"{min(each):.4f}–{max(each):.4f}", f"{row['furthest']:.4f}"


def _of(seeds: list[int]) -> str:
    return f"mean of seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"


def _markdown(tables: list[Shown]) -> str:
    parts = []
    for title, heading, rows in tables:
        lines = ["| " + " | ".join(cells) + " |" for cells in (heading, *rows)]
        parts.append(f"## {title}\n\n" + "\n".join([lines[0], "|---" * len(heading) + "|", *lines[1:]]))
    return "# The paper's protocol, read in every way\n\n" + "\n\n".join(parts) + "\n"
