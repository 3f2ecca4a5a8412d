"""Splittings: measured order, exact sub-flows against the explicit operator, and the paper's two blocks."""

import functools

import numpy as np
import pytest
import scipy.linalg
import torch
from torch.testing import assert_close

import xentflow as xf
from flow_instances import AXES, normal, random_flow, random_targets, seeded
from order import errors, measured_order, reference
from xentflow.splitting import exponential_action

TIGHT = {"rtol": 1e-12, "atol": 1e-12}

# The time, and numbers of steps fine enough for the leading term to rule: Yoshida steps back 1.7 h in the middle and
# needs the finest, and a longer way for its error to stay well above the reference's own.
RUNS = {
    xf.LieTrotter(): (0.5, (32, 64)),
    xf.LieTrotter(exact=True): (0.5, (32, 64)),
    xf.LieTrotter(substep=xf.RK4()): (0.5, (32, 64)),
    xf.Strang(): (0.5, (32, 64)),
    xf.Strang(exact=True): (0.5, (32, 64)),
    xf.Strang(substep=xf.RK4(), exact=True): (0.5, (32, 64)),
    xf.Strang(substep=xf.Euler()): (0.5, (32, 64)),
    xf.Strang(substep=xf.Euler(), exact=True): (0.5, (32, 64)),
    xf.Yoshida(): (1.0, (128, 256)),
    xf.Yoshida(exact=True): (1.0, (128, 256)),
    xf.Yoshida(substep=xf.Euler()): (0.5, (64, 128)),
}
SEEDS = {"linear": 5, "quadratic": 1}


@functools.cache
def start(kind, axis, time):
    """A flow, its start and its exact end, solved once for all methods."""
    flow, Z = random_flow(kind, axis, SEEDS[kind], S=4, F=3, K=3)
    Z = Z if kind == "linear" else Z / 2
    return flow, Z, reference(flow.velocity, Z, time)


class TestOrder:
    @pytest.mark.parametrize("method", RUNS, ids=repr)
    @pytest.mark.parametrize("kind", ["linear", "quadratic"])
    @pytest.mark.parametrize("axis", AXES)
    def test_measured_is_the_declared_one(self, axis, kind, method):
        time, counts = RUNS[method]
        found = errors(*start(kind, axis, time), method, time, counts)
        assert measured_order(found) == pytest.approx(method.order, abs=0.05)

    @pytest.mark.parametrize(
        ("method", "order"),
        [
            (xf.LieTrotter(), 1),
            (xf.LieTrotter(substep=xf.RK4(), exact=True), 1),
            (xf.Strang(), 2),
            (xf.Strang(substep=xf.Euler()), 1),
            (xf.Strang(substep=xf.Euler(), exact=True), 1),
            (xf.Yoshida(), 4),
            (xf.Yoshida(substep=xf.Heun()), 2),
        ],
        ids=repr,
    )
    def test_declared_is_the_lower_of_two(self, method, order):
        assert method.order == order

    @pytest.mark.parametrize("axis", AXES)
    def test_yoshida_over_heun_is_of_order_two_and_better_where_luck_has_it(self, axis):
        """Its weights satisfy 2w³ + (1−2w)³ = 0, which cancels Heun's own error in the attention term.

        So the linear model, whose target term is exact anyway, sees order three, the quadratic one the declared two.
        """
        method, time = xf.Yoshida(substep=xf.Heun()), 0.5
        found = [
            measured_order(errors(*start(kind, axis, time), method, time, counts))
            for kind, counts in (("quadratic", (128, 256)), ("linear", (32, 64)))
        ]
        assert found == pytest.approx([2, 3], abs=0.05)

    @pytest.mark.parametrize("constraint", [xf.Sphere(), xf.Dual(1.5), xf.Whitened()], ids=repr)
    @pytest.mark.parametrize("axis", AXES)
    def test_order_survives_a_constraint(self, axis, constraint):
        flow, Z = random_flow("quadratic", axis, 5, constraint=constraint, S=4, F=3)
        exact = reference(flow.velocity, Z, 0.5)
        assert measured_order(errors(flow, Z, exact, xf.Strang(), 0.5, (32, 64))) == pytest.approx(2, abs=0.05)


