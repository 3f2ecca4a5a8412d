"""pk and pᵀq along either axis, for every potential and mask, without the logits."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from instances import AXES, POTENTIALS, along, normal
from xentflow import LogSumExp
from xentflow.kernels import attention_products
from xentflow.masks import Masking

BACKENDS = ("reference", "chunked", "fused")
by_backend = pytest.mark.parametrize("backend", BACKENDS)
by_axis = pytest.mark.parametrize("axis", AXES)
pytestmark = pytest.mark.usefixtures("small_tiles")


def maskings(generator, n, S):
    dense = torch.rand(n, S, S, generator=generator) < 0.6
    dense[0, 2], dense[1, :, 4] = False, False
    rows = torch.ones(n, S, dtype=torch.bool)
    rows[1, 5:] = False
    return {
        "bare": Masking(),
        "dense": Masking(dense),
        "shared": Masking(dense[0]),
        "rows": Masking(rows=rows),
        "columns": Masking(columns=rows),
        "padding": Masking(rows=rows, columns=rows),
        "causal": Masking(causal=True),
        "causal padding": Masking(rows=rows, columns=rows, causal=True),
        "all": Masking(dense, rows, rows, True),
    }


NAMES = tuple(maskings(torch.Generator(), 2, 7))


def expected_products(q, k, bias, masking, axis, temperature=1.0):
    """Weights as a textbook has them, with what does not take part cut out one entry at a time."""
    N = torch.einsum("...sf,...kf->...sk", q, k)
    N = N if bias is None else N + bias[..., None, :]
    present = torch.ones(N.shape, dtype=torch.bool)
    S, K = N.shape[-2:]
    if masking.dense is not None:
        present = present & masking.dense
    if masking.rows is not None:
        present = present & masking.rows[..., :, None]
    if masking.columns is not None:
        present = present & masking.columns[..., None, :]
    if masking.causal:
        lower = torch.arange(K)[None] <= torch.arange(S)[:, None]
        present = present & (lower if axis == "classes" else lower.mT)
    dim = along(axis)
    e = torch.where(present, torch.exp((N - N.amax(dim, keepdim=True).detach()) / temperature), 0.0)
    total = e.sum(dim, keepdim=True)
    p = e / total.masked_fill(total == 0, 1)
    return torch.einsum("...sk,...kf->...sf", p, k), torch.einsum("...sk,...sf->...kf", p, q)


@by_backend
@by_axis
@pytest.mark.parametrize("name", NAMES)
def test_softmax_products_and_their_derivatives(name, axis, backend, generator):
    masking = maskings(generator, 2, 7)[name]
    leaves = [normal(shape, generator).requires_grad_() for shape in ((2, 7, 3), (2, 7, 3), (2, 7))]
    expected = expected_products(*leaves, masking, axis)
    weights = normal((2, 7, 3), generator), normal((2, 7, 3), generator)
    for rows, columns in ((True, True), (True, False), (False, True)):
        found = attention_products(LogSumExp(axis), *leaves, masking, rows=rows, columns=columns, backend=backend)
        assert (found.rows is None, found.columns is None) == (not rows, not columns)
        total = exact = torch.zeros((), dtype=torch.float64)
        for mine, its, w in zip(found, expected, weights, strict=True):
            if mine is not None:
                assert_close(mine, its, rtol=1e-12, atol=1e-13)
                total, exact = total + (mine * w).sum(), exact + (its * w).sum()
        gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
        same = torch.autograd.grad(exact, leaves, retain_graph=True)
        assert_close(gradients, same, rtol=1e-11, atol=1e-12)


@by_backend
@by_axis
@pytest.mark.parametrize("name", ["bare", "all"])
def test_gradcheck_of_both_products(name, axis, backend, generator):
    masking = maskings(generator, 2, 6)[name]
    leaves = [normal(shape, generator).requires_grad_() for shape in ((2, 6, 2), (2, 6, 2), (2, 6))]

    def both(*tensors):
        return tuple(attention_products(LogSumExp(axis), *tensors, masking, rows=True, columns=True, backend=backend))

    assert gradcheck(both, leaves)
    assert gradgradcheck(both, leaves)


@by_backend
@by_axis
def test_heads_and_temperature(axis, backend, generator):
    """Queries that heads share, keys that samples share, and neither."""
    for q_shape, k_shape in (((2, 1, 7, 3), (4, 9, 3)), ((2, 4, 7, 3), (2, 4, 9, 3)), ((2, 7, 3), (9, 3))):
        q, k = normal(q_shape, generator), normal(k_shape, generator)
        bias = normal(k_shape[:-1], generator)
        expected = expected_products(q, k, bias, Masking(), axis, 1.7)
        potential = LogSumExp(axis, temperature=1.7)
        found = attention_products(potential, q, k, bias, Masking(), rows=True, columns=False, backend=backend)
        assert_close(found.rows, expected[0], rtol=1e-12, atol=1e-13)
        found = attention_products(potential, q, k, bias, Masking(), rows=False, columns=True, backend=backend)
        assert_close(found.columns, expected[1], rtol=1e-12, atol=1e-13)


@by_axis
@pytest.mark.parametrize("potential", POTENTIALS)
@pytest.mark.parametrize("name", ["bare", "all"])
def test_other_potentials_go_block_by_block(name, potential, axis, generator):
    masking = maskings(generator, 2, 7)[name]
    Omega = POTENTIALS[potential](axis)
    leaves = [normal(shape, generator).requires_grad_() for shape in ((2, 7, 3), (2, 7, 3), (2, 7))]
    q, k, bias = leaves
    N = q @ k.mT + bias[:, None]
    p = Omega.gradient(N, masking.tensor(N, axis))
    found = attention_products(Omega, *leaves, masking, rows=True, columns=True, backend="chunked")
    assert_close(tuple(found), (p @ k, p.mT @ q), rtol=1e-10, atol=1e-12)
    weights = normal((2, 2, 7, 3), generator)
    total, exact = (
        sum((w * X).sum() for w, X in zip(weights, pair, strict=True)) for pair in (found, (p @ k, p.mT @ q))
    )
    mine = torch.autograd.grad(total, leaves, materialize_grads=True)
    its = torch.autograd.grad(exact, leaves, materialize_grads=True)
    assert_close(mine, its, rtol=1e-9, atol=1e-11)
