"""``xentflow bench``: ratios between ways to do one thing, interleaved in one process, with the floor beside them.

Memory is what a fresh process has resident at most, beyond inputs and outputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal, Protocol

import torch
from rich.console import Console
from rich.table import Table

from xentflow.errors import XentflowError
from xentflow.records import report_console, require_writable, write_result, write_whole


@dataclass(frozen=True)
class BenchConfig:
    """How to measure, and what: "training" is fitting the paper's classifier, the others are the operators and blocks.

    Args:
        rounds: how often each way is timed, interleaved.
        threads: pinned for the run.
        data_dir: folder of Fashion-MNIST, if not found by itself.
    """

    what: Literal["training", "attention", "loss", "block"] = field(
        default="training", metadata={"subject": "what to measure"}
    )
    rounds: int = 5
    threads: int = 2
    data_dir: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("rounds", 2), ("threads", 1)):
            if getattr(self, name) < least:
                raise XentflowError(f"{name}: expected at least {least}, got {getattr(self, name)}")


class Settings(Protocol):
    """What of the command's configuration matters to a measurement."""

    @property
    def rounds(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def data_dir(self) -> str | None: ...


@dataclass(frozen=True)
class Timing:
    """Seconds of one way, over all rounds."""

    name: str
    seconds: tuple[float, ...]

    @property
    def fastest(self) -> float:
        """The least disturbed round."""
        return min(self.seconds)


def interleaved(ways: Mapping[str, Callable[[], float]], rounds: int) -> list[Timing]:
    """Time every way once in each round; each returns the seconds that count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(way())
    return [Timing(name, tuple(taken)) for name, taken in seconds.items()]


def run(config: BenchConfig, output: Path) -> int:
    """The command: tables on the terminal, ``result.json`` in ``output``, and figures of operators beside it."""
    require_writable(output)
    console = report_console()
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        written = (
            _training(config, output, console) if config.what == "training" else _operators(config, output, console)
        )
    finally:
        torch.set_num_threads(before)
    for path in written:
        console.print(f"Written: {path}", soft_wrap=True, highlight=False)
    return 0


def _training(config: BenchConfig, output: Path, console: Console) -> list[Path]:
    from xentflow.bench.training import bench_training

    timings, notes = bench_training(config, console)
    ours = next(timing for timing in timings if timing.name.startswith("xentflow"))
    console.print(table(timings, ours))
    for note in notes:
        console.print(note, highlight=False)
    figures = {"seconds": {timing.name: timing.seconds for timing in timings}, "notes": notes}
    return [write_result(output, f"bench {config.what}", asdict(config), figures, labels="training labels, to fit")]


def _operators(config: BenchConfig, output: Path, console: Console) -> list[Path]:
    from xentflow.bench.attention import bench_attention
    from xentflow.bench.block import bench_block
    from xentflow.bench.figure import drawn
    from xentflow.bench.loss import bench_loss
    from xentflow.bench.tables import as_terminal, notes, tables

    bench = {"attention": bench_attention, "loss": bench_loss, "block": bench_block}[config.what]
    figures = bench(config, console).figures()
    for rows in tables(figures):
        console.print(as_terminal(rows))
        console.print()
    for note in notes(figures):
        console.print(note, highlight=False)
    path = write_result(output, f"bench {config.what}", asdict(config), figures, labels="nowhere")
    return [path, *(write_whole(output / f"{config.what}.{form}", drawn(figures, form)) for form in ("png", "svg"))]


def table(timings: list[Timing], ours: Timing) -> Table:
    """Fastest and median of each way, and how many times ours it takes."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("way")
    for heading in ("fastest, s", "median, s", "× ours (fastest)", "× ours (median)"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for timing in timings:
        shown.add_row(
            timing.name,
            f"{timing.fastest:.3f}",
            f"{median(timing.seconds):.3f}",
            f"{timing.fastest / ours.fastest:.1f}",
            f"{median(timing.seconds) / median(ours.seconds):.1f}",
        )
    return shown