class TestExactSubFlow:
    @staticmethod
    def operator(theta: torch.Tensor, C: torch.Tensor, roles: str, axis: str) -> np.ndarray:
        """The matrix of Z ↦ CZθᵀ + CᵀZθ on row-major vec(Z), where vec(AZB) = (A ⊗ Bᵀ) vec(Z)."""
        theta, C = theta.reshape(-1, *theta.shape[-2:]).numpy(), C.reshape(-1, *C.shape[-2:]).numpy()
        query = sum(np.kron(c, t) for c, t in zip(C, theta, strict=True))
        key = sum(np.kron(c.T, t.T) for c, t in zip(C, theta, strict=True))
        if roles == "both":
            return query + key
        return query if axis == "classes" else key

    @pytest.mark.parametrize("heads", [None, 3])
    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("roles", ["both", "own"])
    @pytest.mark.parametrize("axis", AXES)
    def test_is_the_exponential_of_the_kronecker_operator(self, axis, roles, symmetric, heads):
        generator = seeded(20)
        H = () if heads is None else (heads,)
        theta, Z = normal(generator, *H, 3, 3), normal(generator, 4, 3)
        theta = (theta + theta.mT) / 2 if symmetric else theta
        C = random_targets(xf.LogSumExp(axis), generator, *H, 4, 4)
        flow = xf.GradientFlow(xf.CrossEntropy(axis), xf.Quadratic(theta, roles=roles), C)
        A, term = self.operator(theta, C, roles, axis), flow.terms[1]
        assert np.linalg.norm(A, 2) <= term.norm(Z).item() * (1 + 1e-12)
        for h in (1e-3, 0.7, 3.0, -0.7):
            expected = torch.from_numpy(scipy.linalg.expm(h * A) @ Z.reshape(-1).numpy()).reshape(4, 3)
            found = exponential_action(term.velocity, Z, h, term.norm(Z))
            assert (found - expected).norm() <= 1e-12 * expected.norm()

    @pytest.mark.parametrize("axis", AXES)
    def test_factored_theta_and_signed_targets(self, axis):
        generator = seeded(21)
        phi, Z, C = normal(generator, 3, 2), normal(generator, 4, 3), normal(generator, 4, 4)
        flow = xf.GradientFlow(xf.Objective(xf.HalfSquare(axis)), xf.Quadratic.from_factor(phi), C)
        A, term = self.operator(phi @ phi.mT, C, "both", axis), flow.terms[1]
        assert np.linalg.norm(A, 2) <= term.norm(Z).item() * (1 + 1e-12)
        expected = torch.from_numpy(scipy.linalg.expm(A) @ Z.reshape(-1).numpy()).reshape(4, 3)
        found = exponential_action(term.velocity, Z, 1.0, term.norm(Z))
        assert (found - expected).norm() <= 1e-12 * expected.norm()

    def test_every_sample_may_have_its_own_step(self):
        flow, Z = random_flow("quadratic", "classes", 22, batch=(3,))
        term, h = flow.terms[1], torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64)[:, None, None]
        together = exponential_action(term.velocity, Z, h, term.norm(Z))
        for index in range(3):
            alone = exponential_action(term.velocity, Z, h[index].item(), term.norm(Z))
            assert_close(together[index], alone[index], **TIGHT)

    def test_flowing_there_and_back(self):
        flow, Z = random_flow("quadratic", "sequence", 23)
        term = flow.terms[1]
        there = exponential_action(term.velocity, Z, 1.5, term.norm(Z))
        assert_close(exponential_action(term.velocity, there, -1.5, term.norm(Z)), Z, rtol=1e-11, atol=1e-11)

    def test_single_precision_is_as_good_as_it_can_be(self):
        flow, Z = random_flow("quadratic", "classes", 24)
        model = xf.Quadratic(flow.model.theta.float())
        single = xf.GradientFlow(flow.objective, model, flow.targets(Z).float())
        exact = exponential_action(flow.terms[1].velocity, Z, 1.0, flow.terms[1].norm(Z))
        found = exponential_action(single.terms[1].velocity, Z.float(), 1.0, single.terms[1].norm(Z.float()))
        assert (found - exact).norm() <= 1e-6 * exact.norm()

    @pytest.mark.parametrize("axis", AXES)
    def test_a_splitting_uses_it_when_asked(self, axis):
        flow, Z = random_flow("quadratic", axis, 25)
        A = self.operator(flow.model.theta, flow.targets(Z), "both", axis)
        half = xf.Euler().advance(flow.terms[0], Z, 0.4)
        expected = torch.from_numpy(scipy.linalg.expm(0.4 * A) @ half.reshape(-1).numpy()).reshape(Z.shape)
        assert_close(xf.LieTrotter(exact=True).advance(flow, Z, 0.4), expected, **TIGHT)
        assert (xf.LieTrotter().advance(flow, Z, 0.4) - expected).norm() > 1e-3

    def test_a_constrained_target_term_has_no_exact_flow_to_use(self):
        flow, Z = random_flow("quadratic", "classes", 26, constraint=xf.Sphere())
        with_it, without = (xf.Strang(exact=exact).advance(flow, Z, 0.3) for exact in (True, False))
        assert_close(with_it, without, rtol=0, atol=0)


