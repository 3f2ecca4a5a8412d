"""linear_cross_entropy and the kernels' override: what they refuse, and how they say it."""

import pytest
import torch
from refusal import bad_features, bad_masks, bad_targets, each, ramp, refuses

import xentflow as xf

THETA, Z = ramp(4, 3), ramp(2, 5, 3)
LABELS = torch.zeros(2, 5, dtype=torch.long)


def ell(Z=Z, theta=THETA, C=LABELS, axis="classes", **options):
    return xf.linear_cross_entropy(Z, theta, C, axis=axis, **options)


@each(bad_features())
def test_features(bad, fragments):
    refuses(lambda: ell(bad), *fragments)


@pytest.mark.parametrize("axis", ["sequence", "classes"])
def test_targets(axis):
    for name, bad, fragments in bad_targets(axis):
        refuses(lambda bad=bad: ell(C=bad, axis=axis), *fragments), name


@each(bad_masks())
def test_masks(bad, fragments):
    refuses(lambda: ell(mask=bad), *fragments)


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"axis": "rows"}, ('axis: expected "sequence" or "classes"', "'rows'")),
        ({"theta": ramp(4, 7)}, ("Z: expected (*batch, S, 7) to match theta", "(2, 5, 3)")),
        ({"theta": THETA.float()}, ("Z: expected the dtype of theta, torch.float32", "torch.float64")),
        ({"bias": ramp(3)}, ("bias: expected (4,) to match theta", "(3,)")),
        ({"temperature": 0.0}, ("temperature: expected", "0.0")),
        ({"temperature": float("nan")}, ("temperature: expected", "nan")),
        ({"label_smoothing": 1.0}, ("label_smoothing: expected a number from 0 to below 1", "1.0")),
        ({"label_smoothing": -0.1}, ("label_smoothing: expected", "-0.1")),
        ({"label_smoothing": True}, ("label_smoothing: expected", "True")),
        ({"label_smoothing": 0.1, "C": torch.full((2, 5, 4), 0.25).double()}, ("label_smoothing: expected integer",)),
        ({"ignore_index": 0, "C": torch.full((2, 5, 4), 0.25).double()}, ("ignore_index: expected integer labels",)),
        ({"ignore_index": "a"}, ("ignore_index: expected a whole number", "'a'")),
        ({"ignore_index": 0, "C": LABELS[0, :3]}, ("ignore_index: expected integer labels (2, 5)", "(3,)")),
        ({"ignore_index": 0, "C": [1]}, ("ignore_index: expected integer labels", "list")),
        ({"reduction": "max"}, ('reduction: expected "mean", "sum" or "none"', "'max'")),
        ({"backend": "fast"}, ("backend: expected one of auto, reference, chunked, fused", "'fast'")),
    ],
)
def test_options(options, fragments):
    refuses(lambda: ell(**options), *fragments)


def test_other_entries_know_their_backends():
    g = (xf.CrossEntropy("classes"), xf.Linear(THETA), Z, LABELS)
    for call in (
        lambda: xf.cross_attention(Z, THETA, axis="classes", backend="gpu"),
        lambda: xf.self_attention(Z, axis="classes", backend="gpu"),
        lambda: xf.feature_gradient(*g, backend="gpu"),
    ):
        refuses(call, "backend: expected one of auto, reference, chunked, fused", "'gpu'")
