"""A derived self-attention block, forward and backward, beside an attention layer of the same width; long sequences."""

from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from xentflow.bench import Settings, interleaved
from xentflow.bench.measure import Comparison, Report, alone, growth, rates, timed
from xentflow.block import DerivedBlock
from xentflow.derive import derive
from xentflow.models import Quadratic
from xentflow.objective import CrossEntropy
from xentflow.oracles import Shift
from xentflow.stack import Stack

SHAPE = {"S": 4096, "F": 64}
HEADS = 4
LONG, LONGEST = 16384, 65536
DEPTHS = (1, 2, 4)


class AttentionLayer(nn.Module):
    """Z + attention(ZQ, ZK, ZV)O, with torch's own attention: what the block is held against."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_all, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, Z: Tensor) -> Tensor:
        parts = self.of_all(Z).unflatten(-1, (3, HEADS, -1)).permute(1, 2, 0, 3)
        q, k, v = (part[None] for part in parts)
        mixed = scaled_dot_product_attention(q, k, v)[0].permute(1, 0, 2).flatten(1)
        found: Tensor = Z + self.out(mixed)
        return found


def block(width: int) -> DerivedBlock:
    """Softmax over keys, each token in its own role, four heads of a quarter of the width, C the token before."""
    source = torch.Generator().manual_seed(0)
    phi = nn.Parameter(torch.randn(HEADS, width, width // HEADS, generator=source) / width**0.5)
    psi = nn.Parameter(torch.randn(HEADS, width, width // HEADS, generator=source) / width**0.5)
    model = Quadratic.from_factor(phi, roles="own", psi=psi)
    return derive(CrossEntropy("classes"), model, oracle=Shift(-1), step=0.1)


def features(S: int, F: int) -> Tensor:
    """Z of unit scale."""
    return torch.randn(S, F, generator=torch.Generator().manual_seed(0))


def bench_block(settings: Settings, console: Console) -> Report:
    """One layer's passes, a stack that trains, the longest sequence, growth over S and depth."""
    console.print(f"{settings.rounds} interleaved rounds, {settings.threads} threads, float32")
    threads, F = settings.threads, SHAPE["F"]
    peaks = [
        alone(f"a block forward, S={LONGEST:,}, F={F}", "block", "forward", threads, S=LONGEST, F=F),
        alone(f"a stack of 4 trains, S={LONG:,}, F={F}", "block", "training", threads, S=LONG, F=F, depth=4),
    ]
    lengths = (LONG // 4, LONG // 2, LONG)
    growths = [
        growth("a stack of 2 trains", "S", "block", "training", lengths, settings, F=F, depth=2),
        growth("a stack trains", "depth", "block", "training", DEPTHS, settings, F=F, S=SHAPE["S"]),
    ]
    return Report(rates(), [_compared(settings.rounds)], peaks, growths)


def _compared(rounds: int) -> Comparison:
    S, F = SHAPE["S"], SHAPE["F"]
    Z = features(S, F)
    derived, layer = block(F), AttentionLayer(F)
    compiled = torch.compile(layer)
    ways = {
        "xentflow": timed(lambda: _pass(derived, Z)),
        "attention layer": timed(lambda: _pass(layer, Z)),
        "attention layer, compiled": timed(lambda: _pass(compiled, Z)),
    }
    seconds = {timing.name: list(timing.seconds) for timing in interleaved(ways, rounds)}
    # Two products of S×S by the heads' width forward, five backward.
    gflop = 7 * 2 * S * S * F / 1e9
    title = f"a self-attention block forward and backward, S={S:,}, F={F}, {HEADS} heads"
    return Comparison(title, "xentflow", seconds, gflop, 4 * Z.nbytes / 2**20)


def _pass(module: Callable[[Tensor], Tensor], Z: Tensor) -> None:
    Z = Z.detach().requires_grad_()
    module(Z).square().mean().backward()  # type: ignore[no-untyped-call]


def _forward_case(S: int, F: int) -> Callable[[], list[Tensor]]:
    Z, derived = features(S, F), block(F)

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [derived(Z)]

    return run


def _training_case(S: int, F: int, depth: int) -> Callable[[], list[Tensor]]:
    Z, stack = features(S, F), Stack.of(block(F), depth, tied=False)

    def run() -> list[Tensor]:
        parameters = list(stack.parameters())
        return list(torch.autograd.grad(stack(Z).square().mean(), parameters))

    return run


CASES = {"forward": _forward_case, "training": _training_case}
