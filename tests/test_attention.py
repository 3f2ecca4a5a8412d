"""Attention as the paper writes it, against PyTorch's own and on the axis PyTorch does not have."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

import xentflow as xf
from instances import AXES, normal, relative_error


def test_classes_axis_is_scaled_dot_product_attention(generator):
    Z, theta = normal((2, 6, 3), generator), normal((2, 5, 3), generator)
    expected = scaled_dot_product_attention(Z, theta, theta, scale=1.0)
    assert_close(xf.cross_attention(Z, theta, axis="classes"), expected, rtol=1e-12, atol=1e-12)
    assert_close(
        xf.self_attention(Z, axis="classes"),
        scaled_dot_product_attention(Z, Z, Z, scale=1.0),
        rtol=1e-12,
        atol=1e-12,
    )


def test_sequence_axis_is_the_transposed_softmax_and_another_thing(generator):
    Z, theta = normal((2, 6, 3), generator), normal((2, 5, 3), generator)
    # Rows of the transposed problem: each class distributes one unit of weight over the tokens.
    weights = torch.softmax(torch.einsum("bkf,bsf->bks", theta, Z), -1)
    found = xf.cross_attention(Z, theta, axis="sequence")
    assert_close(found, torch.einsum("bks,bkf->bsf", weights, theta), rtol=1e-12, atol=1e-12)
    assert relative_error(found, scaled_dot_product_attention(Z, theta, theta, scale=1.0)) > 0.1


def test_the_two_axes_of_self_attention_share_the_transposed_weights(generator):
    X = normal((6, 3), generator)
    weights = torch.softmax(torch.einsum("if,jf->ij", X, X), -1)
    assert_close(xf.self_attention(X, axis="sequence"), weights.T @ X, rtol=1e-12, atol=1e-12)
    assert_close(xf.self_attention(X, axis="classes"), weights @ X, rtol=1e-12, atol=1e-12)
    assert relative_error(weights.T @ X, weights @ X) > 0.1


@pytest.mark.parametrize("axis", AXES)
def test_theta_is_shared_by_a_batch(axis, generator):
    Z, theta = normal((2, 2, 6, 3), generator), normal((5, 3), generator)
    shared = xf.cross_attention(Z, theta, axis=axis)
    assert_close(shared, xf.cross_attention(Z, theta.expand(2, 2, 5, 3), axis=axis), rtol=1e-13, atol=1e-14)
    assert_close(shared[1, 0], xf.cross_attention(Z[1, 0], theta, axis=axis), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("axis", AXES)
def test_cross_attention_is_the_attention_term_of_the_linear_model(axis, generator):
    Z, theta = normal((2, 6, 3), generator), normal((5, 3), generator)
    C = normal((2, 6, 5), generator).softmax(-2 if axis == "sequence" else -1)
    g = xf.feature_gradient(xf.CrossEntropy(axis), xf.Linear(theta), Z, C)
    assert_close(xf.cross_attention(Z, theta, axis=axis), g.attention, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("rank", [1, 3, 5])
def test_self_attention_of_the_projection_is_the_quadratic_term(axis, rank, generator):
    Z, phi = normal((2, 6, 3), generator), normal((3, rank), generator)
    N = torch.einsum("bif,fr,gr,bjg->bij", Z, phi, phi, Z)
    p = torch.softmax(N, -2 if axis == "sequence" else -1)
    expected = torch.einsum("bij,bjf,fr,gr->big", p, Z, phi, phi)
    assert relative_error(xf.self_attention(Z @ phi, axis=axis) @ phi.T, expected) <= 1e-12


@pytest.mark.parametrize("axis", AXES)
def test_gradcheck(axis, generator):
    Z, theta = normal((4, 3), generator).requires_grad_(), normal((5, 3), generator).requires_grad_()
    assert torch.autograd.gradcheck(lambda Z, theta: xf.cross_attention(Z, theta, axis=axis), (Z, theta))
    assert torch.autograd.gradcheck(lambda Z: xf.self_attention(Z, axis=axis), Z)
