"""Rendering of rows of LaTeX formulas, as LaTeX to paste or as plain text for a terminal."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A heading, formulas in LaTeX, and a remark in words; "l" and "p^T" in a remark are the symbols."""

    heading: str
    formulas: tuple[str, ...]
    remark: str = ""


def as_latex(rows: Iterable[Row]) -> str:
    """An ``align*`` for the formulas of each row, a sentence for each remark; needs amsmath."""
    lines = []
    for row in rows:
        if row.formulas:
            body = " \\\\\n".join("  " + formula.replace(" = ", " &= ", 1) for formula in row.formulas)
            lines.append(f"% {row.heading}\n\\begin{{align*}}\n{body}\n\\end{{align*}}")
        if row.remark:
            lines.append(f"\\noindent\\emph{{{row.heading.capitalize()}:}} {_latex_words(row.remark)}.\\par")
    return "\n".join(lines)


def as_text(rows: Iterable[Row]) -> str:
    """One line a formula, aligned behind the headings."""
    rows = list(rows)
    width = max(len(row.heading) for row in rows) + 2
    lines = []
    for row in rows:
        shown = [_plain(formula) for formula in row.formulas] + ([_plain_words(row.remark)] if row.remark else [])
        lines += [f"{row.heading if index == 0 else '':<{width}}{line}" for index, line in enumerate(shown)]
    return "\n".join(lines)


def _latex_words(remark: str) -> str:
    remark = remark.replace("_", r"\_").replace("p^T = p", "$p^T = p$").replace(r"w\_h", "$w_h$").replace(">", "$>$")
    return re.sub(r"\bl\b", r"$\\ell$", remark)


def _plain_words(remark: str) -> str:
    return re.sub(r"\bl\b", "ℓ", remark).replace("p^T", "pᵀ").replace("w_h", "wₕ")


def _subscript(match: re.Match[str]) -> str:
    return "".join("₀₁₂₃₄₅₆₇₈₉"[int(digit)] for digit in match[1])


_RENDERINGS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"\\(text|mathrm)\{([^}]*)\}", r"\2"),
    (r"\\(left|right)", ""),
    (r"\\quad ?|\\,", " "),
    (r"\\dot Z", "Ż"),
    (r"\\dot\\ell", "dℓ/dt"),
    (r"\\ell", "ℓ"),
    (r"\\theta'", "θ′"),
    (r"\\psi\^\*", "ψ*"),
    (r"\\phi'", "φ′"),
    (r"\\psi'", "ψ′"),
    (r"f'", "f′"),
    (r"\\theta", "θ"),
    (r"\\phi", "φ"),
    (r"\\psi", "ψ"),
    (r"(?<=[θφψTh]) (?=[XYZ])", ""),
    (r"\\Omega\^\*", "Ω*"),
    (r"\\Omega", "Ω"),
    (r"\\Phi", "Φ"),
    (r"\\nabla", "∇"),
    (r"\\partial_[XZx] ?", "∂"),
    (r"\\langle ?", "⟨"),
    (r"\\rangle", "⟩"),
    (r"\\lVert ?", "‖"),
    (r"\\rVert", "‖"),
    (r"\\sum_h ?", "Σₕ "),
    (r"\\sum ?", "Σ "),
    (r"\\log ?", "log "),
    (r"\\exp\b ?(?=N)", "exp "),
    (r"\\exp", "exp"),
    (r"\\tfrac12", "½ "),
    (r"\\sqrt\{S\}", "√S"),
    (r"\\max_\{p\}", "max over p of "),
    (r"\\mapsto", "↦"),
    (r"\^T", "ᵀ"),
    (r"\^2", "²"),
    (r"Z\^\+", "Z⁺"),
    (r"_\{(\d+)\}", _subscript),
    (r"_\{([^}]*)\}", r"[\1]"),
    (r"_h\b", "ₕ"),
    (r"(?<=[NpCθφψbfw′])_h", "ₕ"),
    (r" - ", " − "),
    (r"(?<![\w])-(?=\S)", "−"),
    (r" +", " "),
    (r"(?<=[^ ⟨(\[=‖])log Σ", " log Σ"),
)


def _plain(formula: str) -> str:
    for pattern, replacement in _RENDERINGS:
        formula = re.sub(pattern, replacement, formula)
    return formula.strip()
