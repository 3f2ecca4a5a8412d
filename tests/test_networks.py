"""Derived transformers: made of blocks that do as they say, causal where they must be, and as large as the baseline."""

import pytest
import torch
from torch.testing import assert_close

from xentflow.constraints import Dual, Free, Sphere
from xentflow.errors import XentflowError
from xentflow.flow import GradientFlow
from xentflow.networks import (
    SHAPES,
    Derivation,
    DerivedTransformer,
    Inputs,
    PaperStack,
    Shape,
    Transformer,
    count,
    energies,
    matched,
)

IMAGES = Inputs(tokens=4, classes=3, patch=9)
SEQUENCES = Inputs(tokens=6, classes=5, vocabulary=7)
SMALL = Shape(width=16, depth=2, heads=2, hidden=8)
CHOICES = {
    "as-derived": {},
    "both": {"roles": "both"},
    "printed": {"roles": "both", "printed": True},
    "tied": {"tied": True},
    "no-target": {"target": False},
    "lie-trotter": {"splitting": "lie-trotter"},
    "strang": {"splitting": "strang"},
    "free": {"normalisation": "free"},
    "sphere": {"normalisation": "sphere"},
    "entmax": {"potential": "entmax"},
    "sigmoid": {"potential": "sigmoid"},
    "separate": {"separate": True},
    "relative": {"relative": True},
    "long steps": {"mixing_step": 4.0},
    "separate-sphere": {"separate": True, "normalisation": "sphere"},
}


@pytest.fixture(autouse=True)
def seeded(request):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(request.node.name))
        yield


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_every_choice_gives_logits_and_trains_every_parameter(choice):
    network = DerivedTransformer(IMAGES, SMALL, Derivation(**choice))
    logits = network(torch.randn(5, 4, 9))
    assert logits.shape == (5, 3)
    logits.square().sum().backward()
    still = [name for name, value in network.named_parameters() if value.grad is None or not value.grad.any()]
    assert still == []


@pytest.mark.parametrize("kind", [DerivedTransformer, Transformer])
def test_a_causal_network_sees_no_later_token(kind):
    network = kind(SEQUENCES, SMALL)
    x = torch.randint(7, (3, 6))
    changed = x.clone()
    changed[:, 4] = (x[:, 4] + 1) % 7
    before, after = network(x), network(changed)
    assert before.shape == (3, 6, 5)
    assert_close(before[:, :4], after[:, :4])
    assert (before[:, 4] - after[:, 4]).abs().max() > 1e-4


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("inputs", [Inputs(16, 10, patch=49), Inputs(49, 10, patch=16), Inputs(128, 90, vocabulary=90)])
def test_the_baseline_has_as_many_parameters(size, inputs):
    with torch.device("meta"):
        wanted = count(DerivedTransformer(inputs, SHAPES[size]))
        found = count(Transformer(inputs, matched(inputs, SHAPES[size], wanted)))
    assert abs(found / wanted - 1) < 0.02


def test_the_default_is_pre_norm_and_made_of_dual_blocks():
    assert Derivation().normalisation == "pre-norm"
    network = DerivedTransformer(IMAGES, SMALL)
    assert [block.constraint for block in network.stack.sequence()] == [Dual(4.0)] * 4
    assert network.decide.constraint == Sphere(4.0)
    kinds = {"sphere": Sphere(4.0), "free": Free()}
    for name, constraint in kinds.items():
        other = DerivedTransformer(IMAGES, SMALL, Derivation(normalisation=name))
        assert {block.constraint for block in other.stack.sequence()} == {constraint}


def test_labels_enter_no_network_and_pre_norm_is_the_step_at_normalised_features():
    assert not DerivedTransformer(IMAGES, SMALL).uses_labels
    block = DerivedTransformer(IMAGES, SMALL).stack.sequence()[0]
    Z = 3 * torch.randn(2, 4, 16)
    X = Z / Z.square().mean(-1, keepdim=True).sqrt()
    flow = GradientFlow(block.objective, block.model, block.flow(X).targets(X), head_weights=block.step.head_weights())
    assert_close(block(Z) - Z, flow.velocity(X), rtol=1e-4, atol=1e-5)


def test_a_target_term_may_have_a_theta_of_its_own_and_then_no_half_descends_an_energy():
    shared, separate = Derivation(), Derivation(separate=True)
    assert (shared.has_energies, separate.has_energies) == (True, False)
    mix, sort = DerivedTransformer(IMAGES, SMALL, separate).stack.sequence()[:2]
    assert mix.target_model is not mix.model
    assert sort.target_model is not sort.model
    assert (mix.kind, sort.kind) == ("game", "no common energy")


@pytest.mark.parametrize(("inputs", "expected"), [(IMAGES, 1.0), (SEQUENCES, 4.0)])
def test_mixing_steps_start_longer_for_sequences_unless_said_otherwise(inputs, expected):
    def first(mixing_step):
        mix, sort = DerivedTransformer(inputs, SMALL, Derivation(mixing_step=mixing_step)).stack.sequence()[:2]
        assert_close(sort.step.head_weights(), torch.ones(2, 1, 1))
        return mix.step.head_weights()

    assert_close(first(None), torch.full((2, 1, 1), expected))
    assert_close(first(0.5), torch.full((2, 1, 1), 0.5))
    with pytest.raises(XentflowError, match="expected a positive finite number"):
        first(-1.0)


@pytest.mark.parametrize("normalisation", ["pre-norm", "sphere", "free"])
def test_energies_are_each_halfs_own_before_and_after_its_step(normalisation):
    choice = Derivation(normalisation=normalisation)
    assert choice.has_energies
    network = DerivedTransformer(IMAGES, SMALL, choice)
    x = torch.randn(2, 4, 9)
    found = energies(network, x)
    assert found.shape == (4, 2)
    first = network.stack.sequence()[0]
    Z = first.constraint.place(network.embedding(x))
    assert_close(found[0, 0], first.flow(Z).energy(Z).mean() / 4)
    assert_close(found[0, 1], first.flow(Z).energy(first(Z)).mean() / 4)
    second = network.stack.sequence()[1]
    Z = second.constraint.place(first(Z))
    assert_close(found[1, 0], second.flow(Z).energy(Z).mean() / 4)
    if normalisation == "pre-norm":
        # Of the states only directions are seen.
        assert_close(second.flow(Z).energy(3 * Z), second.flow(Z).energy(Z))


def test_the_papers_stack_repeats_one_theta_or_has_one_for_each_half_step():
    tied, untied = (PaperStack(IMAGES, SMALL, tied) for tied in (True, False))
    assert count(untied) - count(tied) == 3 * 3 * 37 + 1
    x = torch.randn(2, 4, 9)
    assert tied(x).shape == untied(x).shape == (2, 3)
    block = tied.stack.sequence()[0]
    Z = tied.features(x)
    assert_close(tied(x), block.model.logits(block(block(Z))).squeeze(1))


def test_a_shape_that_heads_do_not_divide_is_refused():
    with pytest.raises(XentflowError, match="heads divide"):
        Shape(width=10, depth=1, heads=3, hidden=4)
