"""One conformance suite for every potential, and what is special to each."""

import math

import entmax
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import xentflow as xf
from instances import (
    POTENTIALS,
    along,
    central_differences,
    draw_logits,
    draw_targets,
    normal,
    reference_value,
    reference_weights,
    relative_error,
    support_margin,
    uniform,
)

OTHER = {"sequence": "classes", "classes": "sequence"}
SHAPES = [(4, 5), (2, 3, 4, 5)]


@pytest.mark.parametrize("axis", ["sequence", "classes"])
class PotentialConformance:
    """What must hold of any convex Ω along an axis. A subclass names the potential and where ∇Ω is steepest."""

    name: str
    tightness = 0.99
    """The share of the curvature bound that is reached; the bound holds whatever the length of a distribution."""

    @pytest.fixture
    def omega(self, axis):
        return POTENTIALS[self.name](axis)

    def steepest(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A distribution's logits and a direction along which ∇Ω changes fastest."""
        return torch.tensor([1.0, 1.0, -60.0], dtype=torch.float64), torch.tensor([1.0, -1.0, 0.0]).double()

    @pytest.mark.parametrize("shape", SHAPES)
    def test_value_and_gradient_are_the_textbook_formulas(self, omega, shape, generator):
        N = normal(shape, generator, 3.0)
        assert_close(omega.value(N), reference_value(omega, N), rtol=1e-12, atol=1e-12)
        assert_close(omega.gradient(N), reference_weights(omega, N), rtol=1e-12, atol=1e-12)

    def test_other_axis_is_the_transpose(self, omega, axis, generator):
        other, N = POTENTIALS[self.name](OTHER[axis]), normal((2, 4, 5), generator)
        p, mask = draw_targets(omega, N.shape, generator), uniform(N.shape, generator) < 0.6
        assert omega.value(N).shape == ((2, 5) if axis == "sequence" else (2, 4))
        assert_close(omega.value(N), other.value(N.mT), rtol=1e-13, atol=1e-13)
        assert_close(omega.gradient(N), other.gradient(N.mT).mT, rtol=1e-13, atol=1e-13)
        assert_close(omega.conjugate(p), other.conjugate(p.mT), rtol=1e-13, atol=1e-13)
        assert_close(omega.tilted(N, p), other.tilted(N.mT, p.mT), rtol=1e-13, atol=1e-13)
        assert_close(omega.value(N, mask), other.value(N.mT, mask.mT), rtol=1e-13, atol=1e-13)
        assert_close(omega.gradient(N, mask), other.gradient(N.mT, mask.mT).mT, rtol=1e-13, atol=1e-13)

    def test_gradient_is_the_derivative_of_the_value(self, omega, generator):
        N = draw_logits(omega, (2, 4, 5), generator)
        differences = central_differences(lambda N: omega.value(N).sum(-1), N, batch_ndim=1)
        assert relative_error(omega.gradient(N), differences) <= 1e-8
        N.requires_grad_()
        (by_autograd,) = torch.autograd.grad(omega.value(N).sum(), N)
        assert relative_error(omega.gradient(N), by_autograd) <= 1e-12

    def test_gradcheck_and_gradgradcheck(self, omega, generator):
        N = draw_logits(omega, (3, 4), generator).requires_grad_()
        p = draw_targets(omega, (3, 4), generator)
        length = 4 if omega.axis == "sequence" else 3
        for function, shape in (
            (omega.value, (length,)),
            (omega.gradient, (3, 4)),
            (lambda N: omega.tilted(N, p), (length,)),
        ):
            assert gradcheck(function, N)
            assert gradgradcheck(function, N, grad_outputs=normal(shape, generator).requires_grad_())

    def test_convex(self, omega, generator):
        A, B = normal((200, 4, 5), generator, 3.0), normal((200, 4, 5), generator, 3.0)
        t = uniform((200, 1, 1), generator)
        chord = t.squeeze(-1) * omega.value(A) + (1 - t.squeeze(-1)) * omega.value(B)
        assert (chord - omega.value(t * A + (1 - t) * B)).min() >= -1e-12
        tangent = omega.value(A) + (omega.gradient(A) * (B - A)).sum(along(omega.axis))
        assert (omega.value(B) - tangent).min() >= -1e-12

    def test_fenchel_young(self, omega, generator):
        N = normal((50, 4, 5), generator, 3.0)
        dim, p = along(omega.axis), draw_targets(omega, N.shape, generator)
        gap = omega.value(N) + omega.conjugate(p) - (p * N).sum(dim)
        assert gap.min() >= -1e-12
        assert gap.median() > 1e-2
        reached = omega.gradient(N)
        equality = omega.value(N) + omega.conjugate(reached) - (reached * N).sum(dim)
        assert_close(equality, torch.zeros_like(equality), rtol=0, atol=1e-12)

    def test_conjugate_is_infinite_exactly_outside_the_domain(self, omega, generator):
        inside = draw_targets(omega, (4, 5), generator)
        assert omega.conjugate(inside).isfinite().all()
        outside = [inside - 1.0, inside + 1.0, 2 * inside + 3.0]
        for p in outside:
            conjugate = omega.conjugate(p)
            if isinstance(omega, xf.HalfSquare):
                assert_close(conjugate, 0.5 * p.square().sum(along(omega.axis)))
            else:
                assert (conjugate == float("inf")).all()
                with pytest.raises(xf.XentflowError, match=r"weight|sum to one"):
                    omega.require_domain("C", p)
        omega.require_domain("C", inside)

    def test_one_weight_below_zero_is_outside_though_the_sum_is_right(self, omega):
        p = torch.full((4, 4), 0.25, dtype=torch.float64)
        p[1, 2], p[1, 1], p[2, 2] = -0.25, 0.75, 0.75
        p[2, 1] = -0.25
        infinite = omega.conjugate(p).isinf()
        if isinstance(omega, xf.HalfSquare):
            assert not infinite.any()
        else:
            assert infinite.tolist() == [False, True, True, False]
            with pytest.raises(xf.XentflowError, match=r"weight"):
                omega.require_domain("C", p)

    def test_vertices_lie_in_the_domain(self, omega):
        p = torch.eye(4, dtype=torch.float64)
        omega.require_domain("C", p)
        assert omega.conjugate(p).isfinite().all()

    def test_curvature_bounds_how_fast_the_gradient_changes(self, omega, generator):
        dim = along(omega.axis)
        A = normal((500, 4, 5), generator, 2.0)
        B = A + normal(A.shape, generator) * 10 ** (-4 * uniform((500, 1, 1), generator))
        change = torch.linalg.vector_norm(omega.gradient(A) - omega.gradient(B), dim=dim)
        distance = torch.linalg.vector_norm(A - B, dim=dim)
        assert (change / distance).max() <= omega.curvature * (1 + 1e-9)

    def test_curvature_is_reached(self, omega, axis):
        at, direction = self.steepest()
        A, B = at + 1e-3 * direction, at - 1e-3 * direction
        if axis == "sequence":
            A, B = A.unsqueeze(-1), B.unsqueeze(-1)
        else:
            A, B = A.unsqueeze(-2), B.unsqueeze(-2)
        rate = torch.linalg.vector_norm(omega.gradient(A) - omega.gradient(B)) / torch.linalg.vector_norm(A - B)
        assert self.tightness * omega.curvature <= rate <= omega.curvature * (1 + 1e-9)

    def test_tilted_is_the_difference_it_names(self, omega, generator):
        N = normal((3, 4, 5), generator, 2.0)
        p = draw_targets(omega, N.shape, generator)
        plain = reference_value(omega, N) - (p * N).sum(along(omega.axis))
        assert_close(omega.tilted(N, p), plain, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("full_shape", [True, False], ids=["full-mask", "shared-mask"])
    def test_masked_is_the_potential_of_what_remains(self, omega, axis, full_shape, generator):
        N = normal((2, 4, 5), generator, 2.0)
        shape = (2, 4, 5) if full_shape else (4, 5)
        mask = uniform(shape, generator) < 0.6
        p = draw_targets(omega, N.shape, generator)
        value, gradient, tilted = omega.value(N, mask), omega.gradient(N, mask), omega.tilted(N, p, mask)
        every = mask.expand(N.shape)
        if axis == "sequence":
            N, p, gradient, every = N.mT, p.mT, gradient.mT, every.mT
        along_rows = POTENTIALS[self.name]("classes")
        for sample in range(2):
            for row in range(N.shape[-2]):
                keep, weights = every[sample, row], gradient[sample, row]
                assert (weights[~keep] == 0).all()
                if not keep.any():
                    assert value[sample, row] == 0
                    assert tilted[sample, row] == 0
                    continue
                rest, chosen = N[sample, row, keep].unsqueeze(0), p[sample, row, keep]
                assert_close(value[sample, row], along_rows.value(rest).squeeze(), rtol=1e-12, atol=1e-12)
                assert_close(weights[keep], along_rows.gradient(rest).squeeze(0), rtol=1e-12, atol=1e-12)
                if not isinstance(omega, xf.LogSumExp | xf.Entmax):
                    plain = along_rows.value(rest).squeeze() - (chosen * rest).sum()
                    assert_close(tilted[sample, row], plain, rtol=1e-12, atol=1e-12)

    def test_masked_tilted_with_targets_on_what_remains(self, omega, generator):
        N, mask = normal((3, 4, 5), generator, 2.0), uniform((3, 4, 5), generator) < 0.6
        dim = along(omega.axis)
        p = draw_targets(omega, N.shape, generator).masked_fill(~mask, 0)
        if isinstance(omega, xf.LogSumExp | xf.Entmax):
            p = p / p.sum(dim, keepdim=True).clamp_min(1e-300)
        plain = omega.value(N, mask) - (p * N).sum(dim)
        assert_close(omega.tilted(N, p, mask), plain, rtol=1e-12, atol=1e-12)
        assert torch.equal(omega.tilted(N, p.masked_fill(~mask, 7.0), mask), omega.tilted(N, p, mask))

    def test_fully_masked_gives_zero_and_no_nan(self, omega, axis, generator):
        N = normal((4, 5), generator).requires_grad_()
        mask = torch.ones(4, 5, dtype=torch.bool)
        silenced = (slice(None), 1) if axis == "sequence" else (1, slice(None))
        mask[silenced] = False
        p = draw_targets(omega, (4, 5), generator)
        # Not even on the way back, where a later zero could hide a NaN.
        with torch.autograd.set_detect_anomaly(True):
            (value_slope,) = torch.autograd.grad(omega.value(N, mask).sum(), N, create_graph=True)
            (tilted_slope,) = torch.autograd.grad(omega.tilted(N, p, mask).sum(), N, create_graph=True)
            weights = omega.gradient(N, mask)
            (weights_slope,) = torch.autograd.grad((weights * normal((4, 5), generator)).sum(), N, create_graph=True)
            (second,) = torch.autograd.grad(value_slope.square().sum() + tilted_slope.square().sum(), N)
        assert omega.value(N, mask)[1] == 0
        assert omega.tilted(N, p, mask)[1] == 0
        for slope in (value_slope, tilted_slope, weights, weights_slope, second):
            assert slope.isfinite().all()
            assert (slope[silenced] == 0).all()
        everything = torch.zeros(4, 5, dtype=torch.bool)
        assert (omega.value(N, everything) == 0).all()
        assert (omega.gradient(N, everything) == 0).all()

    def test_gradgradcheck_under_a_mask(self, omega, generator):
        N = draw_logits(omega, (3, 4), generator)
        mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 0]], dtype=torch.bool)
        while support_margin(omega, N.masked_fill(~mask, -60.0)) <= 1e-3:
            N = draw_logits(omega, (3, 4), generator)
        N.requires_grad_()
        length = 4 if omega.axis == "sequence" else 3
        assert gradcheck(lambda N: omega.value(N, mask), N)
        seed = normal((length,), generator).requires_grad_()
        assert gradgradcheck(lambda N: omega.value(N, mask), N, grad_outputs=seed)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_dtype_is_kept(self, omega, dtype, generator):
        N = normal((4, 5), generator)
        p = draw_targets(omega, (4, 5), generator)
        for result, reference in (
            (omega.value(N.to(dtype)), omega.value(N)),
            (omega.gradient(N.to(dtype)), omega.gradient(N)),
            (omega.tilted(N.to(dtype), p.to(dtype)), omega.tilted(N, p)),
        ):
            assert result.dtype == dtype
            loss = torch.finfo(dtype).eps
            assert_close(result.double(), reference, rtol=10 * loss, atol=20 * loss)

    def test_compares_and_prints_by_value(self, omega, axis):
        assert omega == POTENTIALS[self.name](axis)
        assert omega != POTENTIALS[self.name](OTHER[axis])
        assert f"axis='{axis}'" in repr(omega)


