"""A block as a plain dictionary and back, for every part that is data; and the block that saves itself to a folder."""

import json

import pytest
import torch
from torch import nn

import xentflow as xf
from flow_instances import AXES, seeded
from instances import normal
from xentflow.configuration import block_config, block_from_config
from xentflow.hub import HubBlock

S, F, K, H = 5, 3, 4, 2


def rebuilt(block):
    """The same through JSON, with the state copied over."""
    config = json.loads(json.dumps(block_config(block)))
    assert config == block_config(block)
    twin = block_from_config(config).double()
    twin.load_state_dict(block.state_dict())
    assert block_config(twin) == config
    return twin


def derive(axis="classes", model=None, **settings):
    model = xf.Linear(normal((K, F), seeded(1))) if model is None else model
    return xf.derive(xf.CrossEntropy(axis), model, **{"oracle": xf.Uniform(), "step": 0.3, **settings}).double()


def same(block, **inputs):
    Z = normal((2, S, F), seeded(2))
    twin = rebuilt(block)
    assert torch.equal(twin(Z, **inputs), block(Z, **inputs))
    assert repr(twin) == repr(block)
    assert twin.derivation() == block.derivation()
    assert twin.kind == block.kind


POTENTIALS = [
    lambda axis: xf.LogSumExp(axis),
    lambda axis: xf.LogSumExp(axis, temperature=0.5),
    xf.Softplus,
    xf.HalfSquare,
    xf.Entmax,
    lambda axis: xf.Entmax(axis, alpha=2.0),
]


@pytest.mark.parametrize("axis", AXES)
class TestEveryPartThatIsData:
    @pytest.mark.parametrize("potential", POTENTIALS)
    def test_potentials(self, axis, potential):
        same(xf.derive(xf.Objective(potential(axis)), xf.Linear(normal((K, F), seeded(1))), oracle=xf.Uniform()))

    @pytest.mark.parametrize("heads", [None, H])
    def test_models(self, axis, heads):
        g, head = seeded(3), () if heads is None else (heads,)
        context = {"context": normal((2, K, 2), g)}
        same(derive(axis, xf.Linear(normal((*head, K, F), g))))
        same(derive(axis, xf.Linear(normal((*head, K, F), g), normal((*head, K), g))))
        same(derive(axis, xf.Bilinear(normal((*head, F, 2), g))), **context)
        for roles in ("both", "own"):
            same(derive(axis, xf.Quadratic(normal((*head, F, F), g, 0.3), roles)))
            same(derive(axis, xf.Quadratic.from_factor(normal((*head, F, 2), g, 0.3), roles)))

    @pytest.mark.parametrize(
        "oracle",
        [
            lambda: xf.SelfPrediction(0.5),
            lambda: xf.SelfPrediction(hard=True),
            lambda: xf.Uniform(),
            lambda: xf.LearnedTargets(S),
            lambda: xf.LearnedTargets(S, relative=True),
            lambda: xf.Shift(-2),
            lambda: xf.Band(2),
        ],
    )
    def test_oracles(self, axis, oracle):
        same(derive(axis, xf.Quadratic(normal((F, F), seeded(4), 0.3)), oracle=oracle()))

    def test_given_and_neighbours(self, axis):
        C = torch.softmax(normal((2, S, K), seeded(5)), -1 if axis == "classes" else -2)
        same(derive(axis, oracle=xf.Given()), targets=C)
        memory = xf.NearestNeighbours(2).remember(
            normal((9, F), seeded(6)), torch.softmax(normal((9, K), seeded(7)), -1)
        )
        same(derive(axis, oracle=memory))

    @pytest.mark.parametrize(
        "splitting",
        [
            xf.LieTrotter(),
            xf.LieTrotter(exact=True),
            xf.LieTrotter(substep=xf.RK4()),
            xf.Strang(substep=xf.Euler(), exact=True),
            xf.Yoshida(),
            xf.Euler(),
            xf.Heun(),
            xf.RK4(),
        ],
        ids=repr,
    )
    def test_splittings(self, axis, splitting):
        same(derive(axis, splitting=splitting))

    @pytest.mark.parametrize(
        "constraint", [xf.Free(), xf.Sphere(), xf.Sphere(1.5), xf.Dual(1.5), xf.Whitened()], ids=repr
    )
    def test_constraints(self, axis, constraint):
        same(derive(axis, constraint=constraint))

    @pytest.mark.parametrize(
        "step",
        [
            lambda: 0.25,
            lambda: 1,
            lambda: xf.LearnedStep(0.2),
            lambda: xf.LearnedStep(0.2, features=F),
            lambda: xf.LearnedStep(0.2, heads=H),
            lambda: xf.CertifiedStep(),
            lambda: xf.LineSearch(2.0, 0.7, 1e-3, 30),
        ],
    )
    def test_steps(self, axis, step):
        same(derive(axis, xf.Linear(normal((H, K, F), seeded(8))), step=step()))

    def test_flags_and_another_theta(self, axis):
        theta = normal((F, F), seeded(9), 0.3)
        same(derive(axis, xf.Quadratic(theta, "own"), causal=True))
        same(derive(axis, xf.Quadratic(theta), printed_form=True))
        same(derive(axis, xf.Quadratic(theta), target_model=xf.Quadratic.from_factor(theta)))


