"""Blocks that cannot be: ``derive``, oracles, learned steps, stacks and the meter, and what their calls refuse."""

import pytest
import torch
from refusal import INF, NAN, bad_features, bad_masks, bad_targets, each, ramp, refuses, spoiled
from torch import nn

import xentflow as xf

LOSS = xf.CrossEntropy("classes")
Z = ramp(2, 5, 3)
THETA, SQUARE = ramp(4, 3), ramp(3, 3)


def block(**settings):
    return xf.derive(LOSS, xf.Linear(THETA), **{"oracle": xf.Uniform(), **settings})


def token_block(roles="both", **settings):
    return xf.derive(LOSS, xf.Quadratic(SQUARE, roles), **{"oracle": xf.Uniform(), **settings})


@pytest.mark.parametrize("bad", [None, "ce", xf.LogSumExp("classes"), xf.CrossEntropy], ids=repr)
def test_objective(bad):
    refuses(lambda: xf.derive(bad, xf.Linear(THETA)), "objective: expected an instance of Objective, got")


@pytest.mark.parametrize("bad", [None, THETA, xf.Linear, nn.Linear(3, 4)], ids=lambda bad: type(bad).__name__)
def test_model(bad):
    refuses(lambda: xf.derive(LOSS, bad), "model: expected an instance of Model, got")


@pytest.mark.parametrize(
    ("name", "kind"), [("oracle", "Oracle"), ("splitting", "Method"), ("constraint", "Constraint")]
)
@pytest.mark.parametrize("bad", ["Strang", 1.0, xf.Strang, xf.Given, xf.Free, nn.Identity()], ids=str)
def test_parts(name, kind, bad):
    refuses(lambda: block(**{name: bad}), f"{name}: expected an instance of {kind}, got")


def test_a_context_given_too_early():
    model = xf.Bilinear(ramp(3, 2)).at(ramp(4, 2))
    refuses(lambda: xf.derive(LOSS, model), "model: expected one that holds its θ", "give the context later")


@each(
    [
        ("kind", xf.Quadratic(SQUARE), ("target_model: expected a Linear with heads None", "got Quadratic")),
        ("heads", xf.Linear(ramp(2, 4, 3)), ("target_model: expected a Linear with heads None", "heads 2")),
    ]
)
def test_another_theta_of_another_kind(bad, fragments):
    refuses(lambda: block(target_model=bad), *fragments)


def test_another_theta_of_other_roles():
    refuses(
        lambda: token_block(target_model=xf.Quadratic(SQUARE, "own")),
        "target_model: expected the roles of the model, got others",
    )


def test_the_printed_form_is_of_one_model():
    for made in (lambda: block(printed_form=True), lambda: token_block("own", printed_form=True)):
        refuses(made, 'printed_form: expected a Quadratic model with roles="both"')


@pytest.mark.parametrize("oracle", [xf.Shift(), xf.Band(), xf.LearnedTargets(5)], ids=repr)
def test_oracles_of_tokens(oracle):
    kind = type(oracle).__name__
    refuses(lambda: block(oracle=oracle), "oracle: expected one for Linear logits", kind, "goes with a Quadratic model")


class TestCausal:
    def test_both_roles(self):
        refuses(
            lambda: token_block(causal=True),
            'causal: expected roles="own", got "both"',
            "the exact gradient of a causally masked energy",
            "carries the future into the past",
        )

    def test_other_models(self):
        refuses(lambda: block(causal=True), "causal: expected a Quadratic model, where classes are tokens, got Linear")

    def test_what_mixes_tokens(self):
        refuses(
            lambda: token_block("own", causal=True, constraint=xf.Whitened()),
            "causal: expected Free, Sphere or Dual features, got Whitened, which mixes all tokens",
        )
        refuses(
            lambda: token_block("own", causal=True, splitting=xf.Strang(exact=True)),
            "causal: expected integrated sub-steps, got exact=True",
        )

    def test_looking_ahead(self):
        refuses(
            lambda: token_block("own", causal=True, oracle=xf.Shift(2)),
            "causal: expected a Shift that looks back, got offset=2",
        )