class SimplexConformance(PotentialConformance):
    """What must hold where weights are probabilities."""

    def test_weights_are_distributions(self, omega, generator):
        p = omega.gradient(normal((50, 4, 5), generator, 5.0))
        assert p.min() >= 0
        assert_close(p.sum(along(omega.axis)), torch.ones(50, 5 if omega.axis == "sequence" else 4).double())

    def test_translation(self, omega, generator):
        N = normal((3, 4, 5), generator, 2.0)
        shift = normal((3, 1, 5) if omega.axis == "sequence" else (3, 4, 1), generator, 10.0)
        moved = omega.value(N) + shift.squeeze(along(omega.axis))
        assert_close(omega.value(N + shift), moved, rtol=1e-12, atol=1e-12)
        assert_close(omega.gradient(N + shift), omega.gradient(N), rtol=1e-11, atol=1e-12)

    def test_value_lies_between_the_maximum_and_the_uniform_bound(self, omega, generator):
        """max N ≤ Ω(N) ≤ max N − Ω*(uniform): −Ω* is an entropy, zero at vertices and largest at the centre."""
        N, dim = normal((50, 4, 5), generator, 3.0), along(omega.axis)
        excess = omega.value(N) - N.amax(dim)
        uniform_weights = torch.full_like(N, 1 / N.shape[dim])
        assert excess.min() >= -1e-12
        assert (excess + omega.conjugate(uniform_weights)).max() <= 1e-12


