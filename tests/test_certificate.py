"""The certificate: each of its lines is the measured thing, and is wrong as soon as the code behind it is."""

import pytest
import torch
from torch.testing import assert_close

import xentflow as xf
from flow_instances import AXES
from instances import normal
from xentflow.certificate import certify

S, F, K, H = 6, 4, 3, 2
BLOCKS = {
    "gradient flow": lambda axis, g: xf.derive(xf.CrossEntropy(axis), xf.Quadratic(normal((H, F, F), g, 0.4)),
                                               oracle=xf.Band(), splitting=xf.Strang(), step=0.1),
    "game": lambda axis, g: xf.derive(xf.CrossEntropy(axis), xf.Quadratic(normal((H, F, F), g, 0.4), roles="own"),
                                      oracle=xf.Shift(-1), causal=True, step=xf.LearnedStep(0.1, heads=H)),
    "dual": lambda axis, g: xf.derive(xf.CrossEntropy(axis), xf.Quadratic(normal((H, F, F), g, 0.4)),
                                      oracle=xf.Band(), splitting=xf.Strang(), step=0.1, constraint=xf.Dual(F**0.5)),
    "dual game": lambda axis, g: xf.derive(xf.CrossEntropy(axis), xf.Quadratic(normal((H, F, F), g, 0.4), roles="own"),
                                           oracle=xf.Shift(-1), causal=True, step=xf.LearnedStep(0.1, heads=H),
                                           constraint=xf.Dual(F**0.5)),
    "no common energy": lambda axis, g: xf.derive(xf.CrossEntropy(axis), xf.Quadratic(normal((F, F), g, 0.4)),
                                                  oracle=xf.Uniform(), printed_form=True, step=0.1),
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", BLOCKS)
every_axis = pytest.mark.parametrize("axis", AXES)


def linear(generator, **settings):
    settings = {"oracle": xf.Uniform(), "step": 0.1} | settings
    return xf.derive(xf.CrossEntropy("classes"), xf.Linear(normal((K, F), generator)), **settings)


@every_axis
@every_kind
def test_of_each_kind(axis, kind, generator):
    block, Z = BLOCKS[kind](axis, generator), normal((3, S, F), generator)
    c = certify(block, Z, {})
    assert c.kind == {"dual": "gradient flow", "dual game": "game"}.get(kind, kind)
    # What is printed is far from the gradient; a gradient flow and a game are what they say to rounding.
    assert (c.gradient_error > 0.05) if kind == "no common energy" else (c.gradient_error <= 1e-14)
    assert (c.dissipation_error is None) == (c.kind != "gradient flow")
    assert c.dissipation_error is None or c.dissipation_error <= 1e-14
    assert c.curvature is None
    assert not c.certified
    assert c.declared_order == block.splitting.order
    assert c.measured_order == pytest.approx(c.declared_order, abs=0.15)
    assert c.parameters == sum(parameter.numel() for parameter in block.parameters())
    assert len(c.energy) == 11


@every_axis
@pytest.mark.parametrize("kind", ["gradient flow", "game", "dual", "dual game"])
def test_a_wrong_pullback_is_noticed(axis, kind, generator, monkeypatch):
    block, Z = BLOCKS[kind](axis, generator), normal((3, S, F), generator)
    for pullback in ("query_pullback", "key_pullback"):
        right = getattr(xf.Quadratic, pullback)
        with monkeypatch.context() as broken:
            broken.setattr(xf.Quadratic, pullback, lambda self, Z, M, right=right: -right(self, Z, M))
            gradient = kind in ("gradient flow", "dual")
            plays = gradient or (pullback == "query_pullback") == (axis == "classes")
            c = certify(block, Z, {})
            assert (c.gradient_error > 0.1) == plays
            assert not gradient or c.dissipation_error > 0.1


@every_axis
def test_of_a_dual_state_every_part_is_looked_at(axis, generator, monkeypatch):
    """The part of the velocity along z, which moves no features; the features themselves; and how they move."""
    block, Z = BLOCKS["dual"](axis, generator), normal((3, S, F), generator)
    right = xf.GradientFlow.velocity
    with monkeypatch.context() as broken:
        broken.setattr(xf.GradientFlow, "velocity", lambda self, Z: xf.Sphere().tangent(Z, right(self, Z)))
        assert certify(block, Z, {}).gradient_error > 0.1
    for name, wrong in (("features", lambda self, Z: Z), ("metric", lambda self, Z, V: xf.Sphere().tangent(Z, V))):
        with monkeypatch.context() as broken:
            broken.setattr(xf.Dual, name, wrong)
            assert certify(block, Z, {}).dissipation_error > 0.01


@every_axis
@pytest.mark.parametrize("size", [1e-3, 1, 1e3, 1e6])
def test_a_wrong_metric_is_noticed_of_dual_states_of_any_length(size, axis, generator, monkeypatch):
    block, Z = BLOCKS["dual"](axis, generator), size * normal((3, S, F), generator)
    assert certify(block, Z, {}).dissipation_error <= 1e-14
    right = xf.Dual.metric
    for wrong in (lambda self, Z, V: 0 * V, lambda self, Z, V: 1.1 * right(self, Z, V)):
        with monkeypatch.context() as broken:
            broken.setattr(xf.Dual, "metric", wrong)
            assert certify(block, Z, {}).dissipation_error > 0.01


def test_of_a_dual_state_with_tokens_at_the_origin(generator):
    block = linear(generator, splitting=xf.Heun(), constraint=xf.Dual(F**0.5), oracle=xf.Given())
    Z, given = normal((3, S, F), generator), {"targets": normal((3, S, K), generator).softmax(-1)}
    assert certify(block, Z, given).measured_order == pytest.approx(2, abs=0.1)
    Z[0, 1] = 0
    # What is seen of a token jumps as that leaves, and with it the velocity: there is no order to measure.
    for start in (Z, torch.zeros_like(Z)):
        c = certify(block, start, given)
        assert max(c.gradient_error, c.dissipation_error) <= 1e-14
        assert c.measured_order is None


@every_axis
def test_of_a_dual_state_with_padding_at_the_origin(axis, generator):
    """What is padding stays there, and the order is that of the rest."""
    block, Z = BLOCKS["dual"](axis, generator), normal((3, S, F), generator)
    real = torch.ones(3, S, dtype=torch.bool)
    real[:, -1] = False
    Z[:, -1] = 0
    c = certify(block, Z, {"padding": real})
    assert max(c.gradient_error, c.dissipation_error) <= 1e-14
    assert c.measured_order == pytest.approx(c.declared_order, abs=0.15)


def test_a_stepper_of_lower_order_is_noticed(generator, monkeypatch):
    block, Z = linear(generator, splitting=xf.Heun()), normal((2, S, F), generator)
    assert certify(block, Z, {}).measured_order == pytest.approx(2, abs=0.05)
    monkeypatch.setattr(xf.Heun, "advance", xf.Euler.advance)
    assert certify(block, Z, {}).measured_order == pytest.approx(1, abs=0.05)


def test_energies_are_those_of_ten_passes_and_rises_are_counted(generator):
    block, Z = linear(generator), normal((3, S, F), generator)
    energy = block.trajectory(Z, steps=10).energy[::2].sum(-1)
    c = certify(block, Z, {})
    assert_close(torch.tensor(c.energy, dtype=torch.float64), energy)
    assert c.rises == 0
    theta = torch.tensor([[2.0], [-2.0]], dtype=torch.float64)
    swinging = xf.derive(xf.CrossEntropy("classes"), xf.Linear(theta), oracle=xf.Uniform(), step=2.0)
    # L = 4 and h = 4/L: from near its minimum every sample swings out at first.
    assert certify(swinging, torch.full((5, 1, 1), 1e-3), {}, passes=2).rises == 10


def test_curvature_parameters_and_arithmetic(generator):
    block, Z = linear(generator), normal((3, S, F), generator)
    c = certify(block, Z, {})
    assert c.curvature == pytest.approx(
        float(torch.linalg.matrix_norm(block.model.theta.detach(), 2)) ** 2 / 2, rel=1e-12
    )
    assert c.certified
    assert c.step == pytest.approx(0.1)
    # Zθᵀ, pθ and Cθ for each of three samples.
    assert c.flops == 3 * 3 * 2 * S * K * F
    assert c.parameters == K * F
    assert c.least_bytes == 4 * (K * F + 2 * 3 * S * F)
    assert c.record()["rises"] == c.rises


def test_neither_the_block_nor_its_input_changes(generator):
    block, Z = linear(generator).float(), normal((2, S, F), generator).float()
    kept, theta = Z.clone(), block.model.theta.detach().clone()
    certify(block, Z, {})
    assert torch.equal(Z, kept)
    assert torch.equal(block.model.theta, theta)
    assert block.model.theta.dtype == torch.float32


@pytest.mark.parametrize(
    "still",
    [
        lambda g: (xf.Linear(normal((1, F), g)), xf.Free()),
        lambda g: (xf.Linear(torch.zeros(K, F, dtype=torch.float64)), xf.Free()),
        lambda g: (xf.Quadratic(normal((F, F), g)), xf.Free()),
        lambda g: (xf.Bilinear(normal((F, 2), g), normal((1, 2), g)), xf.Free()),
    ],
    ids=["one class", "zero theta", "one token", "one key"],
)
def test_where_nothing_moves_there_is_no_order_to_measure(still, generator):
    model, constraint = still(generator)
    block = xf.derive(xf.CrossEntropy("classes"), model, oracle=xf.Uniform(), constraint=constraint, step=0.1)
    c = certify(block, normal((2, 1, F), generator), {})
    assert c.measured_order is None
    assert c.gradient_error == c.dissipation_error == 0
    assert c.rises == 0


def of_one_feature(constraint, generator):
    model = xf.Linear(normal((K, 1), generator))
    block = xf.derive(xf.CrossEntropy("classes"), model, oracle=xf.Uniform(), constraint=constraint, step=1e-3)
    return block, certify(block, normal((2, S, 1), generator), {})


def test_nor_on_a_sphere_of_one_dimension(generator):
    """A token of one feature has nowhere to go: what is left of its velocity is rounding, and is taken for that."""
    _, c = of_one_feature(xf.Sphere(), generator)
    assert max(c.gradient_error, c.dissipation_error, c.constraint_error) <= 1e-14
    assert c.rises == 0
    assert c.measured_order is None


def test_a_dual_state_of_one_feature_moves_and_is_not_seen_to(generator):
    block, c = of_one_feature(xf.Dual(1.5), generator)
    assert max(c.gradient_error, c.dissipation_error) <= 1e-14
    assert c.constraint_error is None
    assert c.rises == 0
    assert c.energy == pytest.approx([c.energy[0]] * 11, rel=1e-15)
    Z = normal((2, S, 1), generator)
    assert (block(Z) != Z).any()


@pytest.mark.parametrize("step", [1e30, 1e100, 1e200, 1e300])
def test_a_block_that_blows_up_is_told_with_its_step(step, generator):
    block = xf.derive(
        xf.CrossEntropy("classes"), xf.Quadratic(normal((F, F), generator)), oracle=xf.Uniform(), step=step
    )
    with pytest.raises(
        xf.XentflowError, match=r"certificate: expected .* finite over 10 passes, got .* take a smaller"
    ):
        certify(block, normal((2, S, F), generator), {})
