"""The factory: its defaults, what it accepts, and why it refuses the rest."""

from itertools import product

import pytest
import torch
from torch import nn

import xentflow as xf
from flow_instances import AXES
from instances import normal

S, F, K, H = 5, 3, 4, 2
MODELS = ("linear", "both", "own", "bilinear", "functional")
SPLITTINGS = (
    xf.LieTrotter(),
    xf.LieTrotter(exact=True),
    xf.LieTrotter(substep=xf.Heun()),
    xf.Strang(),
    xf.Strang(exact=True),
    xf.Yoshida(),
    xf.Euler(),
    xf.Heun(),
    xf.RK4(),
)
CONSTRAINTS = (xf.Free(), xf.Sphere(), xf.Dual(1.5), xf.Whitened())
ORACLES = {
    "given": xf.Given,
    "self": xf.SelfPrediction,
    "uniform": xf.Uniform,
    "learned": lambda: xf.Learned(nn.Linear(F, K).double()),
    "learned-targets": lambda: xf.LearnedTargets(S).double(),
    "shift": lambda: xf.Shift(-1),
    "shift-ahead": lambda: xf.Shift(1),
    "band": lambda: xf.Band(1),
}
STEPS = {
    "number": lambda: 0.1,
    "learned": lambda: xf.LearnedStep(0.1).double(),
    "per-feature": lambda: xf.LearnedStep(0.1, features=F).double(),
    "per-head": lambda: xf.LearnedStep(0.1, heads=H).double(),
    "certified": xf.CertifiedStep,
    "search": xf.LineSearch,
}


def model(kind, generator):
    return {
        "linear": lambda: xf.Linear(normal((H, K, F), generator)),
        "both": lambda: xf.Quadratic(normal((H, F, F), generator, 0.4)),
        "own": lambda: xf.Quadratic(normal((H, F, F), generator, 0.4), roles="own"),
        "bilinear": lambda: xf.Bilinear(normal((H, F, 2), generator)),
        "functional": lambda: xf.Functional(lambda Z: torch.stack([Z.cumsum(-1), Z.cos()], -3), heads=H),
    }[kind]()


def allowed(kind, oracle, splitting, step, constraint, causal):
    """Every rule once more, in words of one line."""
    exact, free = getattr(splitting, "exact", False), isinstance(constraint, xf.Free)
    quadratic, gradient = kind in ("both", "own"), kind != "own"
    one_euler_step = splitting in (xf.Euler(), xf.LieTrotter(), xf.LieTrotter(exact=True))
    rules = [
        quadratic or oracle not in ("shift", "shift-ahead", "band", "learned-targets"),
        not exact or (free and kind != "functional"),
        not causal or (kind == "own" and not exact and oracle != "shift-ahead" and constraint != xf.Whitened()),
        step != "per-feature" or free,
        step != "certified" or (free and one_euler_step and kind in ("linear", "bilinear")),
        step != "search" or gradient,
    ]
    return all(rules)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("axis", AXES)
def test_it_accepts_what_makes_sense_and_refuses_the_rest(axis, kind, generator):
    """All combinations: what is accepted runs, what is not is refused with what was expected and what came."""
    Z = normal((S, F), generator, 0.5)
    context = {"context": normal((K, 2), generator)} if kind == "bilinear" else {}
    made = 0
    parts = product(ORACLES, SPLITTINGS, STEPS, CONSTRAINTS, (False, True))
    for index, (oracle, splitting, step, constraint, causal) in enumerate(parts):

        def call():
            return xf.derive(
                xf.CrossEntropy(axis),
                model(kind, generator),
                oracle=ORACLES[oracle](),  # noqa: B023
                splitting=splitting,  # noqa: B023
                step=STEPS[step](),  # noqa: B023
                constraint=constraint,  # noqa: B023
                causal=causal,  # noqa: B023
            )

        if not allowed(kind, oracle, splitting, step, constraint, causal):
            with pytest.raises(xf.XentflowError, match=r"(?s)^\w+: expected .* got .*"):
                call()
            continue
        block = call()
        made += 1
        if index % 7 == 0 and oracle not in ("given", "learned"):
            with torch.no_grad():
                out = block(Z, **context)
            assert out.shape == Z.shape
            assert out.isfinite().all(), (oracle, splitting, step, constraint)
    assert made >= 200


class TestDefaults:
    def test_are_the_papers(self, generator):
        block = xf.derive(xf.CrossEntropy("classes"), xf.Linear(normal((K, F), generator)))
        assert isinstance(block.oracle, xf.Given)
        assert block.splitting == xf.LieTrotter(substep=xf.Euler(), exact=False)
        assert block.step == 1.0
        assert block.constraint == xf.Free()
        assert block.target_model is None
        assert not block.causal
        assert not block.printed_form

    def test_parts_are_named_not_placed(self, generator):
        with pytest.raises(TypeError):
            xf.derive(xf.CrossEntropy("classes"), xf.Linear(normal((K, F), generator)), xf.Uniform())

    def test_a_context_held_by_the_model_stays_no_parameter(self, generator):
        model = xf.Bilinear(normal((F, 2), generator), normal((K, 2), generator))
        block = xf.derive(xf.CrossEntropy("classes"), model, oracle=xf.Uniform())
        assert [name for name, _ in block.named_parameters()] == ["model.theta"]
        assert [name for name, _ in block.named_buffers()] == ["model.context"]

    def test_networks_are_theta(self, generator):
        net = nn.Linear(F, K).double()
        block = xf.derive(xf.CrossEntropy("classes"), xf.Functional(net), oracle=xf.Uniform())
        assert {name for name, _ in block.named_parameters()} == {"model.fn.weight", "model.fn.bias"}
        assert block.model.fn is net
