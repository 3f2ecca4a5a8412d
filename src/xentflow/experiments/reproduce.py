"""``xentflow reproduce``: the paper's experiment over several seeds, with its controls, and the report of it.

For each seed: fit θ on noisy training images, run passes of the derived block from the clean and from the noisy
validation images, and again for each control. One record for each seed is written as it finishes.
"""

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from xentflow import report
from xentflow.data import LabelledImages, load_fashion_mnist, load_mnist_format
from xentflow.derive import derive
from xentflow.errors import WrongRequest, XentflowError
from xentflow.experiments import paper
from xentflow.experiments.controls import CONTROLS, PAPER, Setting, remember, run_controls, run_neighbours
from xentflow.experiments.passes import largest_gap, measure, one_thread, through_block, through_logits
from xentflow.experiments.sample import Sample, follow, row_of
from xentflow.ledger import Ledger, Part, as_file, settings_of
from xentflow.oracles import Given
from xentflow.records import report_console, require_writable, write_result, write_whole
from xentflow.steps import safe_step
from xentflow.training import ClassifierConfig, FittedClassifier, fit_fast, recipe
from xentflow.training.recipe import OnEpoch

RECORD = 2
"""The kind of record that a seed leaves: one more whenever ``run_seed`` measures or does something else."""

LABELS_USED = (
    "True labels of the validation images, the same that accuracy is measured with, were given to the block as its "
    "targets C at every pass of the rows “true labels” and “certified step”. No other row gave it the true label of an "
    "image it was judged on: “shuffled labels” gave another image's, “nearest neighbours” those of training images. "
    "The classifier was fitted with the labels of the training images."
)


