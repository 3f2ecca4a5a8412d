"""A conformance suite that every constraint inherits, and what is special to each."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import xentflow as xf
from flow_instances import AXES, normal, random_flow, seeded

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
        if isinstance(self.constraint, xf.Free):
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

    def test_a_batch_is_so_many_samples(self):
        Z, V = normal(seeded(17), 3, S, F), normal(seeded(18), 3, S, F)
        placed = self.constraint.place(Z)
        for index in range(3):
            assert_close(placed[index], self.constraint.place(Z[index]), rtol=1e-12, atol=1e-12)
            for move in (self.constraint.tangent, self.constraint.retract):
                assert_close(move(placed, V)[index], move(placed[index], V[index]), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("axis", AXES)
    @pytest.mark.parametrize("kind", ["linear", "quadratic"])
    def test_constrained_flow_dissipates_the_projected_gradient(self, kind, axis):
        flow, Z = random_flow(kind, axis, 19, constraint=self.constraint, batch=(3,), S=S, F=F)
        gradient = xf.feature_gradient(flow.objective, flow.model, Z, flow.targets(Z)).total
        projected = self.constraint.tangent(Z, gradient)
        assert_close(flow.velocity(Z), -projected, rtol=1e-12, atol=1e-12)
        assert_close(flow.dissipation(Z), projected.square().sum((-2, -1)), rtol=1e-12, atol=0)
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
        moved = self.constraint.retract(Z, self.constraint.tangent(Z, V))
        assert torch.isfinite(moved).all()
        assert (moved[2] == 0).all()


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
        placed = self.constraint.place(Z)
        assert torch.isfinite(placed).all()
        assert (placed[2] == 0).all()


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
