"""ℓ and its residual: what they equal, and how many digits they keep for confident logits."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import xentflow as xf
from instances import (
    AXES,
    POTENTIALS,
    along,
    draw_logits,
    draw_targets,
    normal,
    reference_value,
    reference_weights,
    relative_error,
    uniform,
)

every_axis = pytest.mark.parametrize("axis", AXES)
HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
SIMPLEX = ("logsumexp", "logsumexp-T", "entmax-1.5", "sparsemax", "entmax-1.3")


def one_hot(labels, classes, axis, dtype=torch.float64):
    rows = torch.nn.functional.one_hot(labels, classes).to(dtype)
    return rows.mT if axis == "sequence" else rows


def oriented(rows, axis):
    """A matrix whose rows are distributions, as the axis wants it."""
    return rows.mT if axis == "sequence" else rows


@pytest.mark.parametrize("potential", POTENTIALS)
@every_axis
class TestEveryPotential:
    @pytest.fixture
    def omega(self, potential, axis):
        return POTENTIALS[potential](axis)

    @pytest.fixture
    def problem(self, omega, generator):
        N = draw_logits(omega, (2, 3, 4, 5), generator)
        return xf.Objective(omega), N, draw_targets(omega, N.shape, generator)

    def test_value_is_the_definition(self, problem, axis):
        loss, N, C = problem
        each = reference_value(loss.potential, N) - (C * N).sum(along(axis))
        assert_close(loss.per_distribution(N, C), each, rtol=1e-12, atol=1e-12)
        assert_close(loss.value(N, C), each.sum(-1), rtol=1e-12, atol=1e-12)
        assert loss.value(N, C).shape == (2, 3)
        assert loss.axis == axis

    def test_residual_is_weights_minus_targets_and_the_derivative(self, problem):
        loss, N, C = problem
        R = loss.residual(N, C)
        assert_close(R, reference_weights(loss.potential, N) - C, rtol=1e-12, atol=1e-12)
        N = N.clone().requires_grad_()
        (by_autograd,) = torch.autograd.grad(loss.value(N, C).sum(), N)
        assert relative_error(R, by_autograd) <= 1e-12

    def test_gradcheck_in_logits(self, omega, generator):
        N, loss = draw_logits(omega, (3, 4), generator).requires_grad_(), xf.Objective(omega)
        C = draw_targets(omega, (3, 4), generator)
        assert gradcheck(lambda N: loss.value(N, C), N)
        seed = normal((), generator).requires_grad_()
        assert gradgradcheck(lambda N: loss.value(N, C), N, grad_outputs=seed, fast_mode=True)

    def test_other_axis_is_the_transpose(self, problem, potential, axis):
        loss, N, C = problem
        other = xf.Objective(POTENTIALS[potential](AXES[1 - AXES.index(axis)]))
        assert_close(loss.per_distribution(N, C), other.per_distribution(N.mT, C.mT), rtol=1e-13, atol=1e-13)
        assert_close(loss.residual(N, C), other.residual(N.mT, C.mT).mT, rtol=1e-13, atol=1e-13)
        assert_close(loss.gap(N, C), other.gap(N.mT, C.mT), rtol=1e-12, atol=1e-13)

    def test_batch_of_n_is_n_batches_of_one(self, problem):
        loss, N, C = problem
        whole, residual = loss.value(N, C), loss.residual(N, C)
        for index in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
            sample = tuple(index)
            assert_close(loss.value(N[sample], C[sample]), whole[sample], rtol=1e-12, atol=1e-12)
            assert_close(loss.residual(N[sample], C[sample]), residual[sample], rtol=1e-12, atol=1e-12)

    def test_gap_is_never_negative_and_zero_at_the_weights(self, problem):
        loss, N, C = problem
        gap = loss.gap(N, C)
        plain = reference_value(loss.potential, N) + loss.potential.conjugate(C) - (C * N).sum(loss.potential.dim)
        assert_close(gap, plain, rtol=1e-12, atol=1e-12)
        assert gap.min() >= -1e-13
        reached = loss.gap(N, loss.potential.gradient(N))
        assert_close(reached, torch.zeros_like(reached), rtol=0, atol=1e-12)

    def test_targets_may_be_shared(self, problem):
        loss, N, C = problem
        for shared in (C[:1], C[:, :1], C[:1, :1], C[0, 0]):
            full = shared.expand(N.shape)
            assert torch.equal(loss.value(N, shared), loss.value(N, full.contiguous()))
            assert torch.equal(loss.residual(N, shared), loss.residual(N, full.contiguous()))

    def test_integer_labels_are_the_one_hot(self, problem, axis, generator):
        loss, N, _ = problem
        classes, length = (4, 5) if axis == "sequence" else (5, 4)
        labels = torch.randint(classes, (2, 3, length), generator=generator)
        C = one_hot(labels, classes, axis)
        for integer in (labels, labels.int(), labels.to(torch.uint8)):
            assert torch.equal(loss.value(N, integer), loss.value(N, C))
            assert torch.equal(loss.residual(N, integer), loss.residual(N, C))
        assert torch.equal(loss.value(N, C.long()), loss.value(N, C))
        assert torch.equal(loss.value(N, C.bool()), loss.value(N, C))
        assert torch.equal(loss.targets(labels[0, 0], N), C[0, 0].expand(N.shape))
        only = N.narrow(along(axis), 0, 1)
        assert torch.equal(loss.value(only, 0 * labels), loss.value(only, torch.ones_like(only)))

    def test_masked_value_is_that_of_what_remains(self, problem, potential, axis, generator):
        loss, N, C = problem
        dim = along(axis)
        mask = uniform(N.shape, generator) < 0.6
        mask.select(-1 if axis == "sequence" else -2, 0).fill_(False)
        C = C.masked_fill(~mask, 0)
        if potential in SIMPLEX:
            C = C / C.sum(dim, keepdim=True).clamp_min(1e-300)
        plain = loss.potential.value(N, mask) - (C * N).sum(dim)
        each = loss.per_distribution(N, C, mask)
        assert_close(each, plain, rtol=1e-12, atol=1e-12)
        assert (each[..., 0] == 0).all()
        residual = loss.residual(N, C, mask)
        assert (residual[~mask] == 0).all()
        # What targets say where nothing takes part is of no account.
        unheeded = C.masked_fill(~mask, 0.5)
        assert torch.equal(loss.value(N, unheeded, mask), loss.value(N, C, mask))
        assert torch.equal(loss.residual(N, unheeded, mask), residual)
        gap = loss.gap(N, C, mask)
        assert (gap >= -1e-12).all()
        assert (gap[..., 0] == 0).all()
        # One label a distribution, of an entry that is left; where none is left it says nothing.
        labels = mask.long().argmax(dim)
        kept = one_hot(labels, N.shape[dim], axis).masked_fill(~mask, 0)
        assert torch.equal(loss.targets(labels, N, mask), kept)
        assert torch.equal(loss.value(N, labels, mask), loss.value(N, kept, mask))
        N = N.clone().requires_grad_()
        (by_autograd,) = torch.autograd.grad(loss.value(N, C, mask).sum(), N)
        assert relative_error(residual, by_autograd) <= 1e-12

    @HALF
    def test_half_precision_gives_no_nan_where_the_value_is_finite(self, omega, dtype, axis, generator):
        largest = 6e4
        if isinstance(omega, xf.HalfSquare):
            largest = 800.0  # ½N² and N·C overflow float16 here though their difference need not
        scale = largest * 10 ** (-5 * uniform((400, 1), generator))
        signs = torch.where(uniform((400, 6), generator) < 0.5, -1.0, 1.0)
        rows = torch.where(uniform((400, 6), generator) < 0.5, signs, 2 * uniform((400, 6), generator) - 1) * scale
        N = rows.to(dtype)
        if isinstance(omega, xf.HalfSquare):
            C = (N.double() / 2 + normal((400, 6), generator)).to(dtype)
        elif isinstance(omega, xf.Softplus):
            C = torch.randint(2, (400, 6), generator=generator).to(dtype)
        else:
            C = one_hot(torch.randint(6, (400,), generator=generator), 6, "classes", dtype)
        exact = xf.Objective(type(omega)(**vars(omega))).per_distribution(
            oriented(N.double(), axis), oriented(C.double(), axis)
        )
        N, C, loss = oriented(N, axis).requires_grad_(), oriented(C, axis), xf.Objective(omega)
        found = loss.per_distribution(N, C)
        finite = exact.abs() < torch.finfo(dtype).max
        assert finite.double().mean() > 0.3
        assert not found.isnan().any()
        eps = torch.finfo(dtype).eps
        assert_close(found[finite].double(), exact[finite], rtol=2 * eps, atol=torch.finfo(dtype).tiny)
        assert loss.residual(N, C).isfinite().all()
        found[finite].sum().backward()
        assert N.grad.isfinite().all()


@every_axis
class TestCrossEntropy:
    def test_is_the_objective_of_logsumexp(self, axis, generator):
        N = normal((2, 4, 5), generator)
        C = normal((2, 4, 5), generator).softmax(along(axis))
        for T in (1.0, 0.3):
            short, long = xf.CrossEntropy(axis, temperature=T), xf.Objective(xf.LogSumExp(axis, temperature=T))
            assert short.potential == long.potential
            assert torch.equal(short.value(N, C), long.value(N, C))

    def test_is_minus_the_expected_log_probability(self, axis, generator):
        N, dim = normal((2, 4, 5), generator, 3.0), along(axis)
        C = normal((2, 4, 5), generator).softmax(dim)
        expected = -(C * torch.log_softmax(N, dim)).sum(dim)
        assert_close(xf.CrossEntropy(axis).per_distribution(N, C), expected, rtol=1e-12, atol=1e-12)
        assert_close(xf.CrossEntropy(axis).value(N, C), expected.sum(-1), rtol=1e-12, atol=1e-12)

    def test_agrees_with_torch_on_labels(self, axis, generator):
        rows, labels = normal((20, 6), generator, 3.0), torch.randint(6, (20,), generator=generator)
        expected = torch.nn.functional.cross_entropy(rows, labels, reduction="none")
        found = xf.CrossEntropy(axis).per_distribution(oriented(rows, axis), labels)
        assert_close(found, expected, rtol=1e-12, atol=1e-14)

    def test_gap_is_the_relative_entropy(self, axis, generator):
        N, dim = normal((4, 5), generator), along(axis)
        C = normal((4, 5), generator).softmax(dim)
        divergence = (C * (C.log() - torch.log_softmax(N, dim))).sum(dim)
        assert_close(xf.CrossEntropy(axis).gap(N, C), divergence, rtol=1e-12, atol=1e-14)


def confident_rows(generator, samples=20_000, classes=10):
    """float32 logits whose margins run from 1e-2 to 1e4, right and wrong, and their labels."""
    labels = torch.randint(classes, (samples,), generator=generator)
    margins = 10 ** (-2 + 6 * uniform((samples,), generator))
    rows = normal((samples, classes), generator) * 10 ** (2 * uniform((samples, 1), generator) - 1)
    wrong = uniform((samples,), generator) < 0.2
    highest = rows.amax(-1)
    raised = torch.where(wrong, highest - margins, highest + margins)
    rows.scatter_(-1, labels.unsqueeze(-1), raised.unsqueeze(-1))
    return rows.float(), labels


def careful_loss(rows, labels, T=1.0):
    """T softplus((LSE of the others − N_y) / T) in float64, keeping the digits of a value far below one."""
    rows = rows.double() / T
    mine = rows.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    others = rows.scatter(-1, labels.unsqueeze(-1), -math.inf).logsumexp(-1)
    x = others - mine
    return T * (x.clamp_min(0) + torch.log1p(torch.exp(-x.abs())))


@every_axis
class TestConfidentLogits:
    @pytest.mark.parametrize("T", [1.0, 1.7])
    def test_keeps_its_digits(self, axis, T, generator):
        rows, labels = confident_rows(generator)
        exact = careful_loss(rows, labels, T)
        loss, N = xf.CrossEntropy(axis, temperature=T), oriented(rows, axis)
        for C in (labels, one_hot(labels, 10, axis, torch.float32)):
            found = loss.per_distribution(N, C).double()
            assert (found >= 0).all()
            assert_close(found, exact, rtol=1e-5, atol=1e-12)
        assert (exact < 1e-8).double().mean() > 0.2
        # What the plain difference loses on the same samples, so that the test is known to be a test.
        plain = loss.potential.value(N) - (C * N).sum(along(axis))
        assert (plain < 0).any() or ((plain.double() - exact).abs() > 1e-5 * exact + 1e-12).any()

    @pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
    def test_sparse_losses_are_never_negative(self, axis, alpha, generator):
        rows, labels = confident_rows(generator)
        N = oriented(rows, axis)
        loss = xf.Objective(xf.Entmax(axis, alpha=alpha))
        found, exact = loss.per_distribution(N, labels), loss.per_distribution(N.double(), labels)
        assert (found >= 0).all()
        assert (found.double() - exact).abs().div(exact.clamp_min(1.0)).max() <= 1e-5
        certain = exact == 0
        assert certain.any()
        assert (found[certain] <= 1e-6).all()

    def test_soft_targets_keep_their_digits(self, axis, generator):
        rows, labels = confident_rows(generator)
        smoothing = 10 ** (-6 * uniform((20_000, 1), generator))
        C = ((1 - smoothing) * one_hot(labels, 10, "classes") + smoothing / 10).float()
        exact = -(C.double() * torch.log_softmax(rows.double(), -1)).sum(-1)
        found = xf.CrossEntropy(axis).per_distribution(oriented(rows, axis), oriented(C, axis)).double()
        assert (found >= 0).all()
        # C itself sums to one only to float32 rounding, which the largest logit multiplies.
        room = (C.double().sum(-1) - 1).abs() * rows.double().abs().amax(-1)
        assert ((found - exact).abs() <= 1e-5 * exact + room + 1e-12).all()

    def test_sigmoid_loss_keeps_its_digits(self, axis, generator):
        rows, labels = confident_rows(generator)
        C = one_hot(labels, 10, "classes", torch.float32)
        x = torch.where(C == 1, -rows.double(), rows.double())
        exact = (x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))).sum(-1)
        found = xf.Objective(xf.Softplus(axis)).per_distribution(oriented(rows, axis), oriented(C, axis)).double()
        assert (found >= 0).all()
        assert_close(found, exact, rtol=1e-5, atol=1e-12)

    def test_gradient_keeps_its_digits(self, axis, generator):
        rows, labels = confident_rows(generator, samples=2_000)
        N = oriented(rows, axis).requires_grad_()
        loss = xf.CrossEntropy(axis)
        loss.per_distribution(N, labels).sum().backward()
        exact = loss.residual(N.detach().double(), labels)
        assert_close(N.grad.double(), exact, rtol=1e-5, atol=1e-6)
        assert_close(loss.residual(N.detach(), labels).double(), exact, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("potential", SIMPLEX)
    def test_largest_logits_there_are(self, axis, dtype, potential):
        """The gap between two logits may overflow where ℓ, a certain right answer's, is zero."""
        huge = 0.9 * torch.finfo(dtype).max
        N = oriented(torch.tensor([[huge, -huge, 0.0], [-huge, 0.0, huge]], dtype=dtype), axis)
        found = xf.Objective(POTENTIALS[potential](axis)).per_distribution(N, torch.tensor([0, 2]))
        assert torch.equal(found, torch.zeros(2, dtype=dtype))

    @HALF
    def test_cold_softmax_of_half_precision(self, axis, dtype):
        """N/T may leave the range of float16 where softmax(N/T) does not."""
        omega = xf.LogSumExp(axis, temperature=0.1)
        N = oriented(torch.tensor([[6e4, 5e4, -6e4]], dtype=dtype), axis)
        assert torch.equal(omega.gradient(N), oriented(torch.tensor([[1.0, 0.0, 0.0]], dtype=dtype), axis))
        assert omega.value(N).isfinite().all()


def test_prints_its_potential():
    assert repr(xf.CrossEntropy("classes")) == "Objective(LogSumExp(axis='classes', temperature=1.0))"
