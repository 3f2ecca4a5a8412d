"""Whether the fast fit and the recipe as it is written give the same table, on Fashion-MNIST itself.

    python benchmarks/same_law.py WAY SEED [SEED ...]      WAY: literal or vectorised

Both ways start a seed from the same split and the same θ; what differs is the noise and the order of the images. For
each seed: accuracy on the held-out images, clean and noisy, before the first pass, and the RMSE of the twelve cells to
the paper's. Below: the mean difference of the two ways with its standard error. A seed of the literal way takes
minutes.
"""

import math
import statistics
import sys

from xentflow.data import load_fashion_mnist
from xentflow.experiments import paper
from xentflow.experiments.controls import Setting
from xentflow.oracles import Given
from xentflow.training import FittedClassifier, fit_fast, fit_literal, fit_vectorised

WAYS = {"literal": fit_literal, "vectorised": fit_vectorised}


def judged(data, fitted: FittedClassifier) -> tuple[float, float, float]:
    index, corruption = fitted.validation_index, fitted.config.corruption
    labels = data.labels[index]
    starts = {
        "clean": corruption.clean(data.images[index]),
        "noisy": corruption.apply(data.images, fitted.seed, 0, index),
    }
    rows = {start: Setting(fitted.model, Z, labels, 5).run(Given(), labels).accuracy for start, Z in starts.items()}
    return rows["clean"][0], rows["noisy"][0], paper.rmse(rows)


def main() -> int:
    way, *seeds = sys.argv[1:]
    data = load_fashion_mnist()
    differences = []
    print(f"seed   clean: fast {way}   noisy: fast {way}   RMSE: fast {way}")
    for seed in map(int, seeds):
        ours, theirs = (judged(data, fit(data, seed)) for fit in (fit_fast, WAYS[way]))
        print(seed, *(f"  {a:.4f} {b:.4f}" for a, b in zip(ours, theirs, strict=True)), flush=True)
        differences.append([a - b for a, b in zip(ours, theirs, strict=True)])
    if len(seeds) > 1:
        for name, column in zip(("clean", "noisy", "RMSE"), zip(*differences, strict=True), strict=True):
            error = statistics.stdev(column) / math.sqrt(len(column))
            print(f"{name}: fast − {way} {statistics.fmean(column):+.4f} ± {error:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
