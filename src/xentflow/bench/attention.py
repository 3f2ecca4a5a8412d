"""Attention terms along either axis and the exact quadratic gradient, beside one call of torch's own attention."""

from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from xentflow.attention import cross_attention
from xentflow.axes import Axis
from xentflow.bench import Settings, interleaved
from xentflow.bench.measure import Comparison, Report, alone, growth, rates, timed
from xentflow.gradient import feature_gradient
from xentflow.kernels import Backend
from xentflow.models import Quadratic
from xentflow.objective import CrossEntropy

SHAPE = {"S": 4096, "F": 64}
HEADS = 4
LONG = {"S": 16384, "F": 64}
GROWTH = {"S": (4096, 8192, 16384), "F": (64, 128, 256)}


def features(S: int, F: int) -> tuple[Tensor, Tensor]:
    """Z, and θ for every head, of unit-scale logits."""
    source = torch.Generator().manual_seed(0)
    return torch.randn(S, F, generator=source), torch.randn(HEADS, F, F, generator=source) / F


def bench_attention(settings: Settings, console: Console) -> Report:
    """Forward passes, memory and growth."""
    console.print(f"{settings.rounds} interleaved rounds, {settings.threads} threads, float32")
    with torch.no_grad():
        comparisons = [*_along_axes(settings.rounds), _quadratic(settings.rounds)]
    peaks = [
        alone(f"{case}, S={LONG['S']:,}, F={LONG['F']}", "attention", case, settings.threads, **LONG) for case in CASES
    ]
    growths = [
        growth(
            "quadratic gradient, 4 heads",
            over,
            "attention",
            "quadratic gradient, 4 heads",
            sizes,
            settings,
            **{name: size for name, size in SHAPE.items() if name != over},
        )
        for over, sizes in GROWTH.items()
    ]
    return Report(rates(), comparisons, peaks, growths)


def _along_axes(rounds: int) -> list[Comparison]:
    S, F = SHAPE["S"], SHAPE["F"]
    Z, theta = features(S, F)[0] / F**0.25, features(S, F)[0].flip(0) / F**0.25
    q, k = Z[None, None], theta[None, None]
    eager = torch.compile(lambda Z, theta: torch.softmax(Z @ theta.T, -2) @ theta)
    found = []
    peers: dict[Axis, dict[str, Callable[[], Tensor]]] = {
        "classes": {"xentflow, fused": _by("fused", "classes", Z, theta)},
        "sequence": {"torch.compile": lambda: eager(Z, theta)},
    }
    for axis, others in peers.items():
        ways: dict[str, Callable[[], Tensor]] = {
            "xentflow": _by("auto", axis, Z, theta),
            "scaled_dot_product_attention": lambda: scaled_dot_product_attention(q, k, k, scale=1.0),
            "xentflow, chunked": _by("chunked", axis, Z, theta),
            **others,
        }
        timings = interleaved({name: timed(way) for name, way in ways.items()}, rounds)
        title = f"cross-attention along the {axis} axis, S=K={S:,}, F={F}"
        seconds = {timing.name: list(timing.seconds) for timing in timings}
        found.append(Comparison(title, "xentflow", seconds, 4 * S * S * F / 1e9, 3 * Z.nbytes / 2**20))
    return found


def _by(backend: Backend, axis: Axis, Z: Tensor, theta: Tensor) -> Callable[[], Tensor]:
    return lambda: cross_attention(Z, theta, axis=axis, backend=backend)


def _quadratic(rounds: int) -> Comparison:
    S, F = SHAPE["S"], SHAPE["F"]
    Z, theta = features(S, F)
    model, loss = Quadratic(theta), CrossEntropy("classes")
    labels = torch.arange(S).expand(HEADS, S)
    q, k = (Z @ theta)[None], Z.expand(1, HEADS, S, F).contiguous()
    ways = {
        "xentflow": timed(lambda: feature_gradient(loss, model, Z, labels).total),
        "scaled_dot_product_attention": timed(lambda: scaled_dot_product_attention(q, k, k, scale=1.0)),
        "xentflow, chunked": timed(lambda: feature_gradient(loss, model, Z, labels, backend="chunked").total),
    }
    seconds = {timing.name: list(timing.seconds) for timing in interleaved(ways, rounds)}
    title = f"exact gradient of the quadratic model, S={S:,}, F={F}, {HEADS} heads"
    return Comparison(title, "xentflow", seconds, 6 * HEADS * S * S * F / 1e9, 2 * Z.nbytes / 2**20)


def _sequence_case(S: int, F: int) -> Callable[[], list[Tensor]]:
    Z = features(S, F)[0] / F**0.25
    return lambda: [cross_attention(Z, Z, axis="sequence")]


def _quadratic_case(S: int, F: int) -> Callable[[], list[Tensor]]:
    Z, theta = features(S, F)
    model, loss = Quadratic(theta), CrossEntropy("classes")
    labels = torch.arange(S).expand(HEADS, S)
    return lambda: [feature_gradient(loss, model, Z, labels).total]


CASES = {"attention along the sequence axis": _sequence_case, "quadratic gradient, 4 heads": _quadratic_case}
