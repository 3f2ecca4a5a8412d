"""linear_cross_entropy against torch's own losses and ℓ written out, along both axes, with everything it takes."""

from itertools import product

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn import functional
from torch.testing import assert_close

import xentflow as xf
from instances import AXES, normal
from xentflow.kernels import dispatch

BACKENDS = ("auto", "reference", "chunked", "fused")
S, F, K, H = 6, 3, 5, 2
by_axis = pytest.mark.parametrize("axis", AXES)
by_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture
def many(monkeypatch):
    """Even these few logits go the way of many."""
    monkeypatch.setattr(dispatch, "FEW", 0)


def drawn(generator, heads, batch, axis):
    Z, theta = normal((*batch, S, F), generator), normal((*heads, K, F), generator)
    bias = normal((*heads, K), generator)
    N = torch.einsum("...sf,hkf->...hsk" if heads else "...sf,kf->...sk", Z, theta) + bias.unsqueeze(-2)
    owners, entries = (S, K) if axis == "classes" else (K, S)
    return Z, theta, bias, N, torch.randint(entries, (*batch, *heads, owners), generator=generator)


def losses(N, labels, axis, **options):
    """torch's own, of every distribution: it wants classes second."""
    entries = N.movedim(-1, 1) if axis == "classes" else N.movedim(-2, 1)
    if N.ndim == 2:
        entries = (N if axis == "classes" else N.T).movedim(-1, 1)
    return functional.cross_entropy(entries, labels, reduction="none", **options)


@by_axis
@by_backend
@pytest.mark.parametrize(("heads", "batch"), list(product([(), (H,)], [(), (2,), (2, 3)])))
def test_is_torchs_cross_entropy_of_the_logits(heads, batch, backend, axis, generator, many):
    Z, theta, bias, N, labels = drawn(generator, heads, batch, axis)
    options = {"label_smoothing": 0.2, "ignore_index": 3}
    expected = losses(N / 1.7, labels, axis, **options) * 1.7
    arguments = {"bias": bias, "axis": axis, "backend": backend, "temperature": 1.7, **options}
    found = xf.linear_cross_entropy(Z, theta, labels, reduction="none", **arguments)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    summed = xf.linear_cross_entropy(Z, theta, labels, reduction="sum", **arguments)
    assert_close(summed, expected.sum(), rtol=1e-12, atol=1e-12)
    mean = xf.linear_cross_entropy(Z, theta, labels, **arguments)
    assert_close(mean, expected.sum() / labels.ne(3).sum(), rtol=1e-12, atol=1e-12)


@by_axis
@by_backend
@pytest.mark.parametrize("heads", [(), (H,)])
def test_soft_targets_and_masks_are_those_of_the_objective(heads, backend, axis, generator, many):
    Z, theta, bias, N, _ = drawn(generator, heads, (2,), axis)
    dim = -1 if axis == "classes" else -2
    mask = torch.rand(N.shape, generator=generator) < 0.7
    # A distribution with nothing left counts for nothing, in the mean too.
    (mask[..., 2, :] if axis == "classes" else mask[..., 2]).fill_(False)
    C = normal(N.shape, generator).masked_fill(~mask, -torch.inf).softmax(dim).nan_to_num(0.0)
    e = torch.where(mask, N.exp(), 0.0).sum(dim)
    ell = torch.where(e > 0, e.log(), 0.0) - (C * N).sum(dim)
    arguments = {"bias": bias, "axis": axis, "backend": backend, "mask": mask}
    found = xf.linear_cross_entropy(Z, theta, C, reduction="none", **arguments)
    assert_close(found, ell, rtol=1e-11, atol=1e-12)
    mean = xf.linear_cross_entropy(Z, theta, C, **arguments)
    assert_close(mean, ell.sum() / mask.any(dim).sum(), rtol=1e-11, atol=1e-12)


@by_axis
@by_backend
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(reduction, backend, axis, generator, many):
    Z, theta, bias, _, labels = drawn(generator, (H,), (2,), axis)

    def ell(*tensors):
        Z, theta, bias = tensors
        return xf.linear_cross_entropy(
            Z, theta, labels, bias=bias, axis=axis, backend=backend, ignore_index=1, reduction=reduction
        )

    assert gradcheck(ell, [X.requires_grad_() for X in (Z, theta, bias)])


@by_axis
def test_gradient_by_features_is_the_feature_gradient(axis, generator, many):
    Z, theta, bias, _, labels = drawn(generator, (H,), (2,), axis)
    Z.requires_grad_()
    xf.linear_cross_entropy(Z, theta, labels, bias=bias, axis=axis, reduction="sum").backward()
    g = xf.feature_gradient(xf.CrossEntropy(axis), xf.Linear(theta, bias), Z.detach(), labels)
    assert_close(Z.grad, g.total, rtol=1e-12, atol=1e-12)


@by_axis
def test_gradients_add_up_and_scale(axis, generator, many):
    """Backward twice into one leaf, and from a loss that is but a part of another."""
    Z, theta, _, _, labels = drawn(generator, (), (2,), axis)
    Z, theta = Z.requires_grad_(), theta.requires_grad_()
    once = torch.autograd.grad(xf.linear_cross_entropy(Z, theta, labels, axis=axis), (Z, theta))
    for weight in (2.0, -0.5):
        (weight * xf.linear_cross_entropy(Z, theta, labels, axis=axis)).backward()
    assert_close((Z.grad, theta.grad), tuple(1.5 * g for g in once), rtol=1e-12, atol=1e-14)


def test_all_ignored_is_nothing(generator, many):
    Z, theta, *_ = drawn(generator, (), (), "classes")
    labels = torch.full((S,), -100)
    Z.requires_grad_()
    ell = xf.linear_cross_entropy(Z, theta, labels, axis="classes", ignore_index=-100)
    ell.backward()
    assert float(ell.detach()) == 0
    assert Z.grad.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_over_many_has_its_digits_in_half_precision(dtype, generator):
    """1/n of 70,000 tokens is subnormal in float16, and off by a thousandth."""
    Z = torch.randn(70_000, 2, generator=generator).to(dtype)
    theta = torch.randn(3, 2, generator=generator).to(dtype)
    labels = torch.randint(3, (70_000,), generator=generator)
    mean = xf.linear_cross_entropy(Z, theta, labels, axis="classes", backend="chunked")
    expected = torch.nn.functional.cross_entropy(Z.detach().double() @ theta.double().T, labels)
    assert_close(mean.double(), expected, rtol=torch.finfo(dtype).eps / 2, atol=0)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_mask_of_one_row_serves_all_tokens_on_the_sequence_axis(backend, generator):
    Z, theta, *_ = drawn(generator, (), (2,), "sequence")
    mask = torch.tensor([True, True, False, *[True] * (len(theta) - 3)])
    labels = torch.zeros(2, len(theta), dtype=torch.long)
    found = [
        xf.feature_gradient(xf.CrossEntropy("sequence"), xf.Linear(theta), Z, labels, m, backend=backend).attention
        for m in (mask, mask.expand(S, len(theta)))
    ]
    assert_close(*found)