@dataclass(frozen=True)
class ReproduceConfig:
    """What to run.

    Args:
        seeds: how many; each fits a classifier of its own on a split of its own.
        first_seed: the first of them; the others follow.
        quick: one seed only.
        study: instead of the table, try every reading of the paper's protocol.
        study_seeds: how many seeds the study takes.
        passes: through the block.
        sample: number of the held-out image that figure 1 follows; chosen by rule unless given.
        neighbours: how many training images the nearest-neighbour control looks up.
        neighbour_images: how many validation images that control is tried on; the search is slow.
        epochs: of fitting the classifier.
        dataset: "fashion-mnist", checked by its SHA-256, or "files" for any in MNIST's format in data_dir.
        data_dir: folder with the four files, plain or .gz; without it Fashion-MNIST is found or fetched.
    """

    seeds: int = 5
    first_seed: int = 0
    quick: bool = False
    study: bool = False
    study_seeds: int = 1
    passes: int = 5
    sample: int | None = None
    neighbours: int = 5
    neighbour_images: int = 500
    epochs: int = 100
    dataset: Literal["fashion-mnist", "files"] = "fashion-mnist"
    data_dir: str | None = None

    def __post_init__(self) -> None:
        for name in ("seeds", "study_seeds", "passes", "neighbours", "neighbour_images", "epochs"):
            if getattr(self, name) < 1:
                raise XentflowError(f"{name}: expected a positive whole number, got {getattr(self, name)}")
        for name in ("first_seed", "sample"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise XentflowError(f"{name}: expected a whole number, at least 0, got {getattr(self, name)}")
        if self.seed_list[-1] >= 2**63:
            raise XentflowError(f"first_seed: expected seeds below 2**63, got {self.seed_list[-1]} for the last")
        if self.dataset == "files" and self.data_dir is None:
            raise XentflowError("data_dir: expected a folder with dataset=files, got none")
        if self.study and self.dataset != "fashion-mnist":
            raise XentflowError(f"study: expected Fashion-MNIST, which the paper's cells are of, got {self.dataset}")
        # Refuses what cannot be fitted.
        _ = self.fitting

    @property
    def seed_list(self) -> list[int]:
        """The seeds of the table."""
        return [self.first_seed + offset for offset in range(1 if self.quick else self.seeds)]

    @property
    def fitting(self) -> ClassifierConfig:
        """How the classifier is fitted."""
        return ClassifierConfig(epochs=self.epochs)


def run(config: ReproduceConfig, output: Path) -> int:
    """The command: everything goes to ``output``; what was finished there before is not done again."""
    require_writable(output)
    console = report_console()
    began = time.perf_counter()
    if config.study:
        from xentflow.experiments import study

        return study.run(config, output, load(config), console)
    reproduce(config, output, load(config), console)
    written = report.write(output)
    report.show(output, console)
    seconds = time.perf_counter() - began
    console.print(f"Done in {seconds:.0f} s. Written to {output}:", soft_wrap=True, highlight=False)
    for path in written:
        console.print(f"  {path}", soft_wrap=True, highlight=False)
    return 0


def load(config: ReproduceConfig) -> LabelledImages:
    """The 60,000 training images, of which each seed holds out a fifth."""
    if config.dataset == "files":
        assert config.data_dir is not None
        return load_mnist_format(config.data_dir)
    return load_fashion_mnist(data_dir=config.data_dir)


def reproduce(config: ReproduceConfig, output: Path, data: LabelledImages, console: Console) -> None:
    """Run or resume every seed, then write ``result.json`` and ``weights.safetensors`` from their records."""
    _require_possible(config, data)
    ledger = Ledger(output / "seeds", lambda message: console.print(message, soft_wrap=True, highlight=False))
    ledger.clear_leftovers()
    common = settings_of(
        data,
        record=RECORD,
        passes=config.passes,
        neighbours=config.neighbours,
        neighbour_images=config.neighbour_images,
        fitting=asdict(config.fitting),
    )
    parts = []
    with _progress(console, len(config.seed_list), config.epochs) as (finished, on_epoch):
        for seed in config.seed_list:
            settings = {**common, "seed": seed}
            if seed == config.first_seed:
                settings["sample"] = config.sample if config.sample is not None else "chosen by rule"
            part = ledger.get(f"seed-{seed}", settings)
            state = "taken from an earlier run" if part is not None else "done"
            if part is None:
                part = ledger.put(f"seed-{seed}", settings, *run_seed(config, data, seed, on_epoch))
            finished(f"seed {seed} {state}")
            parts.append(part)
    _write(config, output, data, parts)


def _require_possible(config: ReproduceConfig, data: LabelledImages) -> None:
    """Refuse, before anything is fitted, what this data cannot give."""
    begin = recipe.start(data, config.first_seed, config.fitting)
    if config.neighbours > len(begin.train_index):
        raise WrongRequest(
            f"neighbours: expected at most the {len(begin.train_index)} training images, got {config.neighbours}"
        )
    if config.sample is not None:
        row_of(config.sample, begin.validation_index)


def run_seed(config: ReproduceConfig, data: LabelledImages, seed: int, on_epoch: OnEpoch | None = None) -> Part:
    """One classifier, its passes and its controls: tensors to keep, and figures."""
    fitted = fit_fast(data, seed, config.fitting, on_epoch)
    with one_thread():
        return _judge(config, data, fitted)


def _judge(config: ReproduceConfig, data: LabelledImages, fitted: FittedClassifier) -> Part:
    model, index, seed = fitted.model, fitted.validation_index, fitted.seed
    corruption = fitted.config.corruption
    labels = data.labels[index]
    clean, noisy = corruption.clean(data.images[index]), corruption.apply(data.images, seed, 0, index)
    training = fitted.train_index
    memory = remember(corruption.clean(data.images[training]), data.labels[training], data.classes, config.neighbours)
    tensors = {"theta": fitted.theta, "bias": fitted.bias}
    runs: dict[str, dict[str, Any]] = {name: {} for name in CONTROLS}
    gap, few = 0.0, config.neighbour_images
    neighbours_right: dict[str, float] = {}
    for start, Z in zip(paper.STARTS, (clean, noisy), strict=True):
        setting = Setting(model, Z, labels, config.passes)
        block = derive(setting.objective, model, oracle=Given(), step=1.0)
        points = list(through_block(block, Z, config.passes, labels))
        gap = max(gap, largest_gap(points, through_logits(block, Z, config.passes, labels)))
        found = {PAPER: measure(points, labels, setting.objective)} | run_controls(setting, seed)
        tried = Setting(model, Z[:few], labels[:few], config.passes)
        found["nearest neighbours"], neighbours_right[start] = run_neighbours(tried, memory)
        for name, passes in found.items():
            runs[name][start] = asdict(passes)
    figures = {
        "seed": seed,
        "training_loss": fitted.history[-1],
        "validation_images": len(labels),
        "certified_step": float(safe_step(setting.objective, model)),
        "largest_gap_of_logit_iteration": gap,
        "neighbours_right": neighbours_right,
        "runs": runs,
    }
    if seed == config.first_seed:
        # What the loop ended with: the noisy start.
        sample = follow(setting, points, clean, index, data, config.sample)
        tensors |= {"sample.original": sample.original, "sample.path": sample.path}
        figures["sample"] = _described(sample, data)
    return tensors, figures


def summarise(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over the seeds (None for a single one) of every figure of every run."""
    summary: dict[str, Any] = {}
    for name, starts in records[0]["runs"].items():
        for start, quantities in starts.items():
            for quantity, values in quantities.items():
                if values is None:
                    continue
                columns = list(zip(*(record["runs"][name][start][quantity] for record in records), strict=True))
                summary.setdefault(name, {}).setdefault(start, {})[quantity] = {
                    "mean": [statistics.fmean(column) for column in columns],
                    "sd": [statistics.stdev(column) for column in columns] if len(records) > 1 else None,
                }
    return summary


def against_paper(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> dict[str, Any]:
    """How far the mean and each seed are from the twelve cells."""
    mean = {start: summary[PAPER][start]["accuracy"]["mean"] for start in paper.STARTS}
    each = [{start: record["runs"][PAPER][start]["accuracy"] for start in paper.STARTS} for record in records]
    return {
        "table_1": paper.TABLE_1,
        "differences": paper.differences(mean),
        "rmse_of_mean": paper.rmse(mean),
        "largest_difference_of_mean": paper.largest_difference(mean),
        "rmse_of_each_seed": [paper.rmse(rows) for rows in each],
    }


def _write(config: ReproduceConfig, output: Path, data: LabelledImages, parts: Sequence[Part]) -> None:
    records = [json.loads(json.dumps(figures)) for _, figures in parts]
    sample = records[0].pop("sample")
    summary = summarise(records)
    height, width = data.images.shape[1:]
    figures = {
        "seeds": config.seed_list,
        "class_names": data.class_names,
        "image_shape": [height, width],
        "controls": {name: asdict(control) for name, control in CONTROLS.items()},
        "paper_row": PAPER,
        "neighbours_tried_on": min(config.neighbour_images, records[0]["validation_images"]),
        "paper": against_paper(records, summary) if config.dataset == "fashion-mnist" else None,
        "summary": summary,
        "sample": sample,
        "per_seed": records,
    }
    tensors = {}
    for seed, (of_seed, _) in zip(config.seed_list, parts, strict=True):
        for key, tensor in of_seed.items():
            tensors[key if key.startswith("sample.") else f"seed-{seed}.{key}"] = tensor
    write_whole(output / "weights.safetensors", as_file(tensors, {"seeds": config.seed_list}))
    write_result(output, "reproduce", asdict(config), figures, LABELS_USED)


def _described(sample: Sample, data: LabelledImages) -> dict[str, Any]:
    probability, predicted = sample.probabilities.max(-1)
    return {
        "image": sample.image,
        "rule": sample.rule,
        "label": data.class_names[sample.label],
        "predicted": [data.class_names[int(k)] for k in predicted],
        "probability": [float(p) for p in probability],
    }


@contextmanager
def _progress(console: Console, seeds: int, epochs: int) -> Iterator[tuple[Any, OnEpoch]]:
    """A bar on a terminal, a line for each seed elsewhere."""
    began = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{seeds} seeds" if seeds > 1 else "1 seed", total=seeds * epochs, state="starting")
        count = 0

        def on_epoch(epoch: int, loss: float) -> None:
            progress.update(task, completed=count * epochs + epoch, state=f"epoch {epoch}, loss {loss:.3f}")

        def finished(message: str) -> None:
            nonlocal count
            count += 1
            progress.update(task, completed=count * epochs)
            console.print(f"{message} ({time.perf_counter() - began:.1f} s)", highlight=False)

        yield finished, on_epoch
