"""Steppers: their measured order against a scipy reference, and what ``integrate`` returns and refuses."""

import functools

import pytest
import torch
from torch.testing import assert_close

import xentflow as xf
from flow_instances import AXES, random_flow
from order import errors, measured_order, reference

# Runs that end well above the reference's own error, and are fine enough for the leading term to rule.
TIME = 0.5
RUNS = {xf.Euler(): (32, 64), xf.Heun(): (32, 64), xf.RK4(): (32, 64)}
CONSTRAINTS = (xf.Free(), xf.Sphere(), xf.Sphere(radius=2.0), xf.Dual(2.0), xf.Whitened())


@functools.cache
def start(axis, kind, constraint):
    """A flow, its start and its exact end, solved once for all methods."""
    flow, Z = random_flow(kind, axis, 5, constraint=constraint, S=4, F=3, K=3)
    if isinstance(constraint, xf.Free):
        Z = Z / 2
    if isinstance(constraint, xf.Dual) and kind == "quadratic":
        # What is seen of a short token turns fast; from longer ones these steps are fine enough.
        Z = 3 * Z
    return flow, Z, reference(flow.velocity, Z, TIME)


@pytest.mark.parametrize("method", RUNS, ids=repr)
@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=repr)
@pytest.mark.parametrize("kind", ["linear", "quadratic"])
@pytest.mark.parametrize("axis", AXES)
def test_measured_order_is_the_declared_one(axis, kind, constraint, method):
    found = errors(*start(axis, kind, constraint), method, TIME, RUNS[method])
    assert measured_order(found) == pytest.approx(method.order, abs=0.05)


@pytest.mark.parametrize("constraint", [xf.Sphere(), xf.Whitened()], ids=repr)
@pytest.mark.parametrize("method", RUNS, ids=repr)
def test_a_path_stays_on_its_constraint_set(constraint, method):
    flow, Z = random_flow("quadratic", "classes", 6, constraint=constraint, batch=(2,))
    for point in xf.integrate(flow, Z, method=method, step=0.3, steps=20).Z:
        if isinstance(constraint, xf.Sphere):
            assert_close(point.norm(dim=-1), Z.norm(dim=-1), rtol=1e-12, atol=0)
        else:
            identity = torch.eye(3, dtype=Z.dtype).expand(2, 3, 3)
            assert_close(point.mT @ point / 5, identity, rtol=0, atol=1e-12)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_the_whole_path_comes_back(batch):
    flow, Z = random_flow("quadratic", "classes", 7, batch=batch, heads=2)
    path = xf.integrate(flow, Z, method=xf.Heun(), step=0.05, steps=4)
    assert path.Z.shape == (5, *Z.shape)
    assert path.energy.shape == path.times.shape == (5, *batch)
    assert_close(path.Z[0], Z, rtol=0, atol=0)
    Y = Z
    for index in range(5):
        assert_close(path.Z[index], Y, rtol=0, atol=0)
        assert_close(path.energy[index], flow.energy(Y), rtol=0, atol=0)
        assert_close(path.times[index], torch.full(batch, 0.05 * index, dtype=Z.dtype), rtol=1e-14, atol=0)
        Y = xf.Heun().advance(flow, Y, 0.05)


def test_features_are_placed_on_the_set_first():
    flow, Z = random_flow("linear", "classes", 8, constraint=xf.Sphere(radius=2.0))
    path = xf.integrate(flow, 7 * Z, method=xf.Euler(), step=0.1, steps=1)
    assert_close(path.Z[0], Z, rtol=1e-12, atol=1e-12)


def test_a_path_can_be_differentiated():
    flow, Z = random_flow("linear", "classes", 9, S=2, F=2, K=2)

    def energies(Z0: torch.Tensor) -> torch.Tensor:
        return xf.integrate(flow, Z0, method=xf.RK4(), step=0.3, steps=2).energy

    assert torch.autograd.gradcheck(energies, (Z.requires_grad_(),))


