"""The record of a pass: shapes, stages, times, energies where they belong, and when it refuses."""

import pytest
import torch
from torch.testing import assert_close

import xentflow as xf
from flow_instances import AXES
from instances import normal

S, F, K, H = 5, 3, 4, 2

STAGES = {
    xf.LieTrotter(): ["attention", "target"],
    xf.LieTrotter(exact=True): ["attention", "target"],
    xf.Strang(): ["target", "attention", "target"],
    xf.Yoshida(): ["target", "attention", "target", "attention", "target", "attention", "target"],
    xf.Euler(): ["Euler"],
    xf.Heun(): ["Heun"],
    xf.RK4(): ["RK4"],
}
W = 1 / (2 - 2 ** (1 / 3))
CLOCKS = {
    "LieTrotter": [0.5, 1],
    "Strang": [0.25, 0.75, 1],
    "Yoshida": [W / 4, 3 * W / 4, (W + 0.5) / 2, (1 - W + 0.5) / 2, 1 - 3 * W / 4, 1 - W / 4, 1],
}


def quadratic_block(axis, generator, heads=None, **settings):
    theta = normal((F, F) if heads is None else (heads, F, F), generator, 0.5)
    settings = {"oracle": xf.Band(), "step": 0.3, **settings}
    return xf.derive(xf.CrossEntropy(axis), xf.Quadratic(theta), **settings)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("splitting", STAGES, ids=repr)
@pytest.mark.parametrize("axis", AXES)
def test_what_it_holds(axis, splitting, batch, generator):
    block, Z = quadratic_block(axis, generator, H, splitting=splitting), normal((*batch, S, F), generator)
    path = block.trajectory(Z, steps=3)
    stages = STAGES[splitting]
    points = 1 + 3 * len(stages)
    assert len(path) == points
    assert path.stages == ["start", *stages * 3]
    assert path.Z.shape == (points, *batch, S, F)
    assert path.times.shape == path.energy.shape == path.gradient_norm.shape == (points, *batch)
    assert path.passes.shape == (4, *batch, S, F)
    assert path.logits.shape == (4, *batch, H, S, S)
    assert torch.equal(path.Z[0], Z)
    assert torch.equal(path.passes, path.Z[:: len(stages)])
    expected = Z
    for index in range(3):
        expected = block(expected)
        assert torch.equal(path.passes[index + 1], expected)