class TestWhatIsCode:
    @pytest.mark.parametrize(
        ("block", "words"),
        [
            (
                lambda: derive(model=xf.Functional(nn.Linear(F, K))),
                "a Linear, Quadratic or Bilinear model, got Functional",
            ),
            (lambda: derive(oracle=xf.Learned(nn.Linear(F, K))), "an oracle that is data, got Learned"),
            (lambda: derive(step=lambda flow, Z: 0.1), "got function"),
            (
                lambda: derive(model=xf.Bilinear(normal((F, 2), seeded(1)), normal((K, 2), seeded(1)))),
                "a Bilinear model without a context",
            ),
            (lambda: derive(splitting=Own()), "got Own"),
        ],
        ids=["model", "oracle", "step", "context", "splitting"],
    )
    def test_is_refused_by_name(self, block, words):
        with pytest.raises(xf.XentflowError, match=f"config: expected .*{words}"):
            block_config(block())


class Own(xf.Euler):
    """An integrator of a user's."""


CONFIG = block_config(derive())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"potential": {"type": "Sigmoid", "axis": "classes"}}, "expected a type among .* got 'Sigmoid'"),
        ({"potential": {"type": "LogSumExp", "axis": "classes"}}, "for LogSumExp exactly the entries"),
        ({"potential": "LogSumExp"}, "expected a type among .* got 'LogSumExp'"),
        ({"model": {"type": "Functional"}}, "got 'Functional'"),
        ({"model": {"type": "Linear", "theta": [K, F]}}, "for Linear exactly the entries"),
        ({"oracle": {"type": "Learned"}}, "got 'Learned'"),
        ({"oracle": {"type": "Uniform", "k": 3}}, "for Uniform exactly the entries"),
        ({"step": {"type": "LearnedStep"}}, "for LearnedStep exactly the entries"),
        ({"step": {"type": "Sometimes"}}, "got 'Sometimes'"),
        ({"extra": 1}, "expected exactly the entries"),
    ],
)
def test_dictionaries_that_describe_no_block(change, words):
    with pytest.raises(xf.XentflowError, match=words):
        block_from_config({**CONFIG, **change})
    without = {name: value for name, value in CONFIG.items() if name not in change}
    with pytest.raises(xf.XentflowError, match="config: expected exactly the entries"):
        block_from_config({**without, "other": 1})


@pytest.mark.parametrize("config", [None, [], "block", {}])
def test_what_is_no_dictionary(config):
    with pytest.raises(xf.XentflowError, match="config: expected exactly the entries"):
        block_from_config(config)


class TestHub:
    def test_saves_to_a_folder_and_comes_back(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        block = derive(
            model=xf.Quadratic.from_factor(normal((H, F, 2), seeded(1)).float(), "own"),
            oracle=xf.Shift(-1),
            causal=True,
            step=xf.LearnedStep(0.2, heads=H),
        ).float()
        saved = HubBlock.of(block)
        assert saved.block is block
        saved.save_pretrained(tmp_path)
        assert {"config.json", "model.safetensors"} <= {path.name for path in tmp_path.iterdir()}
        loaded = HubBlock.from_pretrained(tmp_path)
        Z = normal((2, S, F), seeded(2)).float()
        assert torch.equal(loaded(Z), block(Z))
        assert torch.equal(saved(Z), block(Z))
        assert repr(loaded.block) == repr(block)
        assert loaded.block.derivation() == block.derivation()

    def test_passes_inputs_on(self):
        block = derive(oracle=xf.Given())
        Z, C = normal((2, S, F), seeded(2)), torch.softmax(normal((2, S, K), seeded(3)), -1)
        assert torch.equal(HubBlock.of(block)(Z, targets=C), block(Z, targets=C))
        assert torch.equal(HubBlock.of(block)(Z, C), block(Z, C))

    def test_keeps_the_dtype(self, tmp_path):
        block = derive()
        HubBlock.of(block).save_pretrained(tmp_path)
        loaded, Z = HubBlock.from_pretrained(tmp_path).double(), normal((2, S, F), seeded(2))
        # Loading fills single-precision parameters: the values are the saved ones, rounded.
        assert (loaded(Z) - block(Z)).abs().max() <= 1e-6
