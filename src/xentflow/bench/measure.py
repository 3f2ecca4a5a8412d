"""What every benchmark of operators shares: interleaved seconds, peak memory in fresh processes, growth, the floor."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch

from xentflow.bench import Settings, interleaved
from xentflow.errors import XentflowError

FEWEST_TURNS = 5
"""Times that every size has its turn, where a comparison may have fewer rounds."""

CALLS = 3
"""Calls of each size in a turn: as many of a small one as of a large one, so that neither minimum is of more."""


@dataclass(frozen=True)
class Comparison:
    """Ways to compute one thing, timed in turns, and the least work it takes."""

    title: str
    ours: str
    seconds: dict[str, list[float]]
    gflop: float
    mib: float


@dataclass(frozen=True)
class Growth:
    """Seconds, the fastest of all calls, and MiB of one way over sizes, and the slopes between logarithms.

    turns: how often every size came; calls: of each in a turn, None in records of before these were counted, when a
    small size had more.
    """

    title: str
    over: str
    sizes: list[int]
    seconds: list[float]
    mib: list[float]
    turns: int
    calls: int | None = None

    @property
    def exponents(self) -> tuple[float, float]:
        """Of time and of memory."""
        return slope(self.sizes, self.seconds), slope(self.sizes, self.mib)


@dataclass(frozen=True)
class Peak:
    """Peak memory of one run in a fresh process, beyond inputs and outputs, and its seconds."""

    title: str
    mib: float
    seconds: float


@dataclass(frozen=True)
class Report:
    """All that one benchmark found."""

    rates: dict[str, float]
    comparisons: list[Comparison]
    peaks: list[Peak]
    growths: list[Growth]

    def figures(self) -> dict[str, Any]:
        found = asdict(self)
        for growth, told in zip(self.growths, found["growths"], strict=True):
            told["exponents"] = growth.exponents
        return found


def timed(function: Callable[[], object]) -> Callable[[], float]:
    """A way that is called once to warm up, and whose whole call counts."""
    function()

    def seconds() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return seconds


def rates() -> dict[str, float]:
    """GFLOP/s of large square products by either library, and GiB/s of a copy: what the floor is measured in."""
    A, B = torch.randn(2, 2048, 2048)
    pixels, filters = A.view(2, 1024, 1, 2048).permute(0, 3, 1, 2), B.view(2048, 2048, 1, 1)
    large = torch.randn(2**25)
    target = torch.empty_like(large)
    flop = 2 * 2048**3 / 1e9
    return {
        "matmul, GFLOP/s": flop / _fastest(lambda: A @ B.T),
        "convolution, GFLOP/s": flop / _fastest(lambda: torch.nn.functional.conv2d(pixels, filters)),
        "copy, GiB/s": 2 * large.nbytes / 2**30 / _fastest(lambda: target.copy_(large)),
    }


def floor(comparison: Comparison, rates: Mapping[str, float]) -> float:
    """Seconds that the products alone, or the bytes alone, cannot be done without."""
    rate = max(rates["matmul, GFLOP/s"], rates["convolution, GFLOP/s"])
    return max(comparison.gflop / rate, comparison.mib / 1024 / rates["copy, GiB/s"])


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """d log value / d log size, by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(max(value, 1e-9)) for value in values]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def growth(
    title: str, over: str, module: str, case: str, sizes: Sequence[int], settings: Settings, **fixed: int
) -> Growth:
    """One case of a module: seconds of all sizes in turns of as many calls, MiB of each in a process of its own."""
    build = import_module(f"xentflow.bench.{module}").CASES[case]
    shapes = {str(size): {**fixed, over: size} for size in sizes}
    turns = max(settings.rounds, FEWEST_TURNS)
    timings = interleaved({name: _repeated(build(**shape)) for name, shape in shapes.items()}, turns)
    mib = [alone(title, module, case, settings.threads, **shape).mib for shape in shapes.values()]
    return Growth(title, over, list(sizes), [timing.fastest for timing in timings], mib, turns, CALLS)


def _repeated(function: Callable[[], object]) -> Callable[[], float]:
    """The fastest of the calls of a turn."""
    once = timed(function)
    return lambda: min(once() for _ in range(CALLS))


def alone(title: str, module: str, case: str, threads: int, **shape: int) -> Peak:
    """Run ``CASES[case](**shape)`` of a module of this package in a fresh process."""
    arguments = json.dumps({"module": module, "case": case, "threads": threads, "shape": shape})
    run = subprocess.run(
        [sys.executable, "-m", "xentflow.bench.alone", arguments], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise XentflowError(f"bench: {title} ended with status {run.returncode}: {run.stderr.strip().splitlines()[-1]}")
    mib, seconds = json.loads(run.stdout.splitlines()[-1])
    return Peak(title, mib, seconds)


def high_water() -> int:
    """Bytes this process has had resident at most."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def middle(seconds: Sequence[float]) -> float:
    """The median, which a disturbed round does not move."""
    return median(seconds)


def _fastest(function: Callable[[], object]) -> float:
    return min(timed(function)() for _ in range(10))
