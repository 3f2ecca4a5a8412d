"""Derived transformers: an embedding, blocks that alternate two energies, and a read-out through the last one's θ.

    Z⁽⁰⁾   = embedding + positions
    depth × [ mix:    tokens against tokens,  N = Xφψᵀ Xᵀ,   C a learned matrix of positions, or uniform
              sort:   tokens against classes, N = Xθᵀ,       C = softmax(MLP(X)), latent classes of several heads ]
    decide:  N = Xθᵀ + b over the true classes, C = softmax(MLP(X));  logits = θ of the decided features

X holds each token's direction, √F z/‖z‖; on a sphere, and in ``decide``, Z is placed there itself; free, X is Z.

Every half is one step of a splitting of a flow made by ``derive``; together they take the places of self-attention and
of the feed-forward part. Labels reach C through the training loss alone. For images the tokens' mean is decided on, for
sequences each token.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from xentflow.block import DerivedBlock
from xentflow.constraints import Constraint, Dual, Free, Sphere
from xentflow.derive import derive
from xentflow.errors import XentflowError
from xentflow.integrators import Euler, Method
from xentflow.models import Linear, Quadratic, Roles
from xentflow.objective import CrossEntropy, Objective
from xentflow.oracles import Learned, LearnedTargets, Uniform
from xentflow.potentials import Entmax, HalfSquare, LogSumExp, Potential, Softplus
from xentflow.splitting import LieTrotter, Strang, Yoshida
from xentflow.stack import Stack
from xentflow.steps import LearnedStep

SplittingName = Literal["none", "lie-trotter", "strang", "yoshida"]
PotentialName = Literal["softmax", "entmax", "sigmoid", "linear"]
Normalisation = Literal["sphere", "pre-norm", "free"]
Size = Literal["tiny", "small", "base"]


@dataclass(frozen=True)
class Inputs:
    """What a task shows a network: ``tokens`` places, classes to tell apart, and what stands at a place.

    vocabulary: how many symbols there are, or None where a place holds ``patch`` numbers.
    """

    tokens: int
    classes: int
    vocabulary: int | None = None
    patch: int = 0

    @property
    def causal(self) -> bool:
        """Sequences of symbols are read forwards, and every token decides; images are seen whole, and decide once."""
        return self.vocabulary is not None


@dataclass(frozen=True)
class Shape:
    """How large a network is: F, its halves' number, its heads, and the hidden width of its MLPs."""

    width: int
    depth: int
    heads: int
    hidden: int

    def __post_init__(self) -> None:
        if min(self.width, self.depth, self.heads, self.hidden) < 1 or self.width % self.heads:
            raise XentflowError(f"shape: expected positive sizes and a width that the heads divide, got {self}")


SHAPES: dict[Size, Shape] = {
    "tiny": Shape(width=64, depth=4, heads=4, hidden=128),
    "small": Shape(width=128, depth=6, heads=8, hidden=256),
    "base": Shape(width=256, depth=8, heads=8, hidden=512),
}


@dataclass(frozen=True)
class Derivation:
    """What is derived: every choice an ablation changes.

    roles, printed, splitting, potential: of the mixing half; tied: one pair of halves, repeated; target: whether the
    mixing half has a learned C, or a uniform one that holds no information; normalisation: features on a sphere, behind
    a dual variable that the steps add up in ("pre-norm"), or free; separate: whether the target
    term has a θ of its own, the paper's θ^(ℓ+½), in every half; relative: whether the mixing half's learned C has a
    logit for each distance instead of one for each pair of places; mixing_step: what the learned step of each head of
    the mixing half starts at, 1 for images and 4 for sequences unless said otherwise. With long ones tokens hear each
    other early, without which copying from the past is learned late.
    """

    roles: Roles = "own"
    printed: bool = False
    tied: bool = False
    target: bool = True
    splitting: SplittingName = "none"
    normalisation: Normalisation = "pre-norm"
    potential: PotentialName = "softmax"
    separate: bool = False
    relative: bool = False
    mixing_step: float | None = None

    @property
    def has_energies(self) -> bool:
        """Whether each half descends an energy of its own, which can be asked for."""
        return not self.separate


LATENT = 16
"""How many latent classes a head of the sorting half tells apart."""