class TestLogSumExp(SimplexConformance):
    name = "logsumexp"


class TestLogSumExpWithTemperature(SimplexConformance):
    name = "logsumexp-T"

    def test_temperature_scales_the_potential(self, omega, axis, generator):
        N, T = normal((4, 5), generator), omega.temperature
        assert_close(omega.value(N), T * xf.LogSumExp(axis).value(N / T), rtol=1e-13, atol=1e-13)
        assert_close(omega.gradient(N), torch.softmax(N / T, along(axis)), rtol=1e-13, atol=1e-13)
        assert omega.curvature == pytest.approx(0.5 / T)


class TestSoftplus(PotentialConformance):
    name = "softplus"

    def steepest(self):
        return torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)

    def test_weights_are_sigmoid(self, omega, generator):
        N = normal((4, 5), generator, 3.0)
        assert_close(omega.gradient(N), torch.sigmoid(N), rtol=1e-14, atol=0)

    def test_reflection(self, omega, generator):
        N = normal((4, 5), generator, 3.0)
        assert_close(omega.value(N) - omega.value(-N), N.sum(along(omega.axis)), rtol=1e-12, atol=1e-12)
        assert_close(omega.gradient(N) + omega.gradient(-N), torch.ones(4, 5).double(), rtol=1e-14, atol=0)

    def test_large_logits_keep_their_digits(self, omega):
        N = torch.tensor([[25.0, -25.0], [800.0, -800.0]], dtype=torch.float64)
        tail = math.log1p(math.exp(-25))
        each = torch.tensor([[25 + tail, tail], [800.0, 0.0]], dtype=torch.float64)
        assert_close(omega.value(N), each.sum(along(omega.axis)), rtol=1e-15, atol=0)


