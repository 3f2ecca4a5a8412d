"""One graph for ``torch.compile``, in which a kernel is one operation, with its derivative."""

import pytest
import torch
from torch.testing import assert_close

import xentflow as xf
from instances import normal
from xentflow.kernels import dispatch


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


def block(Z, theta):
    return _BLOCK(Z).square().sum()


_BLOCK = xf.derive(
    xf.CrossEntropy("classes"),
    xf.Quadratic(torch.nn.Parameter(torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(2, 3, 3)), roles="own"),
    oracle=xf.Shift(-1),
    step=0.3,
    causal=True,
)


@pytest.mark.parametrize("function", [loss, rows, attention, gradient, block])
def test_one_graph_and_the_same_numbers(function, generator):
    Z, theta = normal((6, 3), generator), normal((5, 3), generator)

    def both(function):
        z, t = Z.clone().requires_grad_(), theta.clone().requires_grad_()
        found = function(z, t)
        return found.detach(), *torch.autograd.grad(found, (z, t), allow_unused=True, materialize_grads=True)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_close(both(compiled), both(function), rtol=1e-9, atol=1e-11)