class TestExact:
    def test_on_a_constraint(self):
        for constraint in (xf.Sphere(), xf.Dual(2.0), xf.Whitened()):
            refuses(
                lambda constraint=constraint: block(splitting=xf.Strang(exact=True), constraint=constraint),
                "exact: expected Free features, got",
                repr(constraint),
            )

    def test_of_an_unknown_function(self):
        refuses(
            lambda: xf.derive(LOSS, xf.Functional(torch.tanh), splitting=xf.LieTrotter(exact=True)),
            "exact: expected a Linear, Quadratic or Bilinear model, got Functional",
        )


class TestStep:
    @pytest.mark.parametrize("bad", [0, -0.1, NAN, INF, "0.1", None, True, [0.1]], ids=repr)
    def test_is_a_number_or_a_rule(self, bad):
        refuses(
            lambda: block(step=bad),
            "step: expected a positive finite number, LearnedStep, CertifiedStep or LineSearch, got",
            repr(bad),
        )

    def test_of_heads_that_are_not_there(self):
        refuses(lambda: block(step=xf.LearnedStep(heads=2)), "each of the model's heads, None, got 2")

    def test_of_features_on_a_constraint(self):
        for constraint in (xf.Sphere(), xf.Dual(2.0)):
            refuses(
                lambda constraint=constraint: block(step=xf.LearnedStep(features=3), constraint=constraint),
                f"step: expected one for all features on {constraint!r}, got 3",
                "along which ℓ need not fall there",
            )

    def test_certified(self):
        refuses(lambda: token_block(step=xf.CertifiedStep()), "for CertifiedStep, got Quadratic", "no bound")
        refuses(lambda: block(step=xf.CertifiedStep(), constraint=xf.Sphere()), "for one gradient step, got Sphere")
        refuses(lambda: block(step=xf.CertifiedStep(), constraint=xf.Dual(2.0)), "for one gradient step, got Dual")
        refuses(lambda: block(step=xf.CertifiedStep(), splitting=xf.Strang()), "for one gradient step", "Strang")
        refuses(
            lambda: block(step=xf.CertifiedStep(), target_model=xf.Linear(2 * THETA)),
            "got Linear and a no common energy",
        )

    def test_searched(self):
        refuses(lambda: token_block("own", step=xf.LineSearch()), "for LineSearch, got a game: nothing need fall")

    @pytest.mark.parametrize("bad", [0, -1.0, NAN, INF, "1", None, True], ids=repr)
    def test_learned_from_a_number(self, bad):
        refuses(lambda: xf.LearnedStep(bad), f"initial: expected a positive finite number, got {bad!r}")

    def test_learned_of_features_and_heads(self):
        refuses(lambda: xf.LearnedStep(features=3, heads=2), "expected features or heads, or neither, got both")
        for size in (0, -1):
            refuses(lambda size=size: xf.LearnedStep(features=size), f"expected a positive whole number, got {size}")
            refuses(lambda size=size: xf.LearnedStep(heads=size), f"expected a positive whole number, got {size}")