class TestHalfSquare(PotentialConformance):
    name = "half-square"

    def steepest(self):
        return torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)

    def test_attention_is_linear(self, omega, generator):
        N = normal((4, 5), generator)
        assert torch.equal(omega.gradient(N), N)


class EntmaxConformance(SimplexConformance):
    def test_weights_are_those_of_the_entmax_package(self, omega, axis, generator):
        N = normal((40, 6, 9), generator, 3.0)
        expected = reference_weights(omega, N)
        assert (omega.gradient(N) - expected).abs().max() <= 1e-12
        assert torch.equal(omega.gradient(N) == 0, expected == 0)
        bisected = entmax.entmax_bisect(N, omega.alpha, along(axis), n_iter=80)
        assert (omega.gradient(N) - bisected).abs().max() <= 1e-12

    def test_weights_are_sparse(self, omega, generator):
        p = omega.gradient(normal((40, 6, 9), generator, 3.0))
        assert 0.3 < (p == 0).double().mean() < 0.95

    def test_vmap_is_a_batch(self, omega, generator):
        N = normal((3, 4, 5), generator)
        assert_close(torch.vmap(omega.gradient)(N), omega.gradient(N), rtol=1e-14, atol=1e-15)
        by_last = torch.vmap(omega.gradient, in_dims=-1, out_dims=-1)(N.movedim(0, -1)).movedim(-1, 0)
        assert_close(by_last, omega.gradient(N), rtol=1e-14, atol=1e-15)

    def test_far_logits_get_no_weight(self, omega):
        N = torch.tensor([[0.0, -1e30], [1e30, 0.0]], dtype=torch.float64)
        expected = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
        if omega.axis == "sequence":
            N, expected = N.mT, expected.mT
        assert torch.equal(omega.gradient(N), expected)


