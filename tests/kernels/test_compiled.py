"""One graph for ``torch.compile``, in which a kernel is one operation, with its derivative."""

import pytest
import torch
from torch.testing import assert_close

import xentflow as xf
from instances import normal
from xentflow._entmax import _threshold
from xentflow.kernels import dispatch
from xentflow.kernels.cross_entropy import _gradients, _of_rows, _summed


@pytest.fixture(autouse=True)
def many(monkeypatch):
    monkeypatch.setattr(dispatch, "FEW", 0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def loss(Z, theta):
    return xf.linear_cross_entropy(Z, theta, torch.arange(6) % 5, axis="classes", label_smoothing=0.1)


def rows(Z, theta):
    ell = xf.linear_cross_entropy(Z, theta, torch.arange(5), axis="sequence", reduction="none", ignore_index=3)
    return (ell * torch.arange(5)).sum()


def attention(Z, theta):
    return xf.cross_attention(Z, theta, axis="sequence").square().sum()


def gradient(Z, theta):
    C = torch.eye(6, dtype=torch.float64)
    return xf.feature_gradient(xf.CrossEntropy("classes"), xf.Quadratic(theta[:3]), Z, C).total.square().sum()


def heads(Z, theta):
    C = torch.arange(12).reshape(2, 6) % 5
    model = xf.Linear(torch.stack([theta, theta.sin()]))
    quadratic = xf.Quadratic(torch.stack([theta[:3], theta[2:]]))
    of_both = (xf.feature_gradient(xf.CrossEntropy("classes"), m, Z, C).total for m in (model, quadratic))
    return sum(total.square().sum() for total in of_both)


def block(Z, theta):
    return _BLOCK(Z).square().sum()


_BLOCK = xf.derive(
    xf.CrossEntropy("classes"),
    xf.Quadratic(torch.nn.Parameter(torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(2, 3, 3)), roles="own"),
    oracle=xf.Shift(-1),
    step=0.3,
    causal=True,
)


@pytest.mark.parametrize("function", [loss, rows, attention, gradient, heads, block])
def test_one_graph_and_the_same_numbers(function, generator):
    Z, theta = normal((6, 3), generator), normal((5, 3), generator)

    def both(function):
        z, t = Z.clone().requires_grad_(), theta.clone().requires_grad_()
        found = function(z, t)
        return found.detach(), *torch.autograd.grad(found, (z, t), allow_unused=True, materialize_grads=True)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_close(both(compiled), both(function), rtol=1e-9, atol=1e-11)


# Whole graphs are tried above.
TOLD = "test_schema", "test_autograd_registration", "test_faketensor"


@pytest.mark.parametrize("backend", ["chunked", "fused"])
@pytest.mark.parametrize("bias", [False, True])
def test_operators_are_what_a_compiler_is_told_of_columns_as_of_rows(bias, backend, generator):
    """Shapes, kinds and strides, of features and θ that lie column by column."""
    q, k, y = normal((1, 3, 6), generator).mT, normal((1, 3, 5), generator).mT, torch.arange(6)[None] % 5
    operands = *(X.float().requires_grad_() for X in (q, k)), normal((1, 5), generator).float() if bias else None
    assert not operands[0].is_contiguous()
    weights = torch.linspace(0, 1, 6)[None]
    for wants_k in (False, True):
        wants = True, wants_k, wants_k and bias
        torch.library.opcheck(_summed, (*operands, None, y, None, 0.0, weights, *wants, backend), test_utils=TOLD)
    torch.library.opcheck(_of_rows, (*operands, None, y, None, 0.0), test_utils=TOLD)
    torch.library.opcheck(_gradients, (*operands, None, y, None, 0.0, weights), test_utils=TOLD)


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
@pytest.mark.parametrize("dim", [-1, -2])
def test_so_is_the_threshold_of_entmax(dim, alpha, generator):
    for gaps in (normal((1, 3, 6), generator).mT, normal((2, 3, 6), generator).permute(1, 2, 0)):
        torch.library.opcheck(_threshold, (gaps.abs(), alpha, dim), test_utils=("test_schema", "test_faketensor"))
