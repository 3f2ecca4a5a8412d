"""``xentflow train``: fit the θ of a network, without labels in its passes, and judge it on test samples.

Everything a run writes is in ``output``: ``log.jsonl``, one line for each pass; ``checkpoints/``, from which the same
command goes on after an interruption, to the same bits; ``weights.safetensors``; ``result.json``.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from xentflow.data import load_fashion_mnist, load_mnist_format
from xentflow.errors import XentflowError
from xentflow.experiments.depth import through_depth
from xentflow.ledger import as_file
from xentflow.networks import (
    SHAPES,
    Derivation,
    DerivedTransformer,
    Network,
    PaperStack,
    Size,
    Transformer,
    count,
    energies,
    matched,
)
from xentflow.records import report_console, require_writable, versions, write_result, write_whole
from xentflow.training.checkpoints import Checkpoints
from xentflow.training.parallel import ALONE, Parallel, Processes, device_of_process, gathered, joined
from xentflow.training.stages import two_stage
from xentflow.training.tasks import Images, Recall, Task, Text
from xentflow.training.trainer import Recipe, Trainer, layer_wise

TaskName = Literal["fashion-mnist", "files", "recall", "text"]
NetworkName = Literal["derived", "transformer", "paper"]

COMPARISON = ("seeds", "ablation_seeds", "budget", "workers", "minutes")
"""Settings of a comparison that say how many runs there are and when, and nothing about any of them."""

KIND = 2
"""The kind of run a checkpoint belongs to: one more whenever the same settings would lead elsewhere."""


@dataclass(frozen=True)
class TrainConfig(Derivation, Recipe):
    """What to train, on what.

    Args:
        compare: instead of one run, the comparison with the transformer and the ablations.
        task: images in patches, "files" being any in MNIST's format; associative recall; the next character of a text.
        network: the derived transformer, the baseline of as many parameters, or the paper's stack on pixels.
        optimisation: by backpropagation through all layers, or the paper's two stages in turn.
        size: width, depth, heads and hidden width.
        seed: of the first weights, of the order of samples, and of the split.
        patch: side of an image's patches.
        shift: pixels by which training images are moved at most, mirrored too; 0 leaves them as they are.
        shuffle_labels: permute the training labels: the control, which must end at chance.
        text: file to model, with task=text.
        tokens: length of its windows.
        data_dir: folder with the images, if not found by themselves.
        save_every: steps between checkpoints.
        keep: how many checkpoints stay.
        device: "cpu", or "cuda", where steps are recorded and replayed.
        compiled: whether the network is compiled for training.
        parallel: how the processes that torchrun starts share the work, if it starts several; batch stays that of all.
        tensorboard: also log for TensorBoard (extra ``log``).
        seeds: of the comparison, judged for each network.
        ablation_seeds: of each ablation, of the shuffled labels, and of recall and text.
        budget: seconds of training steps that each run of the comparison may take, had it the machine to itself.
        workers: runs at once.
        minutes: after which the comparison stops; the same command goes on with what is left.
    """

    compare: bool = False
    task: TaskName = "fashion-mnist"
    network: NetworkName = "derived"
    optimisation: Literal["layer-wise", "two-stage"] = "layer-wise"
    size: Size = "tiny"
    seed: int = 0
    patch: int = 7
    shift: int = 2
    shuffle_labels: bool = False
    text: str | None = None
    tokens: int = 128
    data_dir: str | None = None
    save_every: int = 500
    keep: int = 2
    device: str = "cpu"
    compiled: bool = False
    parallel: Parallel = "none"
    tensorboard: bool = False
    seeds: int = 5
    ablation_seeds: int = 3
    budget: float = 20.0
    workers: int = 1
    minutes: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        least_of = {"seed": 0, "save_every": 1, "keep": 1, "tokens": 2, "seeds": 2, "ablation_seeds": 1, "workers": 1}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise XentflowError(f"{name}: expected a whole number of at least {least}, got {getattr(self, name)}")
        for name in ("budget", "minutes", "mixing_step"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise XentflowError(f"{name}: expected a finite number above 0, got {value}")
        if self.device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", self.device):
            raise XentflowError(f'device: expected "cpu" or "cuda", got {self.device!r}')
        if self.task == "text" and self.text is None:
            raise XentflowError("text: expected a file with task=text, got none")
        if self.task == "files" and self.data_dir is None:
            raise XentflowError("data_dir: expected a folder with task=files, got none")
        if self.task in ("recall", "text") and self.roles == "both" and self.network == "derived":
            raise XentflowError(f'roles: expected "own" for task={self.task}, which is causal, got "both"')
        if self.network == "paper" and self.task in ("recall", "text"):
            raise XentflowError(f"network: expected derived or transformer for task={self.task}, got paper")
        if self.optimisation == "two-stage" and not (self.network == "paper" and self.tied):
            raise XentflowError("optimisation: two-stage goes with network=paper and tied=true, whose layers share θ")
        if self.optimisation == "two-stage" and self.compiled:
            raise XentflowError("compiled: expected false with two-stage optimisation, whose stages are not compiled")
        heard = {"transformer": {"relative"}, "paper": {"tied"}}.get(self.network, set(Derivation.__dataclass_fields__))
        for field in fields(Derivation):
            if field.name not in heard and getattr(self, field.name) != field.default:
                raise XentflowError(
                    f"{field.name}: expected {field.default} with network={self.network}, which has no such choice, "
                    f"got {getattr(self, field.name)}"
                )
        if self.relative and not self.target:
            raise XentflowError("relative: expected false with target=false, where no C is learned")
        if self.compare and self.task not in ("fashion-mnist", "files"):
            raise XentflowError(
                f"task: expected images with compare, which adds recall and text itself, got {self.task}"
            )
        if self.parallel != "none" and self.compare:
            raise XentflowError(
                f"parallel: expected none with compare, which trains on one process, got {self.parallel}"
            )
        if self.parallel == "fully-shard" and (self.compiled or self.optimisation == "two-stage"):
            raise XentflowError(
                "parallel: expected none or ddp for a compiled network, or for two-stage optimisation, got fully-shard"
            )

    @property
    def derivation(self) -> Derivation:
        """What is derived, and how."""
        return Derivation(**{field.name: getattr(self, field.name) for field in fields(Derivation)})

    @property
    def recipe(self) -> Recipe:
        """How it is trained."""
        return Recipe(**{field.name: getattr(self, field.name) for field in fields(Recipe)})


def run(config: TrainConfig, output: Path) -> int:
    """The command."""
    if config.compare:
        from xentflow.experiments import compare

        return compare.run(config, output)
    with joined(config.parallel) as processes:
        return _run(replace(config, device=device_of_process(config.device)), output, processes)


def _run(config: TrainConfig, output: Path, processes: Processes) -> int:
    console = report_console() if processes.first else Console(quiet=True)
    if processes.first:
        require_writable(output)
    began = time.perf_counter()
    task = make_task(config)
    network = make_network(config, task)
    trainer = make_trainer(config, network, task, processes)
    checkpoints = Checkpoints(
        output / "checkpoints",
        {**checkpoint_settings(config), "data": task.digest},
        config.keep,
        lambda text: _say(console, text),
    )
    if checkpoints.resume(trainer):
        _say(console, f"going on from step {trainer.step}")
    train(config, trainer, checkpoints, output, console)
    test = trainer.judge("test")
    last = trainer.history[-1]
    with gathered(network):
        figures = {
            "parameters": count(network),
            "steps": trainer.step,
            "processes": processes.size,
            "uses_labels_at_inference": network.uses_labels,
            "training": {"loss": last["loss"], "accuracy": last["accuracy"]},
            "validation": {"loss": last["validation_loss"], "accuracy": last["validation_accuracy"]},
            "test": asdict(test),
            "depth": through_depth(network, task),
        }
        weights = {name: value.detach().cpu() for name, value in network.named_parameters()}
        if not processes.first:
            return 0
        write_whole(output / "weights.safetensors", as_file(weights, {"settings": asdict(config)}))
        path = write_result(output, "train", asdict(config), figures, task.labels_used)
    _say(console, f"test accuracy {test.accuracy:.4f}, loss {test.loss:.4f}; {figures['parameters']:,} parameters")
    _say(console, f"labels: {task.labels_used}")
    _say(console, f"Done in {time.perf_counter() - began:.0f} s. Written: {path}")
    return 0


def train(config: TrainConfig, trainer: Trainer, checkpoints: Checkpoints, output: Path, console: Console) -> None:
    """Run to the end, saving and saying how it goes; of several processes the first does."""
    began = time.perf_counter()
    first = trainer.processes.first
    with _progress(console, trainer) as advance, _tensorboard(config.tensorboard and first, output) as to_board:
        for ends_pass in trainer.run():
            advance()
            if ends_pass:
                entry = trainer.history[-1]
                entry |= {"energy": _energy(trainer), "seconds": round(time.perf_counter() - began, 3)}
                to_board(entry)
                if first:
                    lines = (json.dumps(line, allow_nan=False) + "\n" for line in trainer.history)
                    write_whole(output / "log.jsonl", "".join(lines).encode())
            if trainer.step % config.save_every == 0 or trainer.finished:
                checkpoints.save(trainer)


def make_task(config: TrainConfig) -> Task:
    """The task, its data on the device."""
    if config.device != "cpu" and not torch.cuda.is_available():
        raise XentflowError(f"device: expected one that is here, got {config.device}, and torch sees no GPU")
    if config.task == "recall":
        return Recall(device=config.device)
    if config.task == "text":
        assert config.text is not None
        try:
            text = Path(config.text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise XentflowError(f"text: expected a file of text in UTF-8, got {config.text}: {error}") from error
        return Text(text, config.tokens, config.device)
    if config.task == "files":
        assert config.data_dir is not None
        folder = config.data_dir
        training, test = load_mnist_format(folder, "train"), load_mnist_format(folder, "test")
    else:
        training, test = load_fashion_mnist("train", config.data_dir), load_fashion_mnist("test", config.data_dir)
    return Images(
        training,
        test,
        config.patch,
        shift=config.shift,
        shuffled=config.shuffle_labels,
        seed=config.seed,
        device=config.device,
    )


def make_network(config: TrainConfig, task: Task) -> Network:
    """The network with its first weights, a function of the seed alone."""
    shape = SHAPES[config.size]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network: Network
        if config.network == "paper":
            network = PaperStack(task.inputs, shape, config.tied)
        elif config.network == "derived":
            network = DerivedTransformer(task.inputs, shape, config.derivation)
        else:
            # As many parameters as the derived transformer of this size has, untied and with all it may have.
            with torch.device("meta"):
                wanted = count(DerivedTransformer(task.inputs, shape, Derivation(relative=config.relative)))
            network = Transformer(task.inputs, matched(task.inputs, shape, wanted))
    return network.to(config.device)


def make_trainer(config: TrainConfig, network: Network, task: Task, processes: Processes = ALONE) -> Trainer:
    """The trainer of a run, at its start."""
    on_gpu = config.device.startswith("cuda")
    # TF32 products there, for every network alike.
    torch.set_float32_matmul_precision("high" if on_gpu else "highest")
    return Trainer(
        network,
        task,
        config.recipe,
        config.seed,
        criterion=two_stage if config.optimisation == "two-stage" else layer_wise,
        wrap=(lambda bare: torch.compile(bare, fullgraph=True)) if config.compiled else None,  # type: ignore[arg-type,return-value]
        graph=on_gpu and config.parallel == "none",
        processes=processes,
    )


def checkpoint_settings(config: TrainConfig) -> dict[str, Any]:
    """What a checkpoint depends on."""
    free = {"data_dir", "save_every", "keep", "tensorboard", "compare", "parallel", *COMPARISON}
    settings = {name: value for name, value in asdict(config).items() if name not in free}
    settings["device"] = config.device.partition(":")[0]
    return {**settings, "kind": KIND, "versions": versions()}


def _energy(trainer: Trainer) -> float | None:
    """How much a half of the derived transformer lowers its own ℓ, per token: the mean over halves."""
    network = trainer.network
    if not isinstance(network, DerivedTransformer) or not network.derivation.has_energies:
        return None
    x, _ = next(trainer.task.held_out("validation"))
    with gathered(network):
        before, after = energies(network, x[:200]).unbind(-1)
    return float((after - before).mean())


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)


@contextmanager
def _progress(console: Console, trainer: Trainer) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, a line for each tenth of the way elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    steps = trainer.recipe.steps
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"{steps} steps", total=steps, completed=trainer.step, state="starting")
        passes = len(trainer.history)
        said = 10 * trainer.step // steps

        def advance() -> None:
            nonlocal passes, said
            if len(trainer.history) == passes and trainer.step % 16:
                return
            passes = len(trainer.history)
            state = _state(trainer)
            progress.update(bar, completed=trainer.step, state=state)
            if not console.is_terminal and 10 * trainer.step // steps > said and passes:
                said = 10 * trainer.step // steps
                _say(console, f"step {trainer.step} of {steps}: {state}")

        yield advance


def _state(trainer: Trainer) -> str:
    if not trainer.history:
        return "first pass"
    entry = trainer.history[-1]
    energy = f", ℓ of a half {entry['energy']:+.3f}" if entry.get("energy") is not None else ""
    return (
        f"loss {entry['loss']:.3f}, accuracy {entry['accuracy']:.3f}, "
        f"validation {entry['validation_loss']:.3f}, {entry['validation_accuracy']:.3f}{energy}"
    )


@contextmanager
def _tensorboard(wanted: bool, output: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    if not wanted:
        yield lambda entry: None
        return
    try:
        board: Any = import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise XentflowError("tensorboard: expected the package, got none; pip install 'xentflow[log]'") from error
    with board.SummaryWriter(output / "tensorboard") as writer:

        def write(entry: dict[str, Any]) -> None:
            for name, value in entry.items():
                if name != "step" and value is not None:
                    writer.add_scalar(name, value, entry["step"])

        yield write
