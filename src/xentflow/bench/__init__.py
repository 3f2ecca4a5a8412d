"""``xentflow bench``: ratios between ways to do one thing, interleaved in one process, with the floor beside them."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from rich.table import Table

from xentflow.errors import XentflowError
from xentflow.records import report_console, require_writable, write_result


@dataclass(frozen=True)
class BenchConfig:
    """How to measure, and what: "training" is fitting the paper's classifier.

    Args:
        rounds: how often each way is timed, interleaved.
        threads: pinned for the run.
        data_dir: folder of Fashion-MNIST, if not found by itself.
    """

    what: Literal["training"] = field(default="training", metadata={"subject": "what to measure"})
    rounds: int = 5
    threads: int = 2
    data_dir: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("rounds", 2), ("threads", 1)):
            if getattr(self, name) < least:
                raise XentflowError(f"{name}: expected at least {least}, got {getattr(self, name)}")


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
    """The command: a table on the terminal, ``result.json`` in ``output``."""
    from xentflow.bench.training import bench_training

    require_writable(output)
    console = report_console()
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        timings, notes = bench_training(config, console)
    finally:
        torch.set_num_threads(before)
    ours = next(timing for timing in timings if timing.name.startswith("xentflow"))
    console.print(table(timings, ours))
    for note in notes:
        console.print(note, highlight=False)
    figures = {"seconds": {timing.name: timing.seconds for timing in timings}, "notes": notes}
    path = write_result(output, f"bench {config.what}", asdict(config), figures, labels="training labels, to fit")
    console.print(f"Written: {path}", soft_wrap=True, highlight=False)
    return 0


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
