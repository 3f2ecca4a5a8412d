"""A conformance suite that every constraint inherits, and what is special to each."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import xentflow as xf
from flow_instances import AXES, normal, random_flow, seeded, uniform

S, F = 6, 3


class Conformance:
    """What a constraint must do. A subclass names it, its equations, and the dimension of the set."""

    constraint: xf.Constraint
    dimension: int

    def defect(self, Y: Tensor, Z: Tensor) -> Tensor:
        """Equations that vanish when Y lies on the same set as Z."""
        raise NotImplementedError

    def point(self, seed: int, *batch: int) -> Tensor:
        return self.constraint.place(normal(seeded(seed), *batch, S, F))

    def test_place_is_idempotent(self):
        Z = self.point(1, 4)
        assert_close(self.constraint.place(Z), Z, rtol=0, atol=1e-13)

    def test_place_reaches_the_set(self):
        Z = self.point(2, 2, 3)
        assert self.defect(Z, Z).abs().max() <= 1e-12

    def test_tangent_is_idempotent(self):
        Z, V = self.point(3, 4), normal(seeded(4), 4, S, F)
        PV = self.constraint.tangent(Z, V)
        assert_close(self.constraint.tangent(Z, PV), PV, rtol=0, atol=1e-13)

    def test_tangent_is_self_adjoint(self):
        generator = seeded(5)
        Z, V, W = self.point(6, 4), normal(generator, 4, S, F), normal(generator, 4, S, F)
        left = (self.constraint.tangent(Z, V) * W).sum((-2, -1))
        right = (V * self.constraint.tangent(Z, W)).sum((-2, -1))
        assert_close(left, right, rtol=0, atol=1e-12)

    def test_tangent_really_is_tangent(self):
        Z, V = self.point(7, 4), normal(seeded(8), 4, S, F)
        PV, reach = self.constraint.tangent(Z, V), 1e-4
        slope = (self.defect(Z + reach * PV, Z) - self.defect(Z - reach * PV, Z)) / (2 * reach)
        assert slope.abs().max() <= 1e-7

    def test_tangent_space_is_all_of_it(self):
        """The trace of a projection is its rank: no admissible direction is lost."""
        Z = self.point(9)
        directions = torch.eye(S * F, dtype=torch.float64).reshape(S * F, S, F)
        P = self.constraint.tangent(Z.expand(S * F, S, F), directions).reshape(S * F, S * F)
        assert_close(P.trace().item(), float(self.dimension), rtol=0, atol=1e-12)

    def test_retract_stays_on_the_set(self):
        Z, V = self.point(10, 4), normal(seeded(11), 4, S, F)
        for size in (1e-6, 0.3, 1.0, 10.0):
            assert self.defect(self.constraint.retract(Z, size * V), Z).abs().max() <= 1e-12

    def test_retract_by_nothing_stays(self):
        Z = self.point(12, 4)
        assert_close(self.constraint.retract(Z, torch.zeros_like(Z)), Z, rtol=0, atol=1e-13)

    def test_retract_agrees_with_the_sum_to_first_order(self):
        Z, V = self.point(13), normal(seeded(14), S, F)
        PV = self.constraint.tangent(Z, V)
        coarse, fine = ((self.constraint.retract(Z, t * PV) - (Z + t * PV)).norm() for t in (2e-3, 1e-3))
        if isinstance(self.constraint, xf.Free | xf.Dual):
            assert coarse == 0
            assert fine == 0
        else:
            assert torch.log2(coarse / fine).item() == pytest.approx(2, abs=0.05)

    def test_gradcheck(self):
        generator = seeded(15)
        Z = self.point(16, 2).requires_grad_()
        V = normal(generator, 2, S, F).requires_grad_()
        anywhere = normal(generator, 2, S, F).requires_grad_()
        assert torch.autograd.gradcheck(self.constraint.place, (anywhere,))
        assert torch.autograd.gradcheck(self.constraint.tangent, (Z, V))
        assert torch.autograd.gradcheck(self.constraint.retract, (Z, V))
        assert torch.autograd.gradcheck(self.constraint.features, (Z,))
        assert torch.autograd.gradcheck(self.constraint.metric, (Z, V))

    @pytest.mark.filterwarnings("ignore:`torch.jit.script.* is deprecated:DeprecationWarning")
    def test_the_metric_is_the_derivative_of_the_features(self):
        Z = self.point(32, 4)
        V = self.constraint.tangent(Z, normal(seeded(33), 4, S, F))
        moved = self.constraint.metric(Z, V)
        _, pushed = torch.func.jvp(self.constraint.features, (Z,), (V,))
        assert_close(moved, pushed, rtol=1e-12, atol=1e-13)

        def central(t: float) -> Tensor:
            return (self.constraint.features(Z + t * V) - self.constraint.features(Z - t * V)) / (2 * t)

        assert_close(moved, (4 * central(3e-4) - central(6e-4)) / 3, rtol=0, atol=1e-9)

    def test_the_metric_is_symmetric_and_positive_semidefinite(self):
        Z = self.point(34)
        directions = torch.eye(S * F, dtype=torch.float64).reshape(S * F, S, F)
        M = self.constraint.metric(Z.expand(S * F, S, F), directions).reshape(S * F, S * F)
        assert_close(M, M.mT, rtol=0, atol=1e-14)
        assert torch.linalg.eigvalsh(M).min() >= -1e-14
        assert M.trace() > 0

    def test_a_batch_is_so_many_samples(self):
        Z, V = normal(seeded(17), 3, S, F), normal(seeded(18), 3, S, F)
        placed = self.constraint.place(Z)
        for index in range(3):
            assert_close(placed[index], self.constraint.place(Z[index]), rtol=1e-12, atol=1e-12)
            assert_close(self.constraint.features(placed)[index], self.constraint.features(placed[index]))
            for move in (self.constraint.tangent, self.constraint.retract, self.constraint.metric):
                assert_close(move(placed, V)[index], move(placed[index], V[index]), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("axis", AXES)
    @pytest.mark.parametrize("kind", ["linear", "quadratic"])
    def test_constrained_flow_dissipates_the_projected_gradient(self, kind, axis):
        flow, Z = random_flow(kind, axis, 19, constraint=self.constraint, batch=(3,), S=S, F=F)
        X = self.constraint.features(Z)
        gradient = xf.feature_gradient(flow.objective, flow.model, X, flow.targets(Z)).total
        projected = self.constraint.tangent(Z, gradient)
        assert_close(flow.velocity(Z), -projected, rtol=1e-12, atol=1e-12)
        rate = (projected * self.constraint.metric(Z, projected)).sum((-2, -1))
        assert_close(flow.dissipation(Z), rate, rtol=1e-12, atol=0)
        V = flow.velocity(Z)
        reach = 1e-4 / torch.linalg.vector_norm(V, dim=(-2, -1))
        t = reach[..., None, None]

        # Along the retracted curve, so that ℓ is only ever looked at on the set; odd terms alone survive.
        def central(k: int) -> Tensor:
            return flow.energy(flow.retract(Z, k * t * V)) - flow.energy(flow.retract(Z, -k * t * V))

        fall = -(8 * central(1) - central(2)) / (12 * reach)
        assert_close(fall, flow.dissipation(Z), rtol=1e-7, atol=0)


class TestFree(Conformance):
    constraint = xf.Free()
    dimension = S * F

    def defect(self, Y, Z):
        return torch.zeros_like(Y)

    def test_changes_nothing(self):
        Z, V = normal(seeded(20), S, F), normal(seeded(21), S, F)
        assert_close(self.constraint.place(Z), Z, rtol=0, atol=0)
        assert_close(self.constraint.tangent(Z, V), V, rtol=0, atol=0)
        assert_close(self.constraint.retract(Z, V), Z + V, rtol=0, atol=0)


class TestSphereOfOwnRadii(Conformance):
    constraint = xf.Sphere()
    dimension = S * (F - 1)

    def defect(self, Y, Z):
        return Y.norm(dim=-1) - Z.norm(dim=-1)

    def test_place_keeps_every_radius(self):
        Z = normal(seeded(22), 3, S, F)
        assert_close(self.constraint.place(Z), Z, rtol=0, atol=0)

    def test_tangent_residual(self):
        Z, V = self.point(23, 100), normal(seeded(24), 100, S, F)
        residual = (self.constraint.tangent(Z, V) * Z).sum(-1)
        assert residual.abs().max() <= 1e-12

    def test_a_token_at_the_origin_stays_there(self):
        Z, V = self.point(25), normal(seeded(26), S, F)
        Z[2] = 0
        assert (self.constraint.place(Z)[2] == 0).all()
        Z.requires_grad_()
        moved = self.constraint.retract(Z, self.constraint.tangent(Z, V))
        assert torch.isfinite(moved).all()
        assert (moved[2] == 0).all()
        (slope,) = torch.autograd.grad(moved.sum(), Z)
        assert slope.isfinite().all()


class TestSphereOfFixedRadius(TestSphereOfOwnRadii):
    constraint = xf.Sphere(radius=F**0.5)

    def defect(self, Y, Z):
        return Y.norm(dim=-1) - F**0.5

    def test_place_keeps_every_radius(self):
        """It sets every radius and keeps every direction: root-mean-square normalisation."""
        Z = normal(seeded(22), 3, S, F)
        assert_close(self.constraint.place(Z), torch.nn.functional.rms_norm(Z, (F,), eps=0.0), rtol=0, atol=1e-13)

    def test_a_token_at_the_origin_stays_there(self):
        Z = normal(seeded(25), S, F)
        Z[2] = 0
        Z.requires_grad_()
        placed = self.constraint.place(Z)
        assert torch.isfinite(placed).all()
        assert (placed[2] == 0).all()
        (slope,) = torch.autograd.grad(1e3 * placed.sum(), Z)
        assert slope.isfinite().all()


class TestDual(Conformance):
    constraint = xf.Dual(radius=1.7)
    dimension = S * F

    def defect(self, Y, Z):
        return torch.zeros_like(Y)

    def state(self, seed: int) -> Tensor:
        """Tokens of lengths between a tenth and ten."""
        generator = seeded(seed)
        return normal(generator, 4, S, F) * 10 ** (2 * uniform(generator, 4, S, 1) - 1)

    def test_the_state_is_free(self):
        Z, V = normal(seeded(35), S, F), normal(seeded(36), S, F)
        assert torch.equal(self.constraint.place(Z), Z)
        assert torch.equal(self.constraint.tangent(Z, V), V)
        assert torch.equal(self.constraint.retract(Z, V), Z + V)

    def test_features_are_the_gradient_of_psi(self):
        """X = ∇ψ*(Z), ψ*(z) = r‖z‖, and the metric is ∇²ψ*."""
        Z, V = self.state(37).requires_grad_(), normal(seeded(38), 4, S, F)
        length = (Z * Z).sum(-1).sqrt().sum()
        (X,) = torch.autograd.grad(1.7 * length, Z, create_graph=True)
        assert_close(self.constraint.features(Z), X, rtol=1e-13, atol=1e-13)
        (pushed,) = torch.autograd.grad(X, Z, V)
        assert_close(self.constraint.metric(Z, V), pushed, rtol=1e-12, atol=1e-12)

    def test_psi_is_conjugate_to_the_balls_indicator(self):
        """r‖z‖ is the most that ⟨x, z⟩ comes to in the ball, and X is where."""
        Z = self.state(39)
        X = self.constraint.features(Z)
        assert_close(X.norm(dim=-1), torch.full(X.shape[:-1], 1.7, dtype=Z.dtype), rtol=1e-14, atol=0)
        reached = (X * Z).sum(-1)
        assert_close(reached, 1.7 * Z.norm(dim=-1), rtol=1e-14, atol=0)
        tried = normal(seeded(40), 1000, 1, S, F)
        tried = 1.7 * tried / tried.norm(dim=-1, keepdim=True)
        assert ((tried * Z).sum(-1) <= reached * (1 + 1e-14)).all()

    def test_what_rms_norm_gives(self):
        Z = self.state(41)
        found = xf.Dual(F**0.5).features(Z)
        assert_close(found, torch.nn.functional.rms_norm(Z, (F,), eps=0.0), rtol=1e-13, atol=1e-13)

    @pytest.mark.parametrize("axis", AXES)
    @pytest.mark.parametrize("kind", ["linear", "quadratic"])
    def test_no_length_is_seen_and_each_is_an_inverse_step(self, kind, axis):
        """ℓ and Ż do not depend on ‖z‖; how fast X moves and ℓ falls does, like 1/‖z‖."""
        flow, Z = random_flow(kind, axis, 42, constraint=self.constraint, batch=(3,), S=S, F=F)
        longer = 4 * Z
        assert_close(flow.energy(longer), flow.energy(Z), rtol=1e-13, atol=0)
        assert_close(flow.velocity(longer), flow.velocity(Z), rtol=1e-12, atol=1e-13)
        assert_close(4 * flow.dissipation(longer), flow.dissipation(Z), rtol=1e-12, atol=0)
        step = self.constraint.features(longer + 0.4 * flow.velocity(longer))
        assert_close(step, self.constraint.features(Z + 0.1 * flow.velocity(Z)), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("axis", AXES)
    @pytest.mark.parametrize("kind", ["linear", "quadratic"])
    def test_it_falls_by_the_projected_gradient_over_the_length(self, kind, axis):
        """dℓ/dt = −Σ (r/‖z‖)‖P ∂ℓ(X)‖² written out; the part of ∂ℓ along z moves nothing."""
        flow, Z = random_flow(kind, axis, 43, constraint=self.constraint, batch=(3,), S=S, F=F)
        X = 1.7 * Z / Z.norm(dim=-1, keepdim=True)
        G = xf.feature_gradient(flow.objective, flow.model, X, flow.targets(Z)).total
        across = G - X * (X * G).sum(-1, keepdim=True) / 1.7**2
        expected = (1.7 / Z.norm(dim=-1) * across.square().sum(-1)).sum(-1)
        assert_close(flow.dissipation(Z), expected, rtol=1e-12, atol=0)
        assert (flow.dissipation(Z) > 0).all()
        # Not the gradient flow of ℓ as a function of Z, which moves by (r/‖z‖) P ∂ℓ.
        leaf = Z.clone().requires_grad_()
        (slope,) = torch.autograd.grad(flow.energy(leaf).sum(), leaf)
        assert_close(slope, self.constraint.metric(Z, G), rtol=1e-11, atol=1e-12)
        assert (flow.velocity(Z) + slope).norm() > 0.1 * slope.norm()

    @pytest.mark.filterwarnings("ignore:`torch.jit.script.* is deprecated:DeprecationWarning")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_token_at_the_origin_is_seen_there_and_can_leave(self, dtype):
        """Where ψ* has its corner: values and derivatives are finite, and the metric is the derivative still."""
        flow, Z = random_flow("linear", "classes", 44, constraint=self.constraint, S=S, F=F)
        model = xf.Linear(100 * flow.model.theta.to(dtype))
        flow = xf.GradientFlow(flow.objective, model, flow.targets(Z).to(dtype), constraint=self.constraint)
        Z = Z.to(dtype)
        Z[2] = 0
        assert (self.constraint.features(Z)[2] == 0).all()
        V = flow.velocity(Z).detach()
        assert (V[2] != 0).any()
        assert (self.constraint.metric(Z, V)[2] == 0).all()
        assert flow.dissipation(Z).isfinite()
        _, pushed = torch.func.jvp(self.constraint.features, (Z,), (V,))
        assert_close(self.constraint.metric(Z, V), pushed)
        for value in (flow.energy, flow.dissipation, lambda Z: flow.velocity(Z).square().sum()):
            leaf = Z.clone().requires_grad_()
            (slope,) = torch.autograd.grad(value(leaf).sum(), leaf)
            assert slope.isfinite().all()

    @pytest.mark.parametrize(
        ("dtype", "sizes"),
        [
            (torch.float64, (1e-310, 1e-200, 1e150, 1e307)),
            (torch.float32, (1e-40, 1e-23, 1e-22, 1e-20, 1e20, 1e37)),
            (torch.bfloat16, (1e-20, 1e20)),
            (torch.float16, (1e-4, 1e-3, 1e4)),
        ],
        ids=str,
    )
    def test_a_token_too_short_or_long_for_its_square_is_seen_where_it_is(self, dtype, sizes):
        plain = normal(seeded(45), 20, F)
        right = 1.7 * plain / plain.norm(dim=-1, keepdim=True)
        for size in sizes:
            # Subnormal numbers have few digits themselves.
            lost = 4 * torch.finfo(dtype).eps + 4 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / size
            Z = (size * plain).to(dtype)
            X = self.constraint.features(Z).double()
            assert_close(X.norm(dim=-1), torch.full((20,), 1.7, dtype=X.dtype), rtol=4 * torch.finfo(dtype).eps, atol=0)
            assert_close(X, right, rtol=0, atol=20 * lost)
            placed = xf.Sphere(1.7).place(Z).double()
            assert_close(placed, X, rtol=0, atol=0)
            kept = xf.Sphere().retract(Z, torch.zeros_like(Z)).double()
            assert_close(kept / size, Z.double() / size, rtol=0, atol=20 * lost)

    @pytest.mark.parametrize(
        ("constraint", "value"),
        [
            (xf.Dual(1.7), "features"),
            (xf.Dual(1.7), "metric"),
            (xf.Sphere(), "tangent"),
            (xf.Sphere(), "retract"),
            (xf.Sphere(1.7), "tangent"),
            (xf.Sphere(1.7), "retract"),
        ],
        ids=str,
    )
    def test_second_derivatives_at_the_origin_are_finite_and_elsewhere_right(self, constraint, value):
        Z, V = normal(seeded(46), S, F), normal(seeded(47), S, F)
        move = getattr(constraint, value)
        moved = move if value == "features" else lambda Z: move(Z, V)
        seed = normal(seeded(48), S, F).requires_grad_()
        assert torch.autograd.gradgradcheck(moved, (Z.clone().requires_grad_(),), grad_outputs=seed)
        found = []
        for size in (1.0, 0.0):
            leaf = Z.clone()
            leaf[2] *= size
            leaf.requires_grad_()
            (first,) = torch.autograd.grad(moved(leaf).square().sum() + moved(leaf).sum(), leaf, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), leaf)
            assert first.isfinite().all()
            assert second.isfinite().all()
            found.append(second)
        others = torch.arange(S) != 2
        assert torch.equal(found[0][others], found[1][others])

    @pytest.mark.parametrize("kind", ["linear", "quadratic"])
    def test_training_through_a_gradient_reaches_past_the_origin(self, kind):
        """A loss on ∂ℓ(X)/∂Z, with a token at the origin."""
        flow, Z = random_flow(kind, "classes", 49, constraint=self.constraint, S=S, F=F)
        Z[1] = 0
        for value in (flow.energy, flow.dissipation, lambda Z: flow.velocity(Z).square().sum()):
            leaf = Z.clone().requires_grad_()
            (first,) = torch.autograd.grad(value(leaf).sum(), leaf, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), leaf)
            assert second.isfinite().all()

    def test_one_graph_when_compiled(self):
        def both(Z, V):
            return self.constraint.features(Z).square().sum(-1) + (self.constraint.metric(Z, V) * V).sum(-1)

        Z, V = normal(seeded(50), S, F), normal(seeded(51), S, F)
        Z[1] = 0
        Z.requires_grad_()
        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
        assert_close(compiled(Z, V), both(Z, V))
        slopes = [torch.autograd.grad(f(Z, V).square().sum(), Z)[0] for f in (compiled, both)]
        assert_close(*slopes)


class TestWhitened(Conformance):
    constraint = xf.Whitened()
    dimension = S * F - F * (F + 1) // 2

    def defect(self, Y, Z):
        return Y.mT @ Y / S - torch.eye(F, dtype=Y.dtype)

    def test_place_orthonormalises_features_in_order(self):
        """Z = placed · R with R upper triangular and a positive diagonal, which makes ``place`` continuous."""
        Z = normal(seeded(27), 50, S, F)
        R = self.constraint.place(Z).mT @ Z / S
        assert R.tril(-1).abs().max() <= 1e-12
        assert (R.diagonal(dim1=-2, dim2=-1) > 0).all()

    def test_place_is_continuous(self):
        Z = normal(seeded(28), 200, S, F)
        nudged = Z + 1e-9 * normal(seeded(29), 200, S, F)
        assert (self.constraint.place(nudged) - self.constraint.place(Z)).abs().max() < 1e-6

    def test_as_many_features_as_tokens_are_enough_and_more_are_not(self):
        square = self.constraint.place(normal(seeded(30), F, F))
        assert_close(square.mT @ square / F, torch.eye(F, dtype=torch.float64), rtol=0, atol=1e-12)
        with pytest.raises(xf.XentflowError, match="at least as many tokens as features, got 2 tokens of 3 features"):
            self.constraint.place(normal(seeded(31), 2, 3))
