"""The printed derivation: it says what this choice of parts implies, in clean text and in balanced LaTeX."""

import re
from itertools import product

import pytest
import torch
from torch import nn

import xentflow as xf
from flow_instances import AXES

F, K, H = 3, 4, 2
WEIGHTS = {
    "softmax(": xf.LogSumExp,
    "softmax(N/2)": lambda axis: xf.LogSumExp(axis, temperature=2.0),
    "sigmoid(": xf.Softplus,
    "½ Σ": xf.HalfSquare,
    "entmax[1.5](": xf.Entmax,
}
# Of a model: what its logits are, and its attention and target term in the query's and the key's role.
LOGITS = {
    "linear": "Zθᵀ",
    "linear-bias": "Zθᵀ + b",
    "both": "ZθZᵀ",
    "own": "ZθZᵀ",
    "factor": "ZφφᵀZᵀ",
    "factors": "ZφψᵀZᵀ",
    "bilinear": "ZθYᵀ",
    "functional": "f(Z)",
}
TERMS = {
    "linear": ("pθ", "Cθ"),
    "linear-bias": ("pθ", "Cθ"),
    "both": ("pZθᵀ + pᵀZθ", "CZθᵀ + CᵀZθ"),
    "factor": ("pZφφᵀ + pᵀZφφᵀ", "CZφφᵀ + CᵀZφφᵀ"),
    "factors": ("pZψφᵀ + pᵀZφψᵀ", "CZψφᵀ + CᵀZφψᵀ"),
    "bilinear": ("pYθᵀ", "CYθᵀ"),
    "functional": ("p : ∂f(Z)", "C : ∂f(Z)"),
}
OWN = {"classes": ("pZθᵀ", "CZθᵀ"), "sequence": ("pᵀZθ", "CᵀZθ")}
SPLITTINGS = (
    xf.LieTrotter(),
    xf.LieTrotter(exact=True),
    xf.LieTrotter(substep=xf.RK4()),
    xf.Strang(),
    xf.Strang(exact=True),
    xf.Yoshida(),
    xf.Euler(),
    xf.Heun(),
    xf.RK4(),
)

# Every control word of LaTeX and amsmath that a derivation is made of; any other would stop a paper from compiling.
CONTROL_WORDS = re.compile(
    r"begin|end|noindent|emph|par|left|right|quad|mathrm|text|dot|ell|theta|phi|psi|Omega|Phi|nabla|partial|langle|rangle|"
    r"lVert|rVert|sum|log|exp|tfrac|max|sqrt|mapsto"
)


def model(kind, heads=None):
    head = () if heads is None else (heads,)
    if kind.startswith("linear"):
        return xf.Linear(torch.ones(*head, K, F), torch.zeros(*head, K) if "bias" in kind else None)
    if kind in ("both", "own"):
        return xf.Quadratic(torch.ones(*head, F, F), roles=kind)
    if kind in ("factor", "factors"):
        phi = torch.ones(*head, F, 2)
        return xf.Quadratic.from_factor(phi, psi=None if kind == "factor" else phi)
    if kind == "bilinear":
        return xf.Bilinear(torch.ones(*head, F, 2))
    return xf.Functional(nn.Linear(F, K), heads=heads)


def without_heads(text):
    return text.replace("ₕ", "").replace("Σ ", "")


def clean(text, latex):
    assert "\\" not in text
    assert "{" not in text
    assert "}" not in text
    assert "_h" not in text
    assert "^" not in text
    assert "  =" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    depth = 0
    for character in latex.replace(r"\{", "").replace(r"\}", ""):
        depth += (character == "{") - (character == "}")
        assert depth >= 0
    assert depth == 0
    for opening, closing in ((r"\left", r"\right"), (r"\begin{align*}", r"\end{align*}"), (r"\langle", r"\rangle")):
        assert latex.count(opening) == latex.count(closing)
    assert latex.replace(r"\lVert", "").count(r"\rVert") == latex.count(r"\lVert")
    assert latex.isascii()
    assert all(CONTROL_WORDS.fullmatch(word) for word in re.findall(r"\\([A-Za-z]+)", latex))
    for words in re.findall(r"\\noindent.*", latex):
        # In running text these mean something else, or print as another sign in TeX's first font encoding.
        assert not set("<>_^|#%&~") & set(re.sub(r"\$[^$]*\$|\\_", "", words)), words