class TestSteps:
    def test_every_sample_may_have_its_own(self):
        flow, Z = random_flow("linear", "classes", 10, batch=(3,))
        h = torch.tensor([0.1, 0.2, 0.4], dtype=torch.float64)[:, None, None]
        path = xf.integrate(flow, Z, method=xf.RK4(), step=h, steps=5)
        assert_close(path.times[-1], 5 * h[:, 0, 0], rtol=1e-14, atol=0)
        for index in range(3):
            single = xf.GradientFlow(flow.objective, flow.model, flow.targets(Z)[index])
            alone = xf.integrate(single, Z[index], method=xf.RK4(), step=h[index].item(), steps=5)
            assert_close(path.Z[:, index], alone.Z, rtol=1e-12, atol=1e-12)

    def test_every_token_may_have_its_own(self):
        flow, Z = random_flow("linear", "classes", 11)
        h = torch.linspace(0.1, 0.5, 5, dtype=torch.float64)[:, None]
        path = xf.integrate(flow, Z, method=xf.Euler(), step=h, steps=1)
        assert_close(path.Z[1], Z + h * flow.velocity(Z), rtol=1e-14, atol=1e-14)
        assert path.times[1].item() == pytest.approx(0.3)

    def test_one_tensor_for_all(self):
        flow, Z = random_flow("linear", "classes", 12, batch=(2,))
        h = xf.safe_step(flow.objective, flow.model)
        path = xf.integrate(flow, Z, method=xf.Euler(), step=h, steps=10)
        assert_close(path.times[-1], (10 * h).expand(2), rtol=1e-14, atol=0)
        assert (path.energy.diff(dim=0) <= 0).all()

    @pytest.mark.parametrize("axis", AXES)
    @pytest.mark.parametrize("constraint", [xf.Free(), xf.Dual(2.0)], ids=repr)
    def test_line_search_never_raises_the_energy(self, axis, constraint):
        flow, Z = random_flow("quadratic", axis, 13, batch=(6,), constraint=constraint)
        sizes = torch.linspace(0.5, 4, 6, dtype=torch.float64)[:, None, None]
        path = xf.integrate(flow, Z * sizes, method=xf.Euler(), step=xf.LineSearch(initial=8.0), steps=30)
        assert (path.energy.diff(dim=0) <= 0).all()
        assert (path.times.diff(dim=0) > 0).all()
        assert path.times[1].unique().numel() > 1

    def test_any_rule_will_do(self):
        flow, Z = random_flow("linear", "classes", 14)
        path = xf.integrate(flow, Z, method=xf.Euler(), step=lambda flow, Z: 0.5 / (1 + flow.energy(Z)), steps=2)
        first = 0.5 / (1 + path.energy[0])
        assert_close(path.times, torch.stack([0 * first, first, first + 0.5 / (1 + path.energy[1])]))


class TestDiverged:
    def assert_diverged(self, flow, Z, method, step, pattern):
        with pytest.raises(xf.Diverged, match=pattern) as caught:
            xf.integrate(flow, Z, method=method, step=step, steps=500)
        path = caught.value.path
        points = path.Z.shape[0]
        assert points >= 1
        assert path.energy.shape[0] == path.times.shape[0] == points
        assert torch.isfinite(path.Z).all()
        assert torch.isfinite(path.energy).all()
        assert f"at step {points} of 500" in str(caught.value)
        assert_close(path.Z[0], Z, rtol=0, atol=0)

    @pytest.mark.parametrize("potential", [xf.LogSumExp, xf.HalfSquare, xf.Entmax, xf.Softplus])
    @pytest.mark.parametrize(
        "method", [xf.Euler(), xf.Heun(), xf.RK4(), xf.LieTrotter(), xf.Yoshida(exact=True)], ids=repr
    )
    def test_holds_the_path_so_far(self, method, potential):
        flow, Z = random_flow("quadratic", "classes", 15, potential=potential("classes"))
        self.assert_diverged(
            flow, Z, method, 50.0, "stopped being finite .*Try a smaller step, safe_step or LineSearch"
        )

    def test_when_the_energy_overflows_before_the_features(self):
        flow, Z = random_flow("quadratic", "classes", 16)
        self.assert_diverged(flow, Z, xf.Euler(), 1e160, "ℓ stopped being finite at step 1 of 500")

    def test_when_one_sample_of_many_overflows(self):
        flow, Z = random_flow("linear", "classes", 17, batch=(3,), potential=xf.HalfSquare("classes"))
        h = torch.tensor([1e-3, 10.0, 1e-3], dtype=torch.float64)[:, None, None]
        self.assert_diverged(flow, Z, xf.Euler(), h, "step 0.001 to 10; ℓ went")
