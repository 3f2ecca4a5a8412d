"""Memory linear in S and K, by counting the largest tensor any operation makes: no clock, no process."""

import pytest
import torch

import xentflow as xf
from instances import AXES, normal
from xentflow.kernels import dispatch, tiles


@pytest.fixture(autouse=True)
def moderate_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 2**8)
    monkeypatch.setattr(tiles, "COLUMNS", 2**5)
    monkeypatch.setattr(tiles, "KEPT", 2**9)
    monkeypatch.setattr(tiles, "FEWEST_ROWS", 4)
    monkeypatch.setattr(dispatch, "FEW", 0)


def loss(axis, S, generator):
    Z, theta = normal((S, 3), generator).requires_grad_(), normal((S, 3), generator).requires_grad_()
    labels = torch.randint(S, (S,), generator=generator)
    return lambda: xf.linear_cross_entropy(Z, theta, labels, axis=axis).backward()


def attention(axis, S, generator):
    Z, theta = normal((S, 3), generator).requires_grad_(), normal((S, 3), generator).requires_grad_()
    return lambda: xf.cross_attention(Z, theta, axis=axis).sum().backward()


def quadratic(axis, S, generator):
    Z, model = normal((S, 3), generator), xf.Quadratic(normal((2, 3, 3), generator))
    labels = torch.randint(S, (2, S), generator=generator)
    return lambda: xf.feature_gradient(xf.CrossEntropy(axis), model, Z, labels)


def stack(axis, S, generator):
    phi = torch.nn.Parameter(normal((2, 3, 2), generator, 0.3))
    block = xf.derive(xf.CrossEntropy(axis), xf.Quadratic.from_factor(phi), oracle=xf.Shift(-1), step=0.1)
    Z, layers = normal((S, 3), generator), xf.Stack.of(block, 2, tied=False)
    return lambda: layers(Z).square().sum().backward()


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("build", [loss, attention, quadratic, stack])
def test_no_tensor_grows_faster_than_the_sequence(build, axis, generator, largest):
    sizes = []
    for S in (128, 512):
        run = build(axis, S, generator)
        with largest() as seen:
            run()
        sizes.append(seen.entries)
    assert sizes[1] <= 4 * sizes[0]
    assert sizes[1] < 512 * 512 / 8


def test_what_counts_sees_the_logits_of_the_plain_form(generator, largest):
    Z, theta = normal((128, 3), generator), normal((128, 3), generator)
    with largest() as seen:
        xf.cross_attention(Z, theta, axis="classes", backend="reference")
    assert seen.entries == 128 * 128