class TestOracles:
    @pytest.mark.parametrize("bad", [0, -1.0, NAN, INF, "1", None, True], ids=repr)
    def test_temperature(self, bad):
        refuses(lambda: xf.SelfPrediction(bad), f"temperature: expected a positive finite number, got {bad!r}")

    @pytest.mark.parametrize("bad", [1.0, True, "1", None], ids=repr)
    def test_places(self, bad):
        refuses(lambda: xf.Shift(bad), f"offset: expected a whole number, got {bad!r}")
        refuses(lambda: xf.Band(bad), f"width: expected a whole number of at least 0, got {bad!r}")

    def test_negative_width(self):
        refuses(lambda: xf.Band(-1), "width: expected a whole number of at least 0, got -1")

    @pytest.mark.parametrize("bad", [0, -1, 1.0, True, None], ids=repr)
    def test_neighbours(self, bad):
        refuses(lambda: xf.NearestNeighbours(bad), f"k: expected a whole number of at least 1, got {bad!r}")

    @pytest.mark.parametrize("bad", [None, torch.tanh, "net", nn.Linear], ids=["none", "function", "text", "class"])
    def test_net(self, bad):
        refuses(lambda: xf.Learned(bad), "net: expected an nn.Module from features to logits, got")

    def test_sizes(self):
        refuses(lambda: xf.LearnedTargets(0), "LearnedTargets: expected positive whole numbers, got 0 and 0")
        refuses(lambda: xf.LearnedTargets(3, -1), "expected positive whole numbers, got 3 and -1")
        refuses(
            lambda: token_block(oracle=xf.LearnedTargets(4).double())(Z),
            "LearnedTargets: expected logits of size (4, 4), got (5, 5)",
        )

    def test_memory(self):
        oracle = xf.NearestNeighbours(3)
        refuses(lambda: block(oracle=oracle)(Z), "expected a memory, got none; call remember(Z, C) first")
        refuses(lambda: oracle.remember(ramp(2, 3), ramp(2, 4)), "with M of at least k = 3, got (2, 3) and (2, 4)")
        refuses(lambda: oracle.remember(ramp(6, 3), ramp(5, 4)), "got (6, 3) and (5, 4)")
        refuses(lambda: oracle.remember(Z, ramp(2, 4)), "expected (M, F) tokens", "got (2, 5, 3)")
        refuses(lambda: oracle.remember(spoiled(ramp(6, 3), NAN), ramp(6, 4)), "memory: expected finite values")
        refuses(lambda: oracle.remember(ramp(6, 3), spoiled(ramp(6, 4), NAN)), "memory targets: expected finite values")
        refuses(lambda: oracle.remember(ramp(6, 3), ramp(6, 4)), "targets that are not negative")
        oracle.remember(ramp(6, 2), ramp(6, 4).abs())
        refuses(lambda: block(oracle=oracle)(Z), "features of width 2 and 4 classes, like the memory, got 3 and 4")


class TestCalls:
    @each(bad_features())
    def test_features(self, bad, fragments):
        refuses(lambda: block()(bad), *fragments)
        refuses(lambda: block().trajectory(bad), *fragments)
        refuses(lambda: xf.Stack.of(block(), 2)(bad), *fragments)

    @each(bad_targets("classes")[2:])
    def test_targets(self, bad, fragments):
        refuses(lambda: block(oracle=xf.Given())(Z, targets=bad), *fragments)

    def test_targets_that_nobody_asked_for(self):
        refuses(lambda: block()(Z, targets=ramp(2, 5, 4)), "targets: expected none", "Uniform, makes its own")
        refuses(lambda: block(oracle=xf.Given())(Z), "targets: expected C or labels", "got none")

    @each(bad_masks()[:3])
    def test_masks(self, bad, fragments):
        refuses(lambda: block(oracle=xf.Given())(Z, targets=torch.full((5, 4), 0.25).double(), mask=bad), *fragments)

    @pytest.mark.parametrize(
        ("bad", "came"),
        [
            ([True] * 5, "got list"),
            (torch.ones(2, 5), "got torch.float32 (2, 5)"),
            (torch.ones(5, dtype=torch.bool), "got torch.bool (5,)"),
            (torch.ones(2, 3, dtype=torch.bool), "got torch.bool (2, 3)"),
            (torch.ones(2, 5, 1, dtype=torch.bool), "got torch.bool (2, 5, 1)"),
        ],
    )
    def test_padding(self, bad, came):
        for made in (block, token_block):
            refuses(
                lambda made=made: made()(Z, padding=bad),
                "padding: expected a boolean tensor (2, 5), True for real tokens",
                came,
            )

    def test_padding_of_whitened_features(self):
        padding = torch.ones(2, 5, dtype=torch.bool)
        refuses(lambda: block(constraint=xf.Whitened())(Z, padding=padding), "padding: expected none with Whitened")

    def test_a_context_for_what_takes_none(self):
        refuses(lambda: block()(Z, context=ramp(4, 3)), "context: expected none for a Linear model; Bilinear takes one")

    def test_a_context_that_is_missing_or_wrong(self):
        made = xf.derive(LOSS, xf.Bilinear(ramp(3, 2)), oracle=xf.Uniform())
        refuses(lambda: made(Z), "Bilinear: expected a context, got none", "to the block")
        refuses(lambda: made(Z, context=ramp(4, 3)), "context: expected (*batch, K, 2) to match theta, got (4, 3)")

    @pytest.mark.parametrize("bad", [0, -1, 2.0, True, "3", None], ids=repr)
    def test_steps_of_a_trajectory(self, bad):
        refuses(lambda: block().trajectory(Z, steps=bad), f"steps: expected a positive whole number, got {bad!r}")

    def test_too_few_tokens_to_whiten(self):
        refuses(lambda: block(constraint=xf.Whitened())(Z[:, :2]), "at least as many tokens as features, got 2 tokens")