class Embedding(nn.Module):
    """Symbols or patches as features ``(*batch, S, F)``, each with its position's added."""

    def __init__(self, inputs: Inputs, width: int) -> None:
        super().__init__()
        self.content = (
            nn.Linear(inputs.patch, width) if inputs.vocabulary is None else nn.Embedding(inputs.vocabulary, width)
        )
        self.positions = nn.Parameter(0.5 * torch.randn(inputs.tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        """Z before the first block."""
        embedded: Tensor = self.content(x) + self.positions[: x.shape[1]]
        return embedded


class PerHead(nn.Module):
    """Features to logits of each head, ``(*batch, H, S, K)``, through a hidden layer."""

    def __init__(self, width: int, hidden: int, heads: int, classes: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, hidden), nn.Linear(hidden, heads * classes)
        self.heads = heads

    def forward(self, Z: Tensor) -> Tensor:
        """The logits of C."""
        logits: Tensor = self.leave(nn.functional.gelu(self.enter(Z)))
        return logits.view(*logits.shape[:-1], self.heads, -1).movedim(-2, -3)


class DerivedTransformer(nn.Module):
    """The network of this module's first lines; ``stack`` holds the halves, ``decide`` the last block."""

    def __init__(self, inputs: Inputs, shape: Shape, derivation: Derivation | None = None) -> None:
        super().__init__()
        derivation = Derivation() if derivation is None else derivation
        self.inputs, self.shape, self.derivation = inputs, shape, derivation
        self.embedding = Embedding(inputs, shape.width)
        layers = 1 if derivation.tied else shape.depth
        halves = [half for _ in range(layers) for half in (self._mix(), self._sort())]
        self.stack = Stack(halves, repeats=shape.depth // layers)
        F = shape.width
        theta = _drawn(F, inputs.classes, F)
        self.decide = derive(
            CrossEntropy("classes"),
            Linear(theta, torch.zeros(inputs.classes)),
            oracle=Learned(
                nn.Sequential(nn.Linear(F, shape.hidden), nn.GELU(), nn.Linear(shape.hidden, inputs.classes))
            ),
            splitting=Euler(),
            step=LearnedStep(1.0),
            constraint=Sphere(F**0.5),
        )

    @property
    def uses_labels(self) -> bool:
        """Whether the true labels of the samples it acts on may enter."""
        return self.stack.uses_labels or self.decide.uses_labels

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the true classes: ``(n, K)`` for images, ``(n, S, K)`` for sequences."""
        return self.read(self.through(self.embedding(x)))

    def through(self, Z: Tensor) -> Tensor:
        """The features after all halves."""
        moved: Tensor = self.stack(Z)
        return moved

    def read(self, Z: Tensor) -> Tensor:
        """The last block on each token, or on the mean of an image's, and the logits through its θ."""
        decided: Tensor = self.decide(Z if self.inputs.causal else Z.mean(-2, keepdim=True))
        logits: Tensor = self.decide.model.logits(decided)
        return logits if self.inputs.causal else logits.squeeze(-2)

    def _mix(self) -> DerivedBlock:
        F, heads, S = self.shape.width, self.shape.heads, self.inputs.tokens
        choice = self.derivation
        h = (4.0 if self.inputs.causal else 1.0) if choice.mixing_step is None else choice.mixing_step

        def drawn() -> Quadratic:
            phi, psi = (_drawn(F, heads, F, F // heads) for _ in range(2))
            return Quadratic.from_factor(phi, choice.roles, psi)

        return derive(
            Objective(_potential(choice.potential)),
            drawn(),
            oracle=LearnedTargets(S, heads=heads, relative=choice.relative) if choice.target else Uniform(),
            splitting=_splitting(choice.splitting),
            step=LearnedStep(h, heads=heads),
            constraint=self._constraint(),
            target_model=drawn() if choice.separate else None,
            causal=self.inputs.causal,
            printed_form=choice.printed,
        )

    def _sort(self) -> DerivedBlock:
        F, heads = self.shape.width, self.shape.width // 8

        def drawn() -> Linear:
            return Linear(_drawn(F, heads, LATENT, F))

        return derive(
            CrossEntropy("classes"),
            drawn(),
            oracle=Learned(PerHead(F, self.shape.hidden, heads, LATENT)),
            splitting=_splitting(self.derivation.splitting),
            step=LearnedStep(1.0, heads=heads),
            constraint=self._constraint(),
            target_model=drawn() if self.derivation.separate else None,
        )

    def _constraint(self) -> Constraint:
        radius = self.shape.width**0.5
        kinds: dict[str, Constraint] = {"sphere": Sphere(radius), "pre-norm": Dual(radius), "free": Free()}
        return kinds[self.derivation.normalisation]


class Transformer(nn.Module):
    """The baseline: ``nn.TransformerEncoder``, pre-norm, with the same embedding and a linear read-out."""

    def __init__(self, inputs: Inputs, shape: Shape) -> None:
        super().__init__()
        self.inputs = inputs
        self.embedding = Embedding(inputs, shape.width)
        layer = nn.TransformerEncoderLayer(
            shape.width, shape.heads, shape.hidden, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, shape.depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(shape.width)
        self.readout = nn.Linear(shape.width, inputs.classes)
        future = torch.ones(inputs.tokens, inputs.tokens, dtype=torch.bool).triu(1) if inputs.causal else None
        self.register_buffer("future", future, persistent=False)

    uses_labels = False

    def forward(self, x: Tensor) -> Tensor:
        """Logits as ``DerivedTransformer`` gives them."""
        return self.read(self.through(self.embedding(x)))

    def through(self, Z: Tensor) -> Tensor:
        """The features after all layers, the last normalisation not among them."""
        moved: Tensor = self.encoder(Z, mask=self.future, is_causal=self.inputs.causal)
        return moved

    def read(self, Z: Tensor) -> Tensor:
        """The logits of each token, or of the mean of an image's."""
        normalised = self.norm(Z)
        logits: Tensor = self.readout(normalised if self.inputs.causal else normalised.mean(-2))
        return logits


class PaperStack(nn.Module):
    """The paper's block in depth: N = Zθᵀ + b over the true classes at every layer, on standardised pixels as they are.

    C comes from a learned network, since at inference there are no labels. tied: one θ for all layers, or θ^(ℓ) and
    θ^(ℓ+½), one for each half-step. The logits are read through the last layer's θ^(ℓ).
    """

    def __init__(self, inputs: Inputs, shape: Shape, tied: bool = True) -> None:
        super().__init__()
        self.inputs, self.shape = inputs, shape
        F, K = inputs.tokens * inputs.patch, inputs.classes

        def drawn() -> Linear:
            return Linear(torch.empty(K, F).uniform_(-1, 1) / F**0.5, torch.zeros(K))

        oracle = Learned(nn.Sequential(nn.Linear(F, shape.hidden), nn.GELU(), nn.Linear(shape.hidden, K)))
        blocks = [
            derive(
                CrossEntropy("classes"),
                drawn(),
                oracle=oracle,
                step=LearnedStep(1.0),
                target_model=None if tied else drawn(),
            )
            for _ in range(1 if tied else shape.depth)
        ]
        self.stack = Stack(blocks, repeats=shape.depth // len(blocks))

    uses_labels = False

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(n, K)`` of images as patches ``(n, S, patch)``."""
        return self.read(self.stack(self.features(x)))

    def features(self, x: Tensor) -> Tensor:
        """Z⁽⁰⁾ ``(n, 1, F)``: the pixels."""
        return x.flatten(1).unsqueeze(1)

    def read(self, Z: Tensor) -> Tensor:
        """Zθᵀ + b of the last layer."""
        logits: Tensor = self._last.model.logits(Z)
        return logits.squeeze(-2)

    def guess(self, Z: Tensor) -> Tensor:
        """The logits that C is made from."""
        assert isinstance(self._last.oracle, Learned)
        logits: Tensor = self._last.oracle.net(Z)
        return logits.squeeze(-2)

    @property
    def _last(self) -> DerivedBlock:
        last = self.stack.blocks[-1]
        assert isinstance(last, DerivedBlock)
        return last


Network = DerivedTransformer | Transformer | PaperStack


@torch.no_grad()
def energies(network: DerivedTransformer, x: Tensor) -> Tensor:
    """ℓ of each half before and after its own step ``(halves, 2)``, C held: the mean over samples and tokens."""
    Z, found = network.embedding(x), []
    for block in network.stack.sequence():
        Z = block.constraint.place(Z)
        flow = block.flow(Z)
        after = block(Z)
        found.append(torch.stack([flow.energy(Z).mean(), flow.energy(after).mean()]) / Z.shape[-2])
        Z = after
    return torch.stack(found)


def count(module: nn.Module) -> int:
    """How many numbers training may change."""
    return sum(parameter.numel() for parameter in module.parameters())


def matched(inputs: Inputs, shape: Shape, wanted: int) -> Shape:
    """The shape of the baseline with as many parameters: width, depth and heads kept, the hidden width chosen."""

    def sized(hidden: int) -> int:
        return count(Transformer(inputs, Shape(shape.width, shape.depth, shape.heads, hidden)))

    with torch.device("meta"):
        least, each = sized(1), sized(2) - sized(1)
    return Shape(shape.width, shape.depth, shape.heads, max(1, 1 + round((wanted - least) / each)))


def _drawn(width: int, *shape: int) -> Tensor:
    # On features of norm √F logits then start at about ½: C and p differ from the first step on, and so θ is heard.
    drawn: Tensor = torch.randn(shape) * 0.5 / width**0.5
    return drawn


def _potential(name: PotentialName) -> Potential:
    axis: Literal["classes"] = "classes"
    kinds: dict[str, Potential] = {
        "softmax": LogSumExp(axis), "entmax": Entmax(axis), "sigmoid": Softplus(axis), "linear": HalfSquare(axis),
    }  # fmt: skip
    return kinds[name]


def _splitting(name: SplittingName) -> Method:
    kinds: dict[str, Method] = {
        "none": Euler(), "lie-trotter": LieTrotter(), "strang": Strang(), "yoshida": Yoshida(),
    }  # fmt: skip
    return kinds[name]
