"""The printed derivation: objective → gradient → flow → splitting → block, written out for one choice of parts.

Every formula is written once, in LaTeX; the terminal's text is a rendering of it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from xentflow._notation import Row, as_latex, as_text
from xentflow.axes import require_type
from xentflow.constraints import Constraint, Dual, Free, Sphere, Whitened
from xentflow.errors import XentflowError
from xentflow.integrators import Euler, Method
from xentflow.models import Bilinear, Functional, Linear, Model, Quadratic
from xentflow.objective import Objective
from xentflow.oracles import Oracle
from xentflow.potentials import Entmax, HalfSquare, LogSumExp, Potential, Softplus
from xentflow.splitting import Splitting
from xentflow.steps import CertifiedStep, LearnedStep, LineSearch


@dataclass(frozen=True)
class Parts:
    """What a derivation is written from."""

    objective: Objective
    model: Model
    target_model: Model | None
    oracle: Oracle
    splitting: Method
    step: object
    constraint: Constraint
    causal: bool
    printed_form: bool
    kind: str


def write_derivation(parts: Parts, form: Literal["text", "latex"]) -> str:
    """The derivation as aligned lines for a terminal, or as LaTeX (an ``align*`` and sentences) to paste."""
    if form not in ("text", "latex"):
        raise XentflowError(f'derivation: expected "text" or "latex", got {form!r}')
    require_type("objective", parts.objective, Objective)
    rows = list(_rows(parts))
    if isinstance(parts.step, LearnedStep) and parts.step.heads is not None:
        # Steps of their own are weights of the heads, in the objective and in all that follows from it.
        rows = [
            replace(row, formulas=tuple(f.replace(r"\sum_h ", r"\sum_h w_h ") for f in row.formulas)) for row in rows
        ]
    return as_latex(rows) if form == "latex" else as_text(rows)


def _rows(parts: Parts) -> Iterator[Row]:
    potential, model = parts.objective.potential, parts.model
    omega, weights, meaning = _potential(potential)
    masked = " over the entries a mask leaves" + (", the past and itself for each token" if parts.causal else "")
    X = _features(parts)
    yield Row(
        "objective",
        (
            rf"\ell({X}) = {_sum(model)}\langle 1, \Omega({_n(model)})\rangle - \langle {_c(model)}, "
            rf"{_n(model)}\rangle",
        ),
    )
    yield Row(
        "potential",
        (
            rf"\Omega(N) = {omega}",
            rf"{_p(model)} = \nabla\Omega({_n(model)}) = {weights.replace('@', _n(model))}",
        ),
        f"along the {parts.objective.axis} axis: {meaning}{masked if parts.causal else ''}",
    )
    yield Row("model", (rf"{_n(model)} = {_logits(model, X)}",), _sizes(model))
    attention, target = _terms(parts, X)
    if parts.kind == "gradient flow":
        yield Row("gradient", (rf"\partial_{X} \ell = {attention} - {_grouped(target)}",))
    elif parts.printed_form:
        yield Row(
            "printed form",
            (rf"G = {attention} - {_grouped(target)}",),
            "the paper's Eq. (8) as printed, which takes p^T = p: not the gradient of l",
        )
    elif parts.kind == "no common energy":
        yield Row(
            "direction",
            (rf"G = {attention} - {_grouped(target)}",),
            "with another matrix in the target term: not the gradient of l",
        )
    else:
        yield Row(
            "own part",
            (rf"G = {attention} - {_grouped(target)}",),
            "of the gradient: each token descends its own distribution's l; others, and its own other role, held fixed",
        )
    yield from _flow_rows(parts, attention, target)
    yield Row(
        "targets",
        (),
        f"C from {type(parts.oracle).__name__}, which sees {parts.oracle.sees}; "
        f"labels {'enter' if parts.oracle.uses_labels else 'do not enter'}",
    )
    yield Row("step", (_step(parts.step),) if _step(parts.step).startswith("h") else (), _step_remark(parts.step))
    yield Row("splitting", (), _splitting(parts.splitting))
    yield Row("block", tuple(_block(parts)))  # fmt: skip


def _flow_rows(parts: Parts, attention: str, target: str) -> Iterator[Row]:
    project = "" if isinstance(parts.constraint, Free | Dual) else "P_{Z}"
    velocity = rf"{target} - {_grouped(attention)}"
    moved = rf"\dot Z = {project}\left[{velocity}\right]" if project else rf"\dot Z = {velocity}"
    energy = (_dissipation(parts.constraint, project),) if parts.kind == "gradient flow" else ()
    remark = "" if energy else f"a {parts.kind}: no common energy need fall" if parts.kind == "game" else parts.kind
    yield Row("flow", (moved, *energy), remark)
    if isinstance(parts.constraint, Dual):
        r = f"{parts.constraint.radius:g}"
        yield Row("dual", (rf"\psi^*(z) = {r}\lVert z\rVert", rf"x = \nabla\psi^*(z) = {r}z/\lVert z\rVert"),
                  "for each token: z adds up the steps, and what is seen of it is x, on a sphere")  # fmt: skip
    if isinstance(parts.constraint, Sphere):
        radius = r"\lVert z\rVert" if parts.constraint.radius is None else f"{parts.constraint.radius:g}"
        yield Row("sphere", (r"P_z v = v - z\langle z, v\rangle / \lVert z\rVert^2",
                              rf"R_z(v) = {radius}(z + v)/\lVert z + v\rVert"), "for each token z")  # fmt: skip
    if isinstance(parts.constraint, Whitened):
        yield Row("whitened", (r"P_Z V = V - Z(Z^T V + V^T Z)/(2S)", r"R_Z(V) = \sqrt{S}\,\mathrm{qf}(Z + V)"),
                   "qf: the orthonormal factor of QR, with positive diagonal in R")  # fmt: skip


def _dissipation(constraint: Constraint, project: str) -> str:
    if isinstance(constraint, Dual):
        return (rf"\dot\ell = -\sum {constraint.radius:g}\lVert P_x \partial_x \ell\rVert^2 / \lVert z\rVert, "
                r"\quad P_x v = v - x\langle x, v\rangle / \lVert x\rVert^2")  # fmt: skip
    return rf"\dot\ell = -\lVert {project + ' ' if project else ''}\partial_Z \ell\rVert^2"


def _features(parts: Parts, Z: str = "Z") -> str:
    """What the model sees of a state."""
    return Z.replace("Z", "X") if isinstance(parts.constraint, Dual) else Z


def _potential(potential: Potential) -> tuple[str, str, str]:
    direction = {"classes": "every row of p is one distribution", "sequence": "every column of p is one distribution"}
    each = "each entry for itself"
    if isinstance(potential, LogSumExp):
        T = potential.temperature
        if T == 1:
            return r"\log\sum\exp N", r"\mathrm{softmax}(@)", direction[potential.axis]
        return (rf"{T:g}\log\sum\exp(N/{T:g})", rf"\mathrm{{softmax}}(@/{T:g})", direction[potential.axis])
    if isinstance(potential, Entmax):
        name = rf"\mathrm{{entmax}}_{{{potential.alpha:g}}}(@)"
        return r"\max_{p}\langle p, N\rangle - \Omega^*(p)", name, f"{direction[potential.axis]}, many entries zero"
    if isinstance(potential, Softplus):
        return r"\sum\log(1 + \exp N)", r"\mathrm{sigmoid}(@)", each
    if isinstance(potential, HalfSquare):
        return r"\tfrac12\sum N^2", "@", each
    name = type(potential).__name__
    return rf"\mathrm{{{name}}}(N)", rf"\mathrm{{{name}}}'(@)", f"{name} and its derivative are the caller's"


def _sub(symbol: str, model: Model) -> str:
    return symbol if model.heads is None else f"{symbol}_h"


def _sum(model: Model) -> str:
    return "" if model.heads is None else r"\sum_h "


def _n(model: Model) -> str:
    return _sub("N", model)


def _p(model: Model) -> str:
    return _sub("p", model)


def _c(model: Model) -> str:
    return _sub("C", model)


def _theta(model: Model, accent: str = "") -> str:
    if isinstance(model, Quadratic) and model.phi is not None:
        queries, keys = _factors(model, accent)
        return f"{queries}{keys}^T"
    return _sub(rf"\theta{accent}", model)


def _transposed_theta(model: Model, accent: str = "") -> str:
    if isinstance(model, Quadratic) and model.phi is not None:
        queries, keys = _factors(model, accent)
        return f"{keys}{queries}^T"
    return f"{_theta(model, accent)}^T"


def _factors(model: Quadratic, accent: str) -> tuple[str, str]:
    phi = _sub(rf"\phi{accent}", model)
    return phi, phi if model.psi is None else _sub(rf"\psi{accent}", model)


def _logits(model: Model, Z: str) -> str:
    if isinstance(model, Linear):
        return f"{Z}{_theta(model)}^T" + ("" if model.bias is None else rf" + {_sub('b', model)}")
    # The space ends \theta, which would else read on into the letter behind it.
    if isinstance(model, Quadratic):
        return f"{Z}{_theta(model)} {Z}^T"
    if isinstance(model, Bilinear):
        return f"{Z}{_theta(model)} Y^T"
    return f"f({Z})" if model.heads is None else f"f_h({Z})"


def _pullback(model: Model, M: str, Z: str, axis: str, accent: str = "") -> str:
    total = _sum(model)
    if isinstance(model, Linear):
        return rf"{total}{M}{_theta(model, accent)}"
    if isinstance(model, Bilinear):
        return rf"{total}{M}Y{_transposed_theta(model, accent)}"
    if isinstance(model, Quadratic):
        query = f"{M}{Z}{_transposed_theta(model, accent)}"
        key = f"{M}^T{Z}{_theta(model, accent)}"
        if model.is_gradient:
            return rf"{total}({query} + {key})" if total else f"{query} + {key}"
        return f"{total}{query}" if axis == "classes" else f"{total}{key}"
    f = _sub(f"f{accent}", model)
    return rf"{total}{M} : \partial_{Z[0]} {f}({Z})"


def _terms(parts: Parts, Z: str) -> tuple[str, str]:
    model, axis = parts.model, parts.objective.axis
    accent = "" if parts.target_model is None else "'"
    target = _pullback(model if parts.target_model is None else parts.target_model, _c(model), Z, axis, accent)
    if parts.printed_form:
        return rf"{_sum(model)}2{_p(model)}{Z}{_transposed_theta(model)}", target
    return _pullback(model, _p(model), Z, axis), target


def _grouped(term: str) -> str:
    return rf"\left({term}\right)" if " + " in term and not term.startswith(r"\sum") else term


def _sizes(model: Model) -> str:
    if isinstance(model, Functional):
        return type(model.fn).__name__
    assert isinstance(model, nn.Module)
    held = (*model.named_parameters(), *model.named_buffers())
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in held)


def _step(step: object) -> str:
    return f"h = {step:g}" if isinstance(step, float | int) else ""


def _step_remark(step: object) -> str:
    if isinstance(step, LearnedStep):
        if step.heads is not None:
            return f"h = 1, with weights w_h > 0 of the heads learned, started at {step.initial:g}"
        each = "" if step.features is None else ", one for each feature"
        return f"h > 0 learned, started at {step.initial:g}{each}"
    if isinstance(step, CertifiedStep):
        return "h = 1/L, with L the certified bound on the curvature of l: no step raises l"
    if isinstance(step, LineSearch):
        return f"h by Armijo line search from {step.initial:g}, for each sample: no step raises l"
    return ""


def _splitting(splitting: Method) -> str:
    name = type(splitting).__name__
    if isinstance(splitting, Splitting):
        exact = ", the target's sub-flow exact" if splitting.exact else ""
        return f"{name} with {type(splitting.substep).__name__} sub-steps{exact}; order {splitting.order}"
    return f"none: one {name} step of the whole flow; order {splitting.order}"


def _block(parts: Parts) -> Iterator[str]:
    splitting, free = parts.splitting, isinstance(parts.constraint, Free | Dual)

    def moved(Z: str, velocity: str, h: str) -> str:
        if free:
            sign, velocity = ("-", velocity[1:]) if velocity.startswith("-") else ("+", velocity)
            return rf"{Z} {sign} {h}\,{_bracketed(velocity)}"
        return rf"R_{{{Z}}}\left({h}\,P_{{{Z}}}\left[{velocity}\right]\right)"

    if not isinstance(splitting, Splitting):
        attention, target = _terms(parts, _features(parts))
        velocity = f"{target} - {_grouped(attention)}"
        if isinstance(splitting, Euler):
            yield f"Z^+ = {moved('Z', velocity, 'h')}"
        else:
            yield rf"Z^+ = \Phi_h(Z), \text{{ one {type(splitting).__name__} step of }} \dot Z = {velocity}"
        return
    schedule = splitting.schedule()
    for index, (term, fraction) in enumerate(schedule, start=1):
        before = "Z" if index == 1 else f"Z_{{{index - 1}}}"
        after = "Z^+" if index == len(schedule) else f"Z_{{{index}}}"
        h = "h" if fraction == 1 else f"{fraction:.4g}h"
        X = _features(parts, before)
        attention, target = _terms(parts, X)
        velocity = _negated(attention) if term == 0 else target
        weights = _at_point(parts, X) if term == 0 else ""
        degree = (parts.target_model or parts.model).pullback_degree
        if term == 1 and splitting.exact and degree == 1:
            yield rf"{after} = \exp({h}A){before}, \quad A: Z \mapsto {_terms(parts, 'Z')[1]}"
        elif (
            isinstance(splitting.substep, Euler)
            or (term == 1 and splitting.exact)
            or (term == 1 and degree == 0 and free)
        ):
            yield f"{after} = {moved(before, velocity, h)}{weights}"
        else:
            name = type(splitting.substep).__name__
            yield rf"{after} = \Phi_{{{h}}}({before}), \text{{ one {name} step of }} \dot Z = " + (
                _negated(_terms(parts, _features(parts))[0]) if term == 0 else _terms(parts, _features(parts))[1]
            )


def _at_point(parts: Parts, Z: str) -> str:
    _, weights, _ = _potential(parts.objective.potential)
    inside = _logits(parts.model, Z)
    return rf", \quad {_p(parts.model)} = {weights.replace('@', inside)}"


def _negated(term: str) -> str:
    return f"-{_grouped(term)}" if " + " in term else f"-{term}"


def _bracketed(term: str) -> str:
    already = term.startswith(r"\left(") or (term.startswith(r"\sum") and term.count(r"\sum") == 1)
    return term if already or not re.search(r" [+-] |:", term) else rf"\left({term}\right)"