class TestStacks:
    @pytest.mark.parametrize("bad", [[], [nn.Identity()], [None]], ids=str)
    def test_blocks(self, bad):
        refuses(lambda: xf.Stack(bad), "blocks: expected at least one DerivedBlock and nothing else")

    def test_of(self):
        refuses(lambda: xf.Stack.of(nn.Identity(), 2), "block: expected an instance of DerivedBlock, got Identity")

    @pytest.mark.parametrize("bad", [0, -1, 2.0, True, "3", None], ids=repr)
    def test_depth(self, bad):
        refuses(lambda: xf.Stack.of(block(), bad), f"depth: expected a positive whole number, got {bad!r}")
        refuses(lambda: xf.Stack([block()], repeats=bad), f"repeats: expected a positive whole number, got {bad!r}")


def energy(Z):
    return Z.square().sum((-2, -1))


class TestMeter:
    @pytest.mark.parametrize("bad", [None, torch.tanh, "module", nn.Linear], ids=["none", "function", "text", "class"])
    def test_module(self, bad):
        refuses(lambda: xf.measure_faithfulness(bad, energy, Z), "module: expected an nn.Module, got")

    @pytest.mark.parametrize("bad", [None, 1.0, "energy"], ids=repr)
    def test_energy(self, bad):
        refuses(
            lambda: xf.measure_faithfulness(nn.Identity(), bad, Z),
            "energy: expected a GradientFlow or a callable of features, got",
        )

    @each(
        [
            ("number", lambda Z: 1.0, ("energy: expected a torch.Tensor one number for each sample", "got float")),
            ("tokens", lambda Z: Z.sum(-1), ("energy: expected one number, or one for each sample (2,)", "(2, 5)")),
            ("whole", lambda Z: (Z > 0).sum(), ("energy: expected a floating dtype", "torch.int64")),
            ("constant", lambda Z: torch.ones(2).double(), ("a differentiable function of Z, got one that does not",)),
            ("flat", lambda Z: 0 * Z.sum(), ("the energy is stationary at its input",)),
        ]
    )
    def test_what_an_energy_gives(self, bad, fragments):
        refuses(lambda: xf.measure_faithfulness(nn.Identity(), bad, Z), *fragments)

    @each(bad_features())
    def test_features(self, bad, fragments):
        refuses(lambda: xf.measure_faithfulness(nn.Identity(), energy, bad), *fragments)

    def test_what_a_module_gives(self):
        class Named(nn.Module):
            def forward(self, Z):
                return {"features": Z}

        refuses(lambda: xf.measure_faithfulness(Named(), energy, Z), "expected a tensor of features out, got dict")
        narrow = nn.Linear(3, 2).double()
        refuses(
            lambda: xf.measure_faithfulness(narrow, energy, Z),
            "module: expected features like Z, (2, 5, 3), got (2, 5, 2)",
        )

    def test_layers(self):
        refuses(
            lambda: xf.measure_faithfulness(nn.Sequential(nn.Identity()), energy, Z, layers=["1"]),
            "layers: expected names of sub-modules, got '1'; there are ['0']",
        )