@pytest.mark.parametrize("splitting", STAGES, ids=repr)
def test_the_clock(splitting, generator):
    """A stage is worth its share of h, the mean of how far the two terms have come."""
    block, Z = quadratic_block("classes", generator, splitting=splitting, step=0.2), normal((2, S, F), generator)
    fractions = CLOCKS.get(type(splitting).__name__, [1])
    expected = [0.0, *(0.2 * (step + fraction) for step in range(2) for fraction in fractions)]
    found = block.trajectory(Z, steps=2).times
    assert_close(found, torch.tensor(expected).double()[:, None].expand(-1, 2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis", AXES)
class TestEnergies:
    def test_are_the_flow_s_at_the_points(self, axis, generator):
        block, Z = quadratic_block(axis, generator, H, splitting=xf.Strang()), normal((2, S, F), generator)
        path, flow = block.trajectory(Z, steps=2), block.flow(Z)
        for index, point in enumerate(path.Z):
            assert torch.equal(path.energy[index], flow.energy(point))
            assert_close(path.gradient_norm[index], flow.velocity(point).flatten(1).norm(dim=1), rtol=1e-14, atol=0)
            assert_close(path.gradient_norm[index] ** 2, flow.dissipation(point))

    def test_follow_the_targets_of_each_pass(self, axis, generator):
        """With an oracle that reads the features, every pass has an energy of its own."""
        block = quadratic_block(axis, generator, oracle=xf.SelfPrediction(0.5), splitting=xf.Euler())
        path = block.trajectory(normal((2, S, F), generator), steps=2)
        first, second = block.flow(path.Z[0]), block.flow(path.Z[1])
        assert torch.equal(path.energy[1], first.energy(path.Z[1]))
        assert torch.equal(path.energy[2], second.energy(path.Z[2]))
        assert not torch.equal(second.energy(path.Z[1]), first.energy(path.Z[1]))

    def test_take_masks_heads_and_padding_as_the_block_does(self, axis, generator):
        Z, padding = normal((2, S, F), generator), torch.tensor([[True] * S, [True] * 3 + [False] * 2])
        block = quadratic_block(axis, generator, H)
        path = block.trajectory(Z, padding=padding, steps=2)
        assert torch.equal(path.passes[1], block(Z, padding=padding))
        assert torch.equal(path.energy[0], block.flow(Z, padding=padding).energy(Z))

    def test_fall(self, axis, generator):
        block = quadratic_block(axis, generator, oracle=xf.Uniform(), step=xf.LineSearch(), splitting=xf.Euler())
        path = block.trajectory(normal((20, S, F), generator), steps=10)
        assert (path.energy.diff(dim=0) <= 0).all()
        assert (path.times.diff(dim=0) >= 0).all()


class TestSteps:
    def test_of_a_line_search_each_sample_has_its_own_time(self, generator):
        Z = normal((6, S, F), generator) * torch.tensor([0.1, 0.5, 1, 2, 3, 5]).double()[:, None, None]
        block = quadratic_block("classes", generator, step=xf.LineSearch(initial=8.0), splitting=xf.Euler())
        times = block.trajectory(Z).times
        assert times.shape == (2, 6)
        assert len(set(times[1].tolist())) > 1
        with torch.no_grad():
            flow = block.flow(Z)
            reached = Z + times[1][:, None, None] * flow.velocity(Z)
        assert_close(block(Z), reached)

    @pytest.mark.parametrize("kind", ["one", "features", "heads"])
    def test_learned(self, kind, generator):
        step = xf.LearnedStep(0.3, **{"one": {}, "features": {"features": F}, "heads": {"heads": H}}[kind])
        with torch.no_grad():
            step.log_step.add_(torch.linspace(0, 1, max(step.log_step.numel(), 1)).reshape(step.log_step.shape))
        block = quadratic_block("classes", generator, H, step=step).double()
        times = block.trajectory(normal((2, S, F), generator)).times
        # Per head the step is in the energy's weights, and the flow is followed for unit time.
        whole = 1.0 if kind == "heads" else float(step.log_step.detach().exp().mean())
        assert_close(times[-1], torch.full((2,), whole, dtype=torch.float64), rtol=1e-6, atol=0)


class TestRefusals:
    def test_after_the_parameters_changed(self, generator):
        block, Z = quadratic_block("classes", generator), normal((2, S, F), generator)
        for question in ("energy", "gradient_norm", "logits"):
            path = block.trajectory(Z)
            with torch.no_grad():
                block.model.theta.add_(0.1)
            with pytest.raises(xf.XentflowError, match="trajectory: expected the parameters of the trace, got changed"):
                getattr(path, question)
            assert path.Z.shape == (3, 2, S, F)  # what was kept is still true
            assert path.times.shape == (3, 2)

    def test_what_was_asked_before_stays(self, generator):
        block, Z = quadratic_block("classes", generator), normal((2, S, F), generator)
        path = block.trajectory(Z)
        energy = path.energy.clone()
        with torch.no_grad():
            block.model.theta.add_(0.1)
        assert torch.equal(path.energy, energy)

    def test_another_theta_in_the_target_term_counts(self, generator):
        theta, Z = normal((K, F), generator), normal((2, S, F), generator)
        block = xf.derive(
            xf.CrossEntropy("classes"), xf.Linear(theta), target_model=xf.Linear(theta), oracle=xf.Uniform()
        )
        path = block.trajectory(Z)
        with torch.no_grad():
            block.target_model.theta.add_(0.5)
        with pytest.raises(xf.XentflowError, match="expected the parameters of the trace, got changed ones"):
            _ = path.gradient_norm

    def test_a_changed_step_falsifies_nothing(self, generator):
        """The weights of the heads are those of the trace."""
        model = xf.Linear(normal((H, K, F), generator))
        step = xf.LearnedStep(0.3, heads=H)
        block = xf.derive(xf.CrossEntropy("classes"), model, oracle=xf.Uniform(), step=step).double()
        Z = normal((2, S, F), generator)
        path, energy = block.trajectory(Z), block.flow(Z).energy(Z)
        with torch.no_grad():
            step.log_step.add_(0.5)
        assert_close(path.energy[0], energy)
        assert not torch.equal(block.flow(Z).energy(Z), energy)


def test_gradients_flow_through_what_it_keeps(generator):
    block, Z = quadratic_block("classes", generator), normal((2, S, F), generator)
    block.trajectory(Z, steps=2).energy.sum().backward()
    assert block.model.theta.grad.abs().sum() > 0
