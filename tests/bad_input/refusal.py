"""What every refusal must be: one XentflowError, whose message says what was expected and what came."""

import math

import pytest
import torch
from torch import Tensor

import xentflow as xf

NAN, INF = float("nan"), float("inf")


def refuses(call, *fragments: str) -> None:
    """Raise unless ``call`` fails with one XentflowError that holds every fragment."""
    with pytest.raises(xf.XentflowError) as caught:
        call()
    assert type(caught.value) is xf.XentflowError
    # An error raised while handling another would show the user two.
    assert caught.value.__context__ is None
    for fragment in fragments:
        assert fragment in str(caught.value)


def ramp(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Distinct finite numbers."""
    return torch.linspace(-1, 1, math.prod(shape), dtype=dtype).reshape(shape)


def spoiled(tensor: Tensor, value: float) -> Tensor:
    """The tensor with one entry replaced."""
    spoiled = tensor.clone()
    spoiled.view(-1)[1] = value
    return spoiled


def bad_features(S: int = 5, F: int = 3, name: str = "Z"):
    """(id, features, fragments): what no entry may take for features (2, S, F) in float64."""
    Z = ramp(2, S, F)
    return [
        ("list", Z.tolist(), (f"{name}: expected a torch.Tensor", "got list")),
        ("array", Z.numpy(), (f"{name}: expected a torch.Tensor", "got ndarray")),
        ("integers", Z.long(), (f"{name}: expected a floating dtype", "torch.int64")),
        ("complex", Z.to(torch.complex128), (f"{name}: expected a floating dtype", "torch.complex128")),
        ("vector", Z[0, 0], (f"{name}: expected shape (*batch, S, F)", f"got ({F},)")),
        ("no tokens", Z[:, :0], (f"{name}: expected", "no empty dimension", f"got (2, 0, {F})")),
        ("no samples", Z[:0], (f"{name}: expected", "no empty dimension", f"got (0, {S}, {F})")),
        ("nan", spoiled(Z, NAN), (f"{name}: expected finite values", "1 NaN and 0 infinite")),
        ("inf", spoiled(Z, INF), (f"{name}: expected finite values", "0 NaN and 1 infinite")),
        ("minus inf", spoiled(Z, -INF), (f"{name}: expected finite values", "0 NaN and 1 infinite")),
    ]


def bad_targets(axis: str):
    """(id, C, fragments): what no entry may take for targets of logits (2, 5, 4) in float64 under a softmax."""
    dim, labels = (-1, torch.zeros(2, 5, dtype=torch.long)) if axis == "classes" else (-2, torch.zeros(2, 4).long())
    C = torch.softmax(ramp(2, 5, 4), dim)
    classes = C.shape[dim]
    return [
        ("list", C.tolist(), ("C: expected a torch.Tensor of targets or labels", "got list")),
        ("none", None, ("C: expected a torch.Tensor of targets or labels", "got NoneType")),
        ("complex", C.to(torch.complex128), ("C: expected a floating dtype", "torch.complex128")),
        ("single precision", C.float(), ("C: expected the dtype of the features, torch.float64", "got torch.float32")),
        ("other device", C.to("meta"), ("C: expected the device of the features, cpu", "got meta")),
        ("transposed", C.mT, ("C: expected the shape of the logits, (2, 5, 4)", "got (2, 4, 5)")),
        ("other batch", C[[0, 0, 0]], ("C: expected the shape of the logits, (2, 5, 4)", "got (3, 5, 4)")),
        ("too many dimensions", C[None], ("C: expected the shape of the logits", "got (1, 2, 5, 4)")),
        ("vector", C[0, 0], ("C: expected shape like the logits", "got (4,)")),
        ("empty", C[:0], ("C: expected", "no empty dimension", "got (0, 5, 4)")),
        ("nan", spoiled(C, NAN), ("C: expected finite values", "1 NaN and 0 infinite")),
        ("inf", spoiled(C, INF), ("C: expected finite values", "0 NaN and 1 infinite")),
        ("sums", 2 * C, (f'every distribution along axis="{axis}" to sum to one', "got sums from 2 to 2")),
        ("negative", spoiled(C, -0.5), ("C: expected no negative weight", "got a least weight of -0.5")),
        ("label too high", labels + classes, (f"C: expected labels from 0 to {classes - 1}", f"got {classes} to")),
        ("label negative", labels - 1, (f"C: expected labels from 0 to {classes - 1}", "got -1 to -1")),
        ("labels of other shape", labels[:, :-1], ("C: expected integer labels", f'axis="{axis}"', "got (2, ")),
        ("no labels", labels[:0], ("C: expected integer labels", "got (0, ")),
        ("labels elsewhere", labels.to("meta"), ("C: expected the device of the features, cpu", "got meta")),
    ]


def bad_masks():
    """(id, mask, fragments): what no entry may take for a mask of logits (2, 5, 4)."""
    mask = torch.ones(2, 5, 4, dtype=torch.bool)
    return [
        ("list", mask.tolist(), ("mask: expected a boolean tensor", "got list")),
        ("floats", mask.double(), ("mask: expected a boolean tensor", "got torch.float64")),
        ("integers", mask.long(), ("mask: expected a boolean tensor", "got torch.int64")),
        ("transposed", mask.mT, ("mask: expected a shape that broadcasts to the logits (2, 5, 4)", "got (2, 4, 5)")),
        ("too many dimensions", mask[None], ("broadcasts to the logits (2, 5, 4)", "got (1, 2, 5, 4)")),
        ("empty", mask[:0], ("broadcasts to the logits (2, 5, 4)", "got (0, 5, 4)")),
        ("other device", mask.to("meta"), ("mask: expected the device of the logits, cpu", "got meta")),
    ]


def each(*tables):
    """Parametrise ``bad`` and ``fragments`` over the rows of some tables."""
    rows = [row for table in tables for row in table]
    return pytest.mark.parametrize(("bad", "fragments"), [row[1:] for row in rows], ids=[row[0] for row in rows])