def row(text, heading):
    """The lines under one heading."""
    lines, found = text.splitlines(), []
    for line in lines:
        if line.startswith(heading + " "):
            found = [line]
        elif found and line.startswith(" "):
            found.append(line)
        elif found:
            break
    return "\n".join(found)


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("axis", AXES)
class TestEveryChoice:
    def test_says_what_follows(self, axis, kind):
        for (weights, potential), splitting in product(WEIGHTS.items(), SPLITTINGS):
            if kind == "functional" and getattr(splitting, "exact", False):
                continue
            block = xf.derive(xf.Objective(potential(axis)), model(kind), splitting=splitting, step=0.25)
            text, latex = block.derivation("text"), block.derivation("latex")
            clean(text, latex)
            attention, target = OWN[axis] if kind == "own" else TERMS[kind]
            assert "ℓ(Z) = ⟨1, Ω(N)⟩ − ⟨C, N⟩" in row(text, "objective")
            assert weights in row(text, "potential")
            assert f"along the {axis} axis" in row(text, "potential")
            assert f"N = {LOGITS[kind]}" in row(text, "model")

            def grouped(term):
                return f"({term})" if " + " in term else term

            gradient = f"{attention} − {grouped(target)}"
            assert gradient in row(text, "own part" if kind == "own" else "gradient")
            assert f"Ż = {target} − {grouped(attention)}" in row(text, "flow")
            assert ("dℓ/dt = −‖∂ℓ‖²" in text) == (kind != "own")
            assert ("a game: no common energy need fall" in text) == (kind == "own")
            assert "h = 0.25" in row(text, "step")
            assert type(splitting).__name__ in row(text, "splitting")
            assert f"order {splitting.order}" in row(text, "splitting")
            steps = row(text, "block")
            assert "Z⁺ = " in steps
            stages = len(splitting.schedule()) if isinstance(splitting, xf.Splitting) else 1
            assert len(steps.splitlines()) == stages
            exact = getattr(splitting, "exact", False) and kind in ("both", "own", "factor", "factors")
            assert ("exp(" in steps) == exact

    def test_with_heads_every_symbol_has_its_own(self, axis, kind):
        block = xf.derive(xf.CrossEntropy(axis), model(kind, H))
        text, latex = block.derivation(), block.derivation("latex")
        clean(text, latex)
        assert "Nₕ = " in text
        assert "Σₕ" in row(text, "objective")
        assert "Σₕ" in row(text, "block")
        own = {"factor": "φₕ", "factors": "φₕ ψₕ", "functional": "fₕ", "linear-bias": "bₕ"}
        for symbol in own.get(kind, "θₕ").split():
            assert symbol in text
        one = xf.derive(xf.CrossEntropy(axis), model(kind)).derivation()
        attention = (OWN[axis] if kind == "own" else TERMS[kind])[0]
        assert attention in one
        assert attention in without_heads(row(text, "flow"))

    def test_another_theta_is_primed(self, axis, kind):
        for heads in (None, H):
            block = xf.derive(xf.CrossEntropy(axis), model(kind, heads), target_model=model(kind, heads))
            text, latex = block.derivation(), block.derivation("latex")
            clean(text, latex)
            symbol = {"factor": "φ′", "factors": "ψ′", "functional": "f′"}.get(kind, "θ′")
            assert symbol in row(text, "block").splitlines()[-1]
            assert symbol not in row(text, "block").splitlines()[0]
            assert "dℓ/dt" not in text

    @pytest.mark.parametrize("constraint", [xf.Sphere(), xf.Sphere(2.0), xf.Whitened()], ids=repr)
    def test_a_constraint_projects_and_retracts(self, axis, kind, constraint):
        for splitting in (xf.LieTrotter(), xf.Strang(), xf.Yoshida(), xf.Euler(), xf.RK4()):
            block = xf.derive(xf.CrossEntropy(axis), model(kind), constraint=constraint, splitting=splitting)
            text, latex = block.derivation(), block.derivation("latex")
            clean(text, latex)
            assert "Ż = P[Z][" in row(text, "flow")
            assert type(constraint).__name__.lower() in text
            if isinstance(splitting, xf.Euler):
                assert "Z⁺ = R[Z](h P[Z][" in text
            if kind != "own":
                assert "‖P[Z] ∂ℓ‖²" in text

    def test_a_dual_state_is_moved_freely_and_seen_on_a_sphere(self, axis, kind):
        attention, target = (term.replace("Z", "X") for term in (OWN[axis] if kind == "own" else TERMS[kind]))

        def grouped(term):
            return f"({term})" if " + " in term else term

        for splitting in (xf.LieTrotter(), xf.Strang(), xf.Yoshida(), xf.Euler(), xf.RK4()):
            block = xf.derive(xf.CrossEntropy(axis), model(kind), constraint=xf.Dual(2.5), splitting=splitting)
            text, latex = block.derivation(), block.derivation("latex")
            clean(text, latex)
            assert "ℓ(X) = " in row(text, "objective")
            assert f"N = {LOGITS[kind].replace('Z', 'X')}" in row(text, "model")
            heading = "own part" if kind == "own" else "gradient"
            assert f"{attention} − {grouped(target)}" in row(text, heading)
            assert f"Ż = {target} − {grouped(attention)}" in row(text, "flow")
            fall = "dℓ/dt = −Σ 2.5‖P_x ∂ℓ‖² / ‖z‖, P_x v = v − x⟨x, v⟩ / ‖x‖²"
            assert (fall in row(text, "flow")) == (kind != "own")
            assert row(text, "dual").splitlines()[:2] == [
                "dual       ψ*(z) = 2.5‖z‖",
                "           x = ∇ψ*(z) = 2.5z/‖z‖",
            ]
            assert "R[" not in text
            assert "P[" not in text
            if isinstance(splitting, xf.Euler):
                assert row(text, "block") == f"block      Z⁺ = Z + h ({target} − {grouped(attention)})"
            if splitting == xf.LieTrotter():
                weights = f"softmax({LOGITS[kind].replace('Z', 'X')})"
                first, second = (f"({term})" if ":" in term else grouped(term) for term in (attention, target))
                assert row(text, "block").splitlines() == [
                    f"block      Z₁ = Z − h {first}, p = {weights}",
                    f"           Z⁺ = Z₁ + h {second.replace('X', 'X₁')}",
                ]
            # What a model, a weight or a pullback reads is X everywhere, and only a state is moved.
            assert set(re.findall(r"[^ (]*Z[^ )]*", text)) <= {"Z", "Z⁺", *(f"Z{digit}" for digit in "₁₂₃₄₅₆")}

    def test_whitened_and_sphere_name_their_maps(self, axis, kind):
        spherical = xf.derive(xf.CrossEntropy(axis), model(kind), constraint=xf.Sphere(2.5)).derivation()
        assert "v − z⟨z, v⟩ / ‖z‖²" in spherical
        assert "2.5(z + v)/‖z + v‖" in spherical
        whitened = xf.derive(xf.CrossEntropy(axis), model(kind), constraint=xf.Whitened()).derivation()
        assert "/(2S)" in whitened
        assert "√S" in whitened


