"""The recipe as a PyTorch user would write it, twice: the reference that the fast way is held against.

``fit_literal`` is the paper's: a ``Dataset`` that corrupts each image as it is loaded, a ``DataLoader``, ``nn.Linear``,
``F.cross_entropy``, ``torch.optim.Adam``. ``fit_vectorised`` is the same with whole batches in memory.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from xentflow.data.idx import LabelledImages
from xentflow.training.noise import Corruption
from xentflow.training.recipe import ClassifierConfig, FittedClassifier, OnEpoch, Start, start

Batches = Iterator[tuple[Tensor, Tensor]]


class NoisyImages(Dataset[tuple[Tensor, Tensor]]):
    """Images that are corrupted anew each time one is loaded."""

    def __init__(self, data: LabelledImages, corruption: Corruption) -> None:
        self.data = data
        self.corruption = corruption

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor]:
        return self.corruption.literal(self.data.images[item : item + 1])[0], self.data.labels[item]


def fit_literal(
    data: LabelledImages,
    seed: int,
    config: ClassifierConfig | None = None,
    on_epoch: OnEpoch | None = None,
    workers: int = 0,
) -> FittedClassifier:
    """Fit by the recipe as it is written; slow.

    workers: processes that load; the noise depends on their number as well as on the seed.
    """
    config = ClassifierConfig() if config is None else config
    begin = start(data, seed, config)
    training = Subset(NoisyImages(data, config.corruption), begin.train_index.tolist())
    loader = DataLoader(
        training,
        batch_size=config.batch,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        generator=begin.generator,
    )
    # Without workers, noise comes from the global generator; with them, each is seeded from the loader's.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _fit(begin, seed, config, lambda: iter(loader), on_epoch)


def fit_vectorised(
    data: LabelledImages, seed: int, config: ClassifierConfig | None = None, on_epoch: OnEpoch | None = None
) -> FittedClassifier:
    """Fit with whole batches corrupted at once by torch."""
    config = ClassifierConfig() if config is None else config
    begin = start(data, seed, config)

    def batches() -> Batches:
        order = begin.train_index[torch.randperm(len(begin.train_index), generator=begin.generator)]
        for index in torch.split(order, config.batch):
            yield config.corruption.literal(data.images[index], begin.generator), data.labels[index]

    # nn.Linear draws a start from the global generator, which is then replaced: leave that generator alone.
    with torch.random.fork_rng(devices=[]):
        return _fit(begin, seed, config, batches, on_epoch)


def _fit(
    begin: Start, seed: int, config: ClassifierConfig, epoch_of: Callable[[], Batches], on_epoch: OnEpoch | None
) -> FittedClassifier:
    classes, pixels = begin.theta.shape
    model = nn.Linear(pixels, classes, bias=config.bias)
    with torch.no_grad():
        model.weight.copy_(begin.theta)
        if config.bias:
            model.bias.copy_(begin.bias)
    optimiser = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    history = []
    for epoch in range(1, config.epochs + 1):
        total = 0.0
        for Z, labels in epoch_of():
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(Z), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            total += loss.item() * len(labels)
        history.append(total / len(begin.train_index))
        if on_epoch is not None:
            on_epoch(epoch, history[-1])
    theta = model.weight.detach().clone()
    bias = model.bias.detach().clone() if config.bias else torch.zeros(classes)
    return FittedClassifier(theta, bias, seed, config, begin.train_index, begin.validation_index, tuple(history))
