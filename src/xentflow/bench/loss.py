"""ℓ of a linear model and its gradients: ours, eager and compiled torch, and ``F.linear_cross_entropy`` at its best."""

from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from xentflow.bench import Settings, interleaved
from xentflow.bench.measure import Comparison, Report, alone, growth, rates, timed
from xentflow.losses import linear_cross_entropy

LARGE = {"S": 1024, "F": 256, "K": 16384}
FEW_CLASSES = {"S": 48000, "F": 784, "K": 10}
MEMORY = {"S": 2048, "F": 256, "K": 32768}
CHUNKS = (128, 256, 512)
GROWTH = {"S": (1024, 2048, 4096), "K": (8192, 16384, 32768), "F": (128, 512)}
BASE = {"S": 1024, "F": 128, "K": 8192}

Loss = Callable[[Tensor, Tensor], Tensor]


def drawn(S: int, F: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """Z, θ and labels of unit-scale logits."""
    source = torch.Generator().manual_seed(0)
    theta = torch.randn(K, F, generator=source) / F**0.5
    return torch.randn(S, F, generator=source), theta, torch.randint(K, (S,), generator=source)


def bench_loss(settings: Settings, console: Console) -> Report:
    """Three comparisons; peak memory of gradients; growth over S, K and F."""
    console.print(f"{settings.rounds} interleaved rounds, {settings.threads} threads, float32")
    comparisons = [
        _compared("ℓ and ∂Z", LARGE, False, settings.rounds),
        _compared("ℓ, ∂Z and ∂θ", LARGE, True, settings.rounds),
        _compared("ℓ, ∂Z and ∂θ of few classes", FEW_CLASSES, True, settings.rounds),
    ]
    name = ", ".join(f"{key}={size:,}" for key, size in MEMORY.items())
    peaks = [alone(f"{way}: ℓ, ∂Z and ∂θ, {name}", "loss", way, settings.threads, **MEMORY) for way in CASES]
    growths = [
        growth("ℓ, ∂Z and ∂θ", over, "loss", "xentflow", sizes, settings, **_without(BASE, over))
        for over, sizes in GROWTH.items()
    ]
    return Report(rates(), comparisons, peaks, growths)


def _without(shape: dict[str, int], name: str) -> dict[str, int]:
    return {other: size for other, size in shape.items() if other != name}


def _compared(what: str, shape: dict[str, int], by_theta: bool, rounds: int) -> Comparison:
    Z, theta, labels = drawn(**shape)
    ours: Loss = lambda z, t: linear_cross_entropy(z, t, labels, axis="classes")  # noqa: E731
    eager: Loss = lambda z, t: functional.cross_entropy(z @ t.T, labels)  # noqa: E731
    losses: dict[str, Loss] = {
        "xentflow": ours,
        "eager": eager,
        "torch.compile": torch.compile(eager),
        "xentflow, chunked": lambda z, t: linear_cross_entropy(z, t, labels, axis="classes", backend="chunked"),
    }
    grid = {str(size): _way(_peer(labels, size), Z, theta, by_theta) for size in CHUNKS}
    best = int(min(interleaved(grid, 3), key=lambda timing: timing.fastest).name)
    losses[f"F.linear_cross_entropy, chunks of {best}"] = _peer(labels, best)
    ways = {name: _way(loss, Z, theta, by_theta) for name, loss in losses.items()}
    timings = interleaved(ways, rounds)
    S, F, K = shape["S"], shape["F"], shape["K"]
    moved = Z.nbytes * 2 + theta.nbytes * (2 if by_theta else 1)
    sizes = ", ".join(f"{name}={size:,}" for name, size in shape.items())
    return Comparison(
        f"{what}, {sizes}",
        "xentflow",
        {timing.name: list(timing.seconds) for timing in timings},
        (3 if by_theta else 2) * 2 * S * F * K / 1e9,
        moved / 2**20,
    )


def _peer(labels: Tensor, size: int) -> Loss:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=size, chunking_method=None)
    return lambda z, t: functional.linear_cross_entropy(z, t, labels, options=options)


def _way(loss: Loss, Z: Tensor, theta: Tensor, by_theta: bool) -> Callable[[], float]:
    def run() -> None:
        z, t = Z.detach().requires_grad_(), theta.detach().requires_grad_(by_theta)
        loss(z, t).backward()  # type: ignore[no-untyped-call]

    return timed(run)


def _case(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Callable[[], list[Tensor]]]:
    def build(S: int, F: int, K: int) -> Callable[[], list[Tensor]]:
        Z, theta, labels = drawn(S, F, K)

        def run() -> list[Tensor]:
            z, t = Z.requires_grad_(), theta.requires_grad_()
            return list(torch.autograd.grad(loss(z, t, labels), (z, t)))

        return run

    return build


CASES = {
    "xentflow": _case(lambda z, t, y: linear_cross_entropy(z, t, y, axis="classes")),
    "eager": _case(lambda z, t, y: functional.cross_entropy(z @ t.T, y)),
    "F.linear_cross_entropy, chunks of 256": _case(lambda z, t, y: _peer(y, 256)(z, t)),
}