class TestTheBlock:
    def test_equation_7(self):
        text = xf.derive(xf.CrossEntropy("sequence"), model("linear"), step=1.0).derivation()
        assert row(text, "block").splitlines() == [
            "block      Z₁ = Z − h pθ, p = softmax(Zθᵀ)",
            "           Z⁺ = Z₁ + h Cθ",
        ]

    def test_equation_9(self):
        block = xf.derive(xf.CrossEntropy("sequence"), model("factor"), printed_form=True)
        text = block.derivation()
        clean(text, block.derivation("latex"))
        assert "Z₁ = Z − h 2pZφφᵀ, p = softmax(ZφφᵀZᵀ)" in text
        assert "the paper's Eq. (8) as printed, which takes pᵀ = p: not the gradient of ℓ" in text
        assert "dℓ/dt" not in text

    def test_a_later_stage_reads_its_own_point(self):
        text = xf.derive(xf.CrossEntropy("classes"), model("both"), splitting=xf.Strang(xf.Euler())).derivation()
        assert row(text, "block").splitlines() == [
            "block      Z₁ = Z + 0.5h (CZθᵀ + CᵀZθ)",
            "           Z₂ = Z₁ − h (pZ₁θᵀ + pᵀZ₁θ), p = softmax(Z₁θZ₁ᵀ)",
            "           Z⁺ = Z₂ + 0.5h (CZ₂θᵀ + CᵀZ₂θ)",
        ]

    @pytest.mark.parametrize("constraint", [xf.Free(), xf.Dual(1.5)], ids=repr)
    def test_a_whole_step_of_heads_is_bracketed(self, constraint):
        """h multiplies both sums, not the first alone."""
        for kind, target, attention in (
            ("linear", "Σₕ Cₕθₕ", "Σₕ pₕθₕ"),
            ("both", "Σₕ (CₕZθₕᵀ + CₕᵀZθₕ)", "Σₕ (pₕZθₕᵀ + pₕᵀZθₕ)"),
        ):
            block = xf.derive(xf.CrossEntropy("classes"), model(kind, H), splitting=xf.Euler(), constraint=constraint)
            text = block.derivation()
            clean(text, block.derivation("latex"))
            whole = f"{target} − {attention}"
            whole = whole.replace("Z", "X") if isinstance(constraint, xf.Dual) else whole
            assert row(text, "block") == f"block      Z⁺ = Z + h ({whole})"
            # One sum needs none.
            halves = row(xf.derive(block.objective, block.model, constraint=constraint).derivation(), "block")
            assert f"+ h {target.replace('Z', 'X₁' if isinstance(constraint, xf.Dual) else 'Z₁')}" in halves

    def test_of_a_dual_state_in_latex(self):
        latex = xf.derive(xf.CrossEntropy("classes"), model("functional"), constraint=xf.Dual(1.5)).derivation("latex")
        assert r"\partial_X \ell &= p : \partial_X f(X) - C : \partial_X f(X)" in latex
        assert r"\psi^*(z) &= 1.5\lVert z\rVert" in latex
        assert r"x &= \nabla\psi^*(z) = 1.5z/\lVert z\rVert" in latex
        assert r"\partial_Z" not in latex

    def test_yoshida_steps_back(self):
        text = xf.derive(xf.CrossEntropy("classes"), model("linear"), splitting=xf.Yoshida()).derivation()
        assert "−1.702h" in row(text, "block")


