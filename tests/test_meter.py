"""The meter: planted updates measured to rounding, wrong scales told apart, real layers beside the random control."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import xentflow as xf
from flow_instances import AXES, random_flow, seeded
from instances import normal

S, F, K = 6, 8, 5
ENERGIES = ("linear", "quadratic", "bilinear", "functional")


class Moves(nn.Module):
    """Z plus a given update."""

    def __init__(self, update):
        super().__init__()
        self.update = update

    def forward(self, Z):
        return Z + (self.update(Z) if callable(self.update) else self.update)


def energy_of(model, C):
    """ℓ of each sample as a plain callable."""

    def energy(Z):
        N = model.logits(Z)
        return torch.logsumexp(N, -1).sum(-1) - (C * N).sum((-2, -1))

    return energy


class TestPlanted:
    @pytest.mark.parametrize("step", [1e-3, 0.1, 2.0])
    @pytest.mark.parametrize("kind", ENERGIES)
    @pytest.mark.parametrize("axis", AXES)
    def test_a_derived_block_has_cosine_one_and_scale_h(self, axis, kind, step):
        flow, Z = random_flow(kind, axis, seed=3, batch=(2,), F=4)
        block = xf.derive(flow.objective, flow.model, splitting=xf.Euler(), step=step) if kind != "bilinear" else None
        block = block or Moves(lambda Z: step * flow.velocity(Z))
        given = Moves(lambda Z: block(Z, targets=flow.targets(Z)) - Z) if isinstance(block, xf.DerivedBlock) else block
        found = xf.measure_faithfulness(given, flow, Z)
        assert found.cosine >= 1 - 1e-12
        assert found.scale == pytest.approx(step, rel=1e-12)
        assert found.relative_error <= 1e-12
        assert_close(found.energy_change, flow.energy(Z + step * flow.velocity(Z)) - flow.energy(Z))

    def test_without_targets_to_pass_on(self, generator):
        """As a user has it: a block with an oracle of its own, against a flow for the same targets."""
        theta, Z = normal((K, F), generator), normal((3, S, F), generator)
        for axis in AXES:
            block = xf.derive(xf.CrossEntropy(axis), xf.Linear(theta), oracle=xf.Uniform(), step=0.25)
            found = xf.measure_faithfulness(block, block.flow(Z), Z)
            assert found.cosine >= 1 - 1e-12
            assert found.scale == pytest.approx(0.25, rel=1e-12)
            assert found.name == "DerivedBlock"
            assert found.layers == ()

    def test_on_a_constraint_the_direction_is_the_constrained_one(self):
        flow, Z = random_flow("linear", "classes", 1, constraint=xf.Sphere())
        found = xf.measure_faithfulness(Moves(lambda Z: 0.3 * flow.velocity(Z)), flow, Z)
        assert found.cosine >= 1 - 1e-12
        free = xf.GradientFlow(flow.objective, flow.model, flow.targets(Z))
        assert xf.measure_faithfulness(Moves(lambda Z: 0.3 * flow.velocity(Z)), free, Z).cosine < 0.99

    @pytest.mark.parametrize("axis", AXES)
    def test_a_block_of_a_dual_state_follows_its_own_flow_and_not_the_gradient_in_the_state(self, axis, generator):
        theta, Z = normal((F, F), generator, 0.3), normal((3, S, F), generator)
        block = xf.derive(xf.CrossEntropy(axis), xf.Quadratic(theta), oracle=xf.Band(), splitting=xf.Euler(), step=0.05,
                          constraint=xf.Dual(F**0.5))  # fmt: skip
        flow = block.flow(Z)
        found = xf.measure_faithfulness(block, flow, Z)
        assert found.cosine >= 1 - 1e-12
        assert found.scale == pytest.approx(0.05, rel=1e-12)
        assert found.fraction_descending == 1
        in_the_state = xf.measure_faithfulness(block, flow.energy, Z)
        assert 0.1 < in_the_state.cosine < 0.99
        assert_close(in_the_state.energy_change, found.energy_change)

    @pytest.mark.parametrize("factor", [1e-3, 0.5, 2.0, 100.0])
    def test_an_energy_off_by_a_constant_is_told_by_the_scale_alone(self, factor, generator):
        model, Z = xf.Linear(normal((K, F), generator)), normal((3, S, F), generator)
        C = torch.full((3, S, K), 1 / K, dtype=torch.float64)
        energy = energy_of(model, C)
        block = xf.derive(xf.CrossEntropy("classes"), model, oracle=xf.Uniform(), step=0.1)
        found = xf.measure_faithfulness(block, lambda Z: factor * energy(Z), Z)
        assert found.cosine >= 1 - 1e-12
        assert found.relative_error <= 1e-12
        assert found.scale == pytest.approx(0.1 / factor, rel=1e-12)
        assert_close(found.energy_change, factor * (energy(block(Z)) - energy(Z)).detach())

    def test_a_flow_and_its_energy_alone_agree(self, generator):
        model, Z = xf.Quadratic(normal((F, F), generator, 0.3)), normal((3, S, F), generator)
        C = torch.softmax(normal((3, S, S), generator), -1)
        module = Moves(normal(Z.shape, generator))
        mine = xf.measure_faithfulness(module, xf.GradientFlow(xf.CrossEntropy("classes"), model, C), Z)
        other = xf.measure_faithfulness(module, energy_of(model, C), Z)
        for name in ("cosine", "scale", "relative_error"):
            assert getattr(mine, name) == pytest.approx(getattr(other, name), rel=1e-10)
        assert_close(mine.energy_change, other.energy_change)

    def test_the_definitions(self, generator):
        Z, D = normal((2, S, F), generator), normal((2, S, F), generator)
        found = xf.measure_faithfulness(Moves(D), lambda Z: Z.square().sum((-2, -1)) / 2, Z)
        V = -Z
        c = float((D * V).sum() / V.square().sum())
        assert found.cosine == pytest.approx(float((D * V).sum() / (D.norm() * V.norm())), rel=1e-12)
        assert found.scale == pytest.approx(c, rel=1e-12)
        assert found.relative_error == pytest.approx(float((D - c * V).norm() / D.norm()), rel=1e-12)
        change = ((Z + D).square().sum((-2, -1)) - Z.square().sum((-2, -1))) / 2
        assert_close(found.energy_change, change)
        assert found.fraction_descending == float((change < 0).double().mean())
        # Pythagoras: the best multiple leaves what is at right angles to V.
        assert found.relative_error**2 + found.cosine**2 == pytest.approx(1, rel=1e-12)

    def test_one_number_in_all_will_do(self, generator):
        Z = normal((2, S, F), generator)
        found = xf.measure_faithfulness(Moves(-0.5 * Z), lambda Z: Z.square().sum() / 2, Z)
        assert found.cosine >= 1 - 1e-12
        assert found.energy_change.shape == ()
        assert found.fraction_descending == 1.0

    def test_ascent_and_rest(self, generator):
        Z = normal((2, S, F), generator)
        energy = lambda Z: Z.square().sum((-2, -1)) / 2  # noqa: E731
        up = xf.measure_faithfulness(Moves(0.1 * Z), energy, Z)
        assert up.cosine <= -1 + 1e-12
        assert up.fraction_descending == 0.0
        still = xf.measure_faithfulness(nn.Identity(), energy, Z)
        assert (still.cosine, still.scale, still.relative_error) == (0.0, 0.0, 1.0)


class TestControl:
    def test_spread_is_that_of_random_directions(self, generator):
        """The cosine of isotropic directions with any fixed one has mean 0 and variance 1/n."""
        Z = normal((4, S, F), generator)
        found = xf.measure_faithfulness(Moves(normal(Z.shape, generator)), lambda Z: Z.square().sum() / 2, Z)
        mean, spread = found.control_cosine
        expected = Z.numel() ** -0.5
        assert abs(mean) <= 4 * expected / 200**0.5
        assert spread == pytest.approx(expected, rel=0.25)

    def test_repeats_with_its_seed_and_touches_no_global_state(self, generator):
        Z = normal((4, S, F), generator)
        module, energy = Moves(normal(Z.shape, generator)), lambda Z: Z.square().sum() / 2
        state = torch.get_rng_state()
        first, second = (xf.measure_faithfulness(module, energy, Z, seed=4) for _ in range(2))
        assert first.control_cosine == second.control_cosine
        assert xf.measure_faithfulness(module, energy, Z, seed=5).control_cosine != first.control_cosine
        assert torch.equal(torch.get_rng_state(), state)

    def test_a_transformer_layer_beside_it(self):
        """A random layer's update is no descent on a random energy: its cosine is of the control's size."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(F, 2, 16, batch_first=True).double().eval()
            # What makes a layer move along Z itself is not attention: look at the branch alone.
        generator = seeded(1)
        Z = normal((8, S, F), generator)
        flow = xf.GradientFlow(
            xf.CrossEntropy("classes"),
            xf.Quadratic(normal((F, F), generator, 0.2)),
            torch.softmax(normal((8, S, S), generator), -1),
        )
        found = xf.measure_faithfulness(layer, flow, Z)
        assert found.name == "TransformerEncoderLayer"
        mean, spread = found.control_cosine
        assert abs(found.cosine - mean) <= 6 * spread
        assert found.relative_error > 0.9
        assert found.energy_change.shape == (8,)

    def test_a_layer_trained_towards_the_step_leaves_the_control_behind(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(F, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        generator = seeded(2)
        Z = normal((16, S, F), generator).float()
        model = xf.Linear(normal((K, F), generator).float())
        block = xf.derive(xf.CrossEntropy("classes"), model, oracle=xf.Uniform(), step=0.3)
        flow, wanted = block.flow(Z), block(Z).detach()
        before = xf.measure_faithfulness(layer, flow, Z)
        optimiser = torch.optim.Adam(layer.parameters(), lr=3e-3)
        for _ in range(150):
            optimiser.zero_grad()
            (layer(Z) - wanted).square().mean().backward()
            optimiser.step()
        after = xf.measure_faithfulness(layer, flow, Z)
        assert after.cosine > 0.9 > abs(before.cosine)
        assert after.cosine > after.control_cosine[0] + 20 * after.control_cosine[1]
        assert after.scale == pytest.approx(0.3, rel=0.2)
        assert after.fraction_descending == 1.0


def hooks(module):
    return sum(len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules())


class TestLayers:
    def test_of_a_stack(self, generator):
        model, Z = xf.Linear(normal((K, F), generator)), normal((2, S, F), generator)
        block = xf.derive(xf.CrossEntropy("classes"), model, oracle=xf.Uniform(), step=0.2)
        for stack, names in (
            (xf.Stack.of(block, 3, tied=False), ["blocks.0", "blocks.1", "blocks.2"]),
            (xf.Stack.of(block, 3), ["blocks.0"] * 3),
        ):
            found = xf.measure_faithfulness(stack, block.flow(Z), Z)
            assert [layer.name for layer in found.layers] == names
            for layer in found.layers:  # θ is the same everywhere, so each descends at its own input
                assert layer.cosine >= 1 - 1e-12
                assert layer.scale == pytest.approx(0.2, rel=1e-12)
            assert_close(sum(layer.energy_change for layer in found.layers), found.energy_change)
            assert hooks(stack) == 0

    def test_of_a_transformer(self, generator):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(F, 2, 16, batch_first=True)
            encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double().eval()
        Z = normal((2, S, F), generator)
        found = xf.measure_faithfulness(encoder, lambda Z: Z.pow(4).sum((-2, -1)), Z)
        assert [layer.name for layer in found.layers] == ["layers.0", "layers.1", "layers.2"]
        assert_close(sum(layer.energy_change for layer in found.layers), found.energy_change)
        assert hooks(encoder) == 0
        first = xf.measure_faithfulness(encoder.layers[0], lambda Z: Z.pow(4).sum((-2, -1)), Z)
        assert found.layers[0].cosine == pytest.approx(first.cosine, rel=1e-12)

    def test_named_ones_alone(self, generator):
        Z = normal((2, S, F), generator)
        module = nn.Sequential(Moves(0.1 * Z), nn.Linear(F, 3), nn.Linear(3, F), Moves(-0.1 * Z)).double()
        energy = lambda Z: Z.square().sum((-2, -1))  # noqa: E731
        # The layers in between leave the shape of features, and are passed over.
        assert [layer.name for layer in xf.measure_faithfulness(module, energy, Z).layers] == ["0", "3"]
        assert [layer.name for layer in xf.measure_faithfulness(module, energy, Z, layers=["3"]).layers] == ["3"]
        assert xf.measure_faithfulness(module, energy, Z, layers=[]).layers == ()

    def test_a_tuple_is_taken_at_its_first_entry(self, generator):
        class Tuple(Moves):
            def forward(self, Z):
                return super().forward(Z), "weights"

        Z = normal((2, S, F), generator)
        energy = lambda Z: Z.square().sum((-2, -1)) / 2  # noqa: E731
        assert xf.measure_faithfulness(Tuple(-0.1 * Z), energy, Z).cosine >= 1 - 1e-12

    def test_hooks_go_even_when_the_module_fails(self, generator):
        class Fails(nn.Module):
            def forward(self, Z):
                raise RuntimeError("broken")

        module, Z = nn.Sequential(Moves(1.0), Fails()), normal((S, F), generator)
        with pytest.raises(RuntimeError, match="broken"):
            xf.measure_faithfulness(module, lambda Z: Z.square().sum(), Z)
        assert hooks(module) == 0

    def test_nothing_of_the_module_changes(self, generator):
        module = nn.Sequential(nn.Linear(F, F), nn.Dropout(0.0), nn.Linear(F, F)).double().train()
        state = {name: value.clone() for name, value in module.state_dict().items()}
        Z = normal((2, S, F), generator).requires_grad_()
        xf.measure_faithfulness(module, lambda Z: Z.square().sum((-2, -1)), Z)
        assert module.training
        assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
        assert all(parameter.grad is None for parameter in module.parameters())
        assert Z.grad is None
