"""The fast way to fit the classifier: everything in memory, noise drawn ahead, one compiled call for each step.

For a linear model and cross-entropy the gradient needs no graph: ∂_θ = (p − C)ᵀZ/n and ∂_b = Σ(p − C)/n over the n
rows of a batch. One thread does the steps; the others draw the noise of the batches to come, which depends on no
step. The two take about the same time, so two cores are busy, and neither waits for the other at a barrier: on a
machine that does other work too, a barrier at each step would wait for the scheduler thousands of times. Whenever the
next noise is not there yet, the stepping thread draws some itself.

Steps happen in one order and each draw belongs to its counter: the result is the same, bit for bit, for any number of
threads (on one machine and one version of the compiler).
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from xentflow.data.idx import LabelledImages
from xentflow.training.noise import Sampler
from xentflow.training.recipe import ClassifierConfig, FittedClassifier, OnEpoch, Start, start

_AHEAD = 4


def fit_fast(
    data: LabelledImages,
    seed: int,
    config: ClassifierConfig | None = None,
    on_epoch: OnEpoch | None = None,
    threads: int | None = None,
) -> FittedClassifier:
    """Fit by the compiled loop; the same law as ``fit_literal``.

    threads: how many may compute, by default ``torch.get_num_threads()``; the result does not depend on it.
    """
    config = ClassifierConfig() if config is None else config
    begin = start(data, seed, config)
    sampler = Sampler(config.corruption, data.images.flatten(1), seed)
    helpers = (torch.get_num_threads() if threads is None else threads) - 1
    fit = _Steps(data, begin, config)
    history = []
    with _Ahead(sampler, _batches(begin, config), fit.rows, fit.pixels, helpers) as batches:
        total = 0.0
        for Z, index, epoch, is_last in batches:
            total += fit.step(Z, index)
            if is_last:
                history.append(total / len(begin.train_index))
                total = 0.0
                if on_epoch is not None:
                    on_epoch(epoch, history[-1])
    theta, bias = fit.parameters()
    return FittedClassifier(theta, bias, seed, config, begin.train_index, begin.validation_index, tuple(history))


Batch = tuple[Any, int, bool]
"""Which images (int64), the epoch's number from 1, whether it is the epoch's last batch."""


def _batches(begin: Start, config: ClassifierConfig) -> Iterator[Batch]:
    numbers = begin.train_index.numpy()
    n = len(numbers)
    for epoch in range(1, config.epochs + 1):
        order = numbers[torch.randperm(n, generator=begin.generator).numpy()]
        for low in range(0, n, config.batch):
            yield order[low : low + config.batch], epoch, low + config.batch >= n


class _Ahead:
    """Corrupted batches in order, drawn up to ``_AHEAD`` early by other threads; a context that ends with them."""

    def __init__(self, sampler: Sampler, batches: Iterator[Batch], rows: int, pixels: int, helpers: int) -> None:
        self._sampler = sampler
        self._batches = batches
        # Zeros, since rows beyond a short batch are multiplied by zero, and zero times garbage may be NaN.
        self._free = deque(np.zeros((rows, pixels), np.float32) for _ in range(_AHEAD + 1))
        self._pool = ThreadPoolExecutor(helpers) if helpers > 0 else None
        self._waiting: deque[tuple[Any, Batch, Future[None]]] = deque()

    def __enter__(self) -> "_Ahead":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Iterator[tuple[Any, Any, int, bool]]:
        while True:
            while len(self._waiting) < _AHEAD and (batch := next(self._batches, None)) is not None:
                Z = self._free.popleft()
                job = Future() if self._pool is None else self._pool.submit(self._draw, Z, batch)
                self._waiting.append((Z, batch, job))
            if not self._waiting:
                return
            self._finish_first()
            Z, batch, _ = self._waiting.popleft()
            yield Z, *batch
            self._free.append(Z)

    def _finish_first(self) -> None:
        # Until the first is there, draw what nobody has begun: a thread that only waits is a core that does nothing.
        first = self._waiting[0][2]
        for Z, batch, job in self._waiting:
            if first.done():
                break
            # A job that can be cancelled has not begun, and from then on never will.
            if not job.cancelled() and job.cancel():
                self._draw(Z, batch)
        if not first.cancelled():
            first.result()

    def _draw(self, Z: Any, batch: Batch) -> None:
        index, epoch, _ = batch
        self._sampler(Z[: len(index)], index, epoch)


class _Steps:
    """The parameters and Adam's moments, in the padded layout of the compiled step."""

    def __init__(self, data: LabelledImages, begin: Start, config: ClassifierConfig) -> None:
        from xentflow.training import _kernels

        self._kernel = _kernels.train_step
        self._classes, self.pixels = begin.theta.shape
        padded = -(-self._classes // _kernels.CLASSES) * _kernels.CLASSES
        self.rows = -(-min(config.batch, len(begin.train_index)) // _kernels.ROWS) * _kernels.ROWS
        self._config = config
        self._labels = data.labels.contiguous().numpy()
        self._theta, self._gradient, self._mean, self._square = np.zeros((4, padded, self.pixels), np.float32)
        self._bias = np.zeros(padded, np.float32)
        self._of_bias = np.zeros((3, padded), np.float32)
        self._theta[: self._classes] = begin.theta.numpy()
        self._bias[: self._classes] = begin.bias.numpy()
        self._count = 0

    def step(self, Z: Any, index: Any) -> float:
        """One step on a batch; the sum of its cross-entropies before the step."""
        self._count += 1
        loss = self._kernel(
            Z, self._labels, index, self._theta, self._bias, self._gradient, self._mean, self._square, self._of_bias,
            self._count, self._config.learning_rate, self._classes, self._config.bias,
        )  # fmt: skip
        return float(loss)

    def parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of θ and b without the padding."""
        theta, bias = self._theta[: self._classes], self._bias[: self._classes]
        return torch.from_numpy(theta.copy()), torch.from_numpy(bias.copy())