class TestSettings:
    @pytest.mark.parametrize(
        ("step", "words"),
        [
            (xf.LearnedStep(0.5), "h > 0 learned, started at 0.5"),
            (xf.LearnedStep(0.5, features=F), "one for each feature"),
            (xf.LearnedStep(0.5, heads=H), "h = 1, with weights wₕ > 0 of the heads learned, started at 0.5"),
            (xf.CertifiedStep(), "h = 1/L, with L the certified bound on the curvature of ℓ"),
            (xf.LineSearch(2.0), "h by Armijo line search from 2, for each sample: no step raises ℓ"),
        ],
        ids=lambda value: None if isinstance(value, str) else repr(value),
    )
    def test_step(self, step, words):
        block = xf.derive(xf.CrossEntropy("classes"), model("linear", H), step=step)
        assert words in row(block.derivation(), "step")
        clean(block.derivation(), block.derivation("latex"))

    @pytest.mark.parametrize(
        "oracle", [xf.Given(), xf.SelfPrediction(), xf.Uniform(), xf.Learned(nn.Linear(3, 3)), xf.Shift(-1), xf.Band()]
    )
    def test_oracle(self, oracle):
        block = xf.derive(xf.CrossEntropy("classes"), model("own"), oracle=oracle, causal=not oracle.uses_labels)
        targets = row(block.derivation(), "targets")
        assert f"C from {type(oracle).__name__}, which sees {oracle.sees}" in targets
        assert ("labels enter" in targets) == oracle.uses_labels
        assert ("the past and itself for each token" in block.derivation()) == block.causal

    def test_sizes_are_said(self):
        assert "theta (4, 3), bias (4,)" in xf.derive(xf.CrossEntropy("classes"), model("linear-bias")).derivation()

    def test_latex_is_what_a_paper_pastes(self):
        latex = xf.derive(xf.CrossEntropy("sequence"), model("both")).derivation("latex")
        assert latex.startswith("% objective\n\\begin{align*}")
        assert r"\partial_Z \ell &= pZ\theta^T + p^TZ\theta - \left(CZ\theta^T + C^TZ\theta\right)" in latex
        assert r"Z^+ &= " in latex
        body = [line for line in latex.splitlines() if line.startswith("  ")]
        assert all(line.count("&") == 1 for line in body)

    @pytest.mark.parametrize("form", ["html", "", None, "TEXT"])
    def test_other_forms_are_refused(self, form):
        block = xf.derive(xf.CrossEntropy("sequence"), model("both"))
        with pytest.raises(xf.XentflowError, match='derivation: expected "text" or "latex", got'):
            block.derivation(form)