class TestEntmax15(EntmaxConformance):
    name = "entmax-1.5"
    # Between two equal weights ∇Ω changes at the rate 2^(α−2), and the bound is what that tends to at a vertex.
    tightness = 0.99 * 2**-0.5


class TestSparsemax(EntmaxConformance):
    name = "sparsemax"

    def test_is_the_projection_onto_the_simplex(self, omega, generator):
        N, q = normal((4, 5), generator, 2.0), draw_targets(omega, (200, 4, 5), generator)
        p = omega.gradient(N)
        nearest, dim = (p - N).square().sum(along(omega.axis)), along(omega.axis)
        assert ((q - N).square().sum(dim) >= nearest).all()


class TestEntmax13(EntmaxConformance):
    name = "entmax-1.3"
    tightness = 0.99 * 2**-0.7


def test_entmax_tends_to_logsumexp_as_alpha_falls_to_one(generator):
    N = normal((4, 5), generator)
    near = xf.Entmax("classes", alpha=1.001)
    assert relative_error(near.gradient(N), xf.LogSumExp("classes").gradient(N)) < 5e-3


class Quartic(xf.Potential):
    """Ω(N) = ¼ Σ N⁴: what a user's own potential inherits, and nothing more."""

    curvature = math.inf

    def value(self, N, mask=None):
        return (N**4 / 4 if mask is None else (N**4 / 4).masked_fill(~mask, 0)).sum(self.dim)

    def gradient(self, N, mask=None):
        return N**3 if mask is None else (N**3).masked_fill(~mask, 0)

    def conjugate(self, p):
        return 0.75 * (p.abs() ** (4 / 3)).sum(self.dim)

    def require_domain(self, name, p, mask=None):
        pass


@pytest.mark.parametrize("axis", ["sequence", "classes"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_potential_of_ones_own_has_an_energy_and_its_gradient(axis, masked, generator):
    N, C, loss = normal((2, 4, 5), generator), normal((2, 4, 5), generator), xf.Objective(Quartic(axis))
    mask = uniform(N.shape, generator) < 0.6 if masked else None
    present = torch.ones_like(N) if mask is None else mask.double()
    assert_close(loss.per_distribution(N, C, mask), ((N**4 / 4 - C * N) * present).sum(along(axis)))
    assert_close(loss.residual(N, C, mask), (N**3 - C) * present)
    if mask is None:
        assert (loss.gap(N, C) >= 0).all()
    Z, theta = normal((2, 4, 3), generator).requires_grad_(), normal((5, 3), generator)
    (slope,) = torch.autograd.grad(loss.value(Z @ theta.T, C, mask).sum(), Z)
    assert relative_error(xf.feature_gradient(loss, xf.Linear(theta), Z.detach(), C, mask).total, slope) <= 1e-12


@pytest.mark.parametrize("name", POTENTIALS)
@pytest.mark.parametrize("axis", ["sequence", "classes"])
def test_targets_off_by_rounding_are_accepted(name, axis):
    """What a softmax or a sigmoid in the same precision may have made."""
    C = torch.tensor([[1 + 1e-10, -1e-10], [-1e-10, 1 + 1e-10]], dtype=torch.float64)
    POTENTIALS[name](axis).require_domain("C", C)


def test_every_potential_of_the_catalogue_has_a_conformance_test():
    def names(cls):
        return {name for sub in cls.__subclasses__() for name in {getattr(sub, "name", None)} | names(sub)}

    assert names(PotentialConformance) - {None} == set(POTENTIALS)
