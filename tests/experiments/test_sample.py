import pytest
import torch
from small import NAMES, images

import xentflow as xf
from xentflow.experiments.controls import Setting
from xentflow.experiments.passes import through_logits
from xentflow.experiments.sample import choose, follow

SHIRT, TROUSER, BAG = torch.eye(3) * 4


def points(first, last):
    return [(torch.stack(first), None), (torch.stack(last), None)]


def test_a_shirt_taken_for_a_bag_comes_first():
    labels = torch.tensor([1, 0, 0, 0])
    first, last = [4 * BAG, BAG, 2 * BAG, TROUSER], [4 * TROUSER, SHIRT, SHIRT, 4 * SHIRT]
    row, rule = choose(points(first, last), labels, NAMES)
    assert row == 2
    assert rule == "the clearest correction of a T-shirt/top first taken for a bag"


def test_else_the_clearest_correction():
    labels = torch.tensor([1, 0, 1])
    row, rule = choose(points([BAG, TROUSER, 2 * BAG], [TROUSER, SHIRT, BAG]), labels, NAMES)
    assert (row, rule) == (0, "the clearest correction")
    row, _ = choose(points([BAG, BAG, 2 * BAG], [TROUSER, SHIRT, BAG]), labels, ("a", "b", "c"))
    assert row in (0, 1)


def test_else_the_largest_gain():
    row, rule = choose(points([SHIRT, SHIRT], [SHIRT, 2 * SHIRT]), torch.tensor([0, 0]), NAMES)
    assert row == 1
    assert "nothing was corrected" in rule


@pytest.fixture
def walk(generator):
    data = images(20)
    model = xf.Linear(torch.randn(3, 64, generator=generator) / 8)
    index = torch.tensor([7, 3, 11])
    original = data.images[index].flatten(1) / 255
    setting = Setting(model, original + 0.1, data.labels[index], 5)
    block = xf.derive(setting.objective, model)
    return setting, list(through_logits(block, setting.Z, 5, setting.labels)), original, index, data


def test_a_sample_asked_for_is_followed_through_the_block(walk):
    setting, seen, original, index, data = walk
    sample = follow(setting, seen, original, index, data, 3)
    assert (sample.image, sample.rule) == (3, "asked for")
    assert sample.path.shape == (6, 64)
    torch.testing.assert_close(sample.path[0], setting.Z[1])
    torch.testing.assert_close(sample.original, original[1])
    expected = torch.stack([N[1] for N, _ in seen]).softmax(-1)
    torch.testing.assert_close(sample.probabilities[1:], expected)


def test_a_sample_that_was_fitted_is_refused_with_some_that_were_not(walk):
    with pytest.raises(xf.XentflowError, match="expected an image held out of training, such as 3, 7, 11, got 5"):
        follow(*walk, 5)
