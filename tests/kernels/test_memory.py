"""Memory linear in S and K, by counting what is alive at once: no clock, no process."""

from itertools import pairwise

import pytest
import torch

import xentflow as xf
from instances import AXES, normal
from xentflow.kernels import dispatch, tiles


@pytest.fixture(autouse=True)
def moderate_tiles(monkeypatch):
    tiles.keep_freed_memory()
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
def test_what_is_alive_grows_no_faster_than_the_sequence(build, axis, generator, alive):
    sizes = []
    for S in (64, 256):
        run = build(axis, S, generator)
        with alive() as seen:
            run()
        sizes.append(seen.entries)
    assert sizes[1] <= 4.2 * sizes[0]
    assert sizes[1] < 256 * 256 / 2


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("factored", [False, True])
def test_heads_come_one_after_another(factored, axis, generator, alive):
    most = []
    for heads in (1, 8):
        theta = normal((heads, 8, 8), generator)
        model = xf.Quadratic.from_factor(theta) if factored else xf.Quadratic(theta)
        Z, labels = normal((256, 8), generator), torch.randint(256, (heads, 256), generator=generator)
        with alive() as seen:
            xf.feature_gradient(xf.CrossEntropy(axis), model, Z, labels)
        most.append(seen.entries)
    # A running sum, which one head alone has no need of, and a transposed θ.
    assert most[1] <= most[0] + 2 * 256 * 8 + 8 * 8 * 8


def test_what_counts_sees_the_logits_of_the_plain_form(generator, alive):
    Z, theta = normal((128, 3), generator), normal((128, 3), generator)
    with alive() as seen:
        xf.cross_attention(Z, theta, axis="classes", backend="reference")
    assert seen.entries >= 128 * 128


@pytest.mark.parametrize("build", [loss, attention])
def test_what_counts_sees_tiles_within_operators(build, generator, alive, monkeypatch):
    for name in ("TILE", "COLUMNS", "KEPT"):
        monkeypatch.setattr(tiles, name, 2**20)
    run = build("classes", 128, generator)
    with alive() as seen:
        run()
    assert seen.entries >= 128 * 128


def test_without_gradients_of_keys_one_tile_follows_another(generator, alive, monkeypatch):
    monkeypatch.setattr(tiles, "KEPT", 2**14)
    most = []
    for wanted in (False, True):
        Z, theta = normal((128, 3), generator).requires_grad_(), normal((512, 3), generator).requires_grad_(wanted)
        labels = torch.randint(512, (128,), generator=generator)
        with alive() as seen:
            xf.linear_cross_entropy(Z, theta, labels, axis="classes", backend="chunked").backward()
        most.append(seen.entries)
    assert most[1] > 2**14 > 7 * most[0]


@pytest.mark.parametrize(("length", "size"), [(1024, 171), (1000, 100), (1024, 15), (7, 64), (50257, 2048), (1, 1)])
def test_pieces_are_whole_grains_but_the_last(length, size):
    pieces = list(tiles.spans(length, size))
    assert (pieces[0][0], pieces[-1][1]) == (0, length)
    assert all(end == begin for (_, end), (begin, _) in pairwise(pieces))
    lengths = [end - begin for begin, end in pieces]
    assert 0 < min(lengths) <= max(lengths) <= size
    assert size < tiles.GRAIN or all(n % tiles.GRAIN == 0 for n in lengths[:-1])


@pytest.mark.parametrize(
    ("length", "size", "count"),
    [(17, 17, 1), (31, 31, 1), (1000, 2048, 1), (1, 1, 1), (15, 15, 1), (18, 17, 2), (64, 32, 2), (49, 17, 4)],
)
def test_what_fits_in_one_piece_is_not_cut(length, size, count):
    assert len(list(tiles.spans(length, size))) == count