class TestComposition:
    def test_sub_steps_are_the_papers_unless_asked_otherwise(self):
        """Nothing is exact by default, and each sub-step is of the splitting's own order."""
        assert xf.LieTrotter() == xf.LieTrotter(substep=xf.Euler(), exact=False)
        assert xf.Strang() == xf.Strang(substep=xf.Heun(), exact=False)
        assert xf.Yoshida() == xf.Yoshida(substep=xf.RK4(), exact=False)

    @pytest.mark.parametrize("axis", AXES)
    def test_lie_trotter_is_attention_then_target(self, axis):
        flow, Z = random_flow("quadratic", axis, 30)
        attention, target = flow.terms
        half = xf.RK4().advance(attention, Z, 0.3)
        assert_close(xf.LieTrotter(xf.RK4()).advance(flow, Z, 0.3), xf.RK4().advance(target, half, 0.3), **TIGHT)

    @pytest.mark.parametrize("axis", AXES)
    def test_strang_halves_the_target(self, axis):
        flow, Z = random_flow("quadratic", axis, 31)
        attention, target = flow.terms
        Y = xf.Heun().advance(target, Z, 0.15)
        Y = xf.Heun().advance(attention, Y, 0.3)
        assert_close(xf.Strang().advance(flow, Z, 0.3), xf.Heun().advance(target, Y, 0.15), **TIGHT)

    @pytest.mark.parametrize("method", [xf.LieTrotter(), xf.Strang(), xf.Yoshida()], ids=repr)
    def test_each_term_gets_the_whole_step(self, method):
        for term in (0, 1):
            assert sum(fraction for index, fraction in method.schedule() if index == term) == pytest.approx(
                1, abs=1e-14
            )

    @pytest.mark.parametrize("axis", AXES)
    def test_own_roles_and_heads_flow_too(self, axis):
        flow, Z = random_flow("own", axis, 32, heads=2, batch=(2,))
        fine = xf.integrate(flow, Z, method=xf.RK4(), step=0.01, steps=20).Z[-1]
        split = xf.integrate(flow, Z, method=xf.Yoshida(exact=True), step=0.01, steps=20).Z[-1]
        assert_close(split, fine, rtol=1e-5, atol=1e-5)


class TestThePapersBlocks:
    @pytest.mark.parametrize("heads", [None, 4])
    @pytest.mark.parametrize("axis", AXES)
    def test_for_the_linear_model_splitting_changes_nothing(self, axis, heads):
        for kind in ("linear", "bilinear"):
            flow, Z = random_flow(kind, axis, 40, heads=heads)
            split, whole = (method.advance(flow, Z, 0.8) for method in (xf.LieTrotter(), xf.Euler()))
            assert_close(split, whole, rtol=1e-14, atol=1e-14)

    @pytest.mark.parametrize("axis", AXES)
    def test_for_the_quadratic_model_it_does(self, axis):
        flow, Z = random_flow("quadratic", axis, 41)
        split, whole = (method.advance(flow, Z, 1.0) for method in (xf.LieTrotter(), xf.Euler()))
        assert (split - whole).norm() > 0.1 * (whole - Z).norm()

    @pytest.mark.parametrize("axis", AXES)
    def test_equation_7(self, axis):
        """Z½ = Z − CA(Z, θ), then Z½ + Cθ, written out."""
        generator, dim = seeded(42), {"sequence": -2, "classes": -1}[axis]
        Z, theta = normal(generator, 6, 3), normal(generator, 4, 3)
        C = random_targets(xf.LogSumExp(axis), generator, 6, 4)
        half = Z - torch.softmax(Z @ theta.mT, dim) @ theta
        flow = xf.GradientFlow(xf.CrossEntropy(axis), xf.Linear(theta), C)
        assert_close(xf.LieTrotter().advance(flow, Z, 1.0), half + C @ theta, **TIGHT)

    @pytest.mark.parametrize("axis", AXES)
    def test_equation_9_as_printed(self, axis):
        """Z½ = Z − 2 SA(Zφ)φᵀ, then Z½ + (C + Cᵀ)Z½θ, written out."""
        generator, dim = seeded(43), {"sequence": -2, "classes": -1}[axis]
        Z, phi = normal(generator, 6, 3), normal(generator, 3, 2)
        theta, C = phi @ phi.mT, random_targets(xf.LogSumExp(axis), generator, 6, 6)
        X = Z @ phi
        half = Z - 2 * torch.softmax(X @ X.mT, dim) @ X @ phi.mT
        printed = half + (C + C.mT) @ half @ theta
        model = xf.Quadratic.from_factor(phi)
        flow = xf.GradientFlow(xf.CrossEntropy(axis), model, C, printed_form=True)
        assert_close(xf.LieTrotter().advance(flow, Z, 1.0), printed, **TIGHT)

    @pytest.mark.parametrize("axis", AXES)
    def test_equation_9_corrected(self, axis):
        """Z½ = Z − (p + pᵀ)Zθ, then Z½ + (C + Cᵀ)Z½θ: what the gradient flow really implies for symmetric θ."""
        generator, dim = seeded(44), {"sequence": -2, "classes": -1}[axis]
        Z, phi = normal(generator, 6, 3), normal(generator, 3, 2)
        theta, C = phi @ phi.mT, random_targets(xf.LogSumExp(axis), generator, 6, 6)
        p = torch.softmax(Z @ theta @ Z.mT, dim)
        half = Z - (p + p.mT) @ Z @ theta
        flow = xf.GradientFlow(xf.CrossEntropy(axis), xf.Quadratic(theta), C)
        assert_close(xf.LieTrotter().advance(flow, Z, 1.0), half + (C + C.mT) @ half @ theta, **TIGHT)
