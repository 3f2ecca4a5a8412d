"""One case in a process of its own: ``python -m xentflow.bench.alone '{"module": …}'`` prints MiB and seconds.

A case makes its inputs and gives a function that returns its outputs. Peak memory counts from after the inputs, less
the outputs. A small size runs first, so that what torch loads once is loaded.
"""

import gc
import importlib
import json
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from xentflow.bench.measure import high_water

SMALL = 2304
"""Sizes of the run before, as large as it takes for 1024 times as many logits not to be few."""

ENOUGH = 1.0
"""Seconds of repetitions, of which the fastest counts."""


def main(arguments: str) -> None:
    """Run the case that is described and print what it took."""
    asked = json.loads(arguments)
    torch.set_num_threads(asked["threads"])
    build = importlib.import_module(f"xentflow.bench.{asked['module']}").CASES[asked["case"]]
    # The plain form would load other libraries.
    build(**{name: min(size, 2 if name == "depth" else SMALL) for name, size in asked["shape"].items()})()
    gc.collect()
    run = build(**asked["shape"])
    _forget_high_water()
    before = high_water()
    seconds, outputs = _timed(run)
    extra = high_water() - before - sum(output.nbytes for output in outputs)
    del outputs
    # What a shape costs when it first comes is no part of how time grows.
    again = 0.0
    while again < ENOUGH and seconds < 5 * ENOUGH:
        last = _timed(run)[0]
        seconds, again = min(seconds, last), again + last
    print(json.dumps([max(extra, 0) / 2**20, seconds]))


def _timed(run: Callable[[], list[Tensor]]) -> tuple[float, list[Tensor]]:
    start = time.perf_counter()
    outputs = run()
    return time.perf_counter() - start, outputs


def _forget_high_water() -> None:
    try:
        with open("/proc/self/clear_refs", "w") as file:  # noqa: PTH123  # written, never made
            file.write("5")
    except OSError:
        pass  # the mark of all that came before stands, and what is found is less


if __name__ == "__main__":
    main(sys.argv[1])
