"""``xentflow derive``: a block from names, its derivation and its certificate."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.table import Table
from torch import Tensor

from xentflow.axes import Axis
from xentflow.block import DerivedBlock
from xentflow.certificate import Certificate, certify
from xentflow.constraints import Constraint, Dual, Free, Sphere, Whitened
from xentflow.derive import derive
from xentflow.errors import XentflowError
from xentflow.integrators import RK4, Euler, Heun, Method
from xentflow.models import Bilinear, Linear, Model, Quadratic, Roles
from xentflow.objective import Objective
from xentflow.oracles import Band, Given, Oracle, SelfPrediction, Shift, Uniform
from xentflow.potentials import Entmax, HalfSquare, LogSumExp, Potential, Softplus
from xentflow.records import report_console, require_writable, write_result
from xentflow.splitting import LieTrotter, Strang, Yoshida
from xentflow.steps import CertifiedStep, LearnedStep, LineSearch


@dataclass(frozen=True)
class DeriveConfig:
    """Parts of a block, by name, and the size of the random instance its certificate is measured on.

    Args:
        model: N of Z.
        axis: along which each distribution sums to one; there is no default.
        potential: the convex function whose gradient gives the attention weights.
        temperature: of logsumexp.
        splitting: lie-trotter, strang and yoshida split attention from target; the others step the whole flow.
        exact: solve the target's sub-flow exactly.
        oracle: where the targets come from; "given" is tried with random ones.
        roles: of a token in the quadratic model.
        heads: number of heads, each with its own theta.
        rank: of a factor phi with theta = phi phi^T, in the quadratic model.
        constraint: where features live; "dual" is pre-norm, of radius √F.
        step: a number, "learned", "certified" or "line-search".
        causal: no token sees a later one.
        printed_form: the paper's quadratic form as printed.
        tokens: S.
        features: F.
        classes: K, for linear and bilinear models.
        samples: in the batch the certificate is measured on.
        form: of the derivation.
        seed: of theta and of the random input.
    """

    model: Literal["linear", "quadratic", "bilinear"]
    axis: Axis
    potential: Literal["logsumexp", "softplus", "halfsquare", "entmax", "sparsemax"] = "logsumexp"
    temperature: float = 1.0
    splitting: Literal["lie-trotter", "strang", "yoshida", "euler", "heun", "rk4"] = "lie-trotter"
    exact: bool = False
    oracle: Literal["given", "uniform", "self-prediction", "shift", "band"] = "given"
    roles: Roles = "both"
    heads: int | None = None
    rank: int | None = None
    constraint: Literal["free", "sphere", "dual", "whitened"] = "free"
    step: float | Literal["learned", "certified", "line-search"] = 0.1
    causal: bool = False
    printed_form: bool = False
    tokens: int = 16
    features: int = 8
    classes: int = 5
    samples: int = 4
    form: Literal["text", "latex"] = "text"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "features", "classes", "samples", "heads", "rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise XentflowError(f"{name}: expected a positive whole number, got {value}")
        if self.model != "quadratic" and (self.roles == "own" or self.rank is not None):
            raise XentflowError(f"roles and rank: expected with the quadratic model, got the {self.model} one")
        if self.potential != "logsumexp" and self.temperature != 1:
            raise XentflowError(f"temperature: expected with logsumexp, got {self.potential}")
        build(self)


def build(config: DeriveConfig) -> tuple[DerivedBlock, Tensor, dict[str, Tensor | None]]:
    """The block, and a random instance for it: features, and targets or a context where it takes them."""
    generator = torch.Generator().manual_seed(config.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    step = {"learned": LearnedStep(0.1), "certified": CertifiedStep(), "line-search": LineSearch()}.get(
        str(config.step), config.step
    )
    block = derive(
        Objective(_potential(config)),
        _model(config, normal),
        oracle=_oracle(config),
        splitting=_splitting(config),
        step=step,  # type: ignore[arg-type]
        constraint=_constraint(config),
        causal=config.causal,
        printed_form=config.printed_form,
    ).double()
    Z = block.constraint.place(normal(config.samples, config.tokens, config.features))
    inputs: dict[str, Tensor | None] = {}
    model = block.model
    if isinstance(model, Bilinear):
        inputs["context"] = context = normal(config.samples, config.classes, config.features)
        model = model.at(context)
    if isinstance(block.oracle, Given):
        logits = normal(*model.logits_like(Z).shape)
        if config.causal:
            lower = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
            logits = logits.masked_fill(~(lower if config.axis == "classes" else lower.mT), -torch.inf)
        inputs["targets"] = torch.softmax(logits, block.objective.potential.dim)
    return block, Z, inputs


def run(config: DeriveConfig, output: Path) -> int:
    """The command: the derivation and the certificate on the terminal, both in ``output``."""
    require_writable(output)
    console = report_console()
    block, Z, inputs = build(config)
    derivation = block.derivation(config.form)
    console.print(derivation, markup=False, highlight=False, soft_wrap=True)
    certificate = certify(block, Z, inputs)
    if config.form == "text":
        console.print()
        console.print(table(certificate))
    figures = {"derivation": derivation, "certificate": certificate.record()}
    path = write_result(output, "derive", asdict(config), figures, labels="nowhere: targets given are random")
    if config.form == "text":
        console.print(f"Written: {path}", soft_wrap=True, highlight=False)
    return 0


def table(certificate: Certificate) -> Table:
    """The certificate, a line each."""
    c = certificate
    against = {"gradient flow": "the gradient of ℓ", "game": "each token's own gradient"}
    shown = Table(title="Certificate", title_justify="left", title_style="bold", box=None, pad_edge=False)
    shown.add_column("what", no_wrap=True)
    shown.add_column("measured, float64", overflow="fold")
    shown.add_row("kind", c.kind)
    shown.add_row(f"velocity against {against.get(c.kind, 'the gradient of ℓ')}", f"{c.gradient_error:.1e} relative")
    if c.dissipation_error is not None:
        shown.add_row("dℓ/dt against the dissipation", f"{c.dissipation_error:.1e} relative")
    if c.constraint_error is not None:
        shown.add_row("one step leaves the constraint set by", f"{c.constraint_error:.1e} relative")
    if c.curvature is None:
        shown.add_row("curvature bound L", "none: the curvature of ℓ grows with Z")
    else:
        verdict = (
            "a pass is one gradient step below 2/L and cannot raise ℓ" if c.certified else "a pass is not certified"
        )
        shown.add_row("curvature bound L", f"{c.curvature:.4g}; {verdict}")
    shown.add_row("step h", f"{c.step:.4g}")
    measured = (
        "none could be measured: nothing moves, or from the origin"
        if c.measured_order is None
        else f"measured {c.measured_order:.2f}"
    )
    shown.add_row("order", f"declared {c.declared_order}, {measured}")
    shown.add_row("ℓ over ten passes", " ".join(f"{value:.4g}" for value in c.energy))
    shown.add_row("rises of ℓ, samples × passes", str(c.rises))
    shown.add_row("parameters", f"{c.parameters:,}")
    shown.add_row("FLOPs of matrix products, a pass", f"{c.flops:,}")
    shown.add_row("least bytes moved in float32, a pass", f"{c.least_bytes:,}")
    return shown


def _potential(config: DeriveConfig) -> Potential:
    return {
        "logsumexp": LogSumExp(config.axis, config.temperature),
        "softplus": Softplus(config.axis),
        "halfsquare": HalfSquare(config.axis),
        "entmax": Entmax(config.axis, 1.5),
        "sparsemax": Entmax(config.axis, 2.0),
    }[config.potential]


def _model(config: DeriveConfig, normal: Callable[..., Tensor]) -> Model:
    heads = () if config.heads is None else (config.heads,)
    F, K = config.features, config.classes
    if config.model == "linear":
        return Linear(normal(*heads, K, F) / F**0.5, normal(*heads, K) / F**0.5)
    if config.model == "bilinear":
        return Bilinear(normal(*heads, F, F) / F)
    if config.rank is not None:
        return Quadratic.from_factor(normal(*heads, F, config.rank) / F**0.5, roles=config.roles)
    return Quadratic(normal(*heads, F, F) / F, roles=config.roles)


def _oracle(config: DeriveConfig) -> Oracle:
    made: dict[str, Oracle] = {
        "given": Given(),
        "uniform": Uniform(),
        "self-prediction": SelfPrediction(temperature=0.5),
        "shift": Shift(-1 if config.causal else 1),
        "band": Band(),
    }
    return made[config.oracle]


def _splitting(config: DeriveConfig) -> Method:
    splittings: dict[str, Method] = {
        "lie-trotter": LieTrotter(exact=config.exact),
        "strang": Strang(exact=config.exact),
        "yoshida": Yoshida(exact=config.exact),
    }
    whole: dict[str, Method] = {"euler": Euler(), "heun": Heun(), "rk4": RK4()}
    if config.exact and config.splitting in whole:
        raise XentflowError(f"exact: expected a splitting, got {config.splitting}, which does not split")
    return (splittings | whole)[config.splitting]


def _constraint(config: DeriveConfig) -> Constraint:
    dual = Dual(config.features**0.5)
    return {"free": Free(), "sphere": Sphere(), "dual": dual, "whitened": Whitened()}[config.constraint]
