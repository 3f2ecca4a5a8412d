"""Runs that cannot be: ``integrate`` with a wrong step, count, method or flow; splittings with a wrong sub-step."""

import pytest
import torch
from refusal import ramp

import xentflow as xf


@pytest.fixture
def start():
    C = torch.full((5, 4), 0.25, dtype=torch.float64)
    return xf.GradientFlow(xf.CrossEntropy("classes"), xf.Linear(ramp(4, 3)), C), ramp(2, 5, 3)


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "3", None])
def test_steps(start, steps):
    with pytest.raises(xf.XentflowError, match="steps: expected a positive whole number, got"):
        xf.integrate(*start, method=xf.Euler(), step=0.1, steps=steps)


@pytest.mark.parametrize("step", [0, 0.0, -0.1, float("nan"), float("inf"), True, "0.1", None])
def test_step_numbers(start, step):
    with pytest.raises(xf.XentflowError, match="step: expected a positive finite number or a tensor of such, got"):
        xf.integrate(*start, method=xf.Euler(), step=step, steps=1)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (torch.tensor(float("nan"), dtype=torch.float64), "step: expected finite values, got 1 NaN"),
        (torch.tensor([[[0.1]], [[float("inf")]]], dtype=torch.float64), "step: expected finite .* 1 infinite"),
        (
            torch.tensor([[[0.1]], [[-0.5]]], dtype=torch.float64),
            "step: expected no negative step, got -0.5 to 0.1",
        ),
        (torch.tensor(1), "step: expected the dtype of Z, torch.float64, got torch.int64"),
        (torch.full((2, 1, 1), 0.1), "step: expected the dtype of Z, torch.float64, got torch.float32"),
        (
            torch.full((2,), 0.1, dtype=torch.float64),
            r"a shape that broadcasts to Z \(2, 5, 3\), one step a sample being \(2, 1, 1\), got \(2,",
        ),
        (torch.full((4, 1, 1, 1), 0.1, dtype=torch.float64), r"broadcasts to Z \(2, 5, 3\).*got \(4, 1, 1, 1\)"),
    ],
)
def test_step_tensors(start, step, message):
    with pytest.raises(xf.XentflowError, match=message):
        xf.integrate(*start, method=xf.Euler(), step=step, steps=1)


def test_a_rule_that_gives_no_step(start):
    with pytest.raises(xf.XentflowError, match=r"step: expected a positive finite number .* got -1"):
        xf.integrate(*start, method=xf.Euler(), step=lambda flow, Z: -1.0, steps=1)


@pytest.mark.parametrize(("method", "shown"), [("rk4", "'rk4'"), (xf.Euler, "class"), (None, "None")])
def test_method(start, method, shown):
    pattern = f"method: expected an integrator or a splitting such as Strang\\(\\), got .*{shown}"
    with pytest.raises(xf.XentflowError, match=pattern):
        xf.integrate(*start, method=method, step=0.1, steps=1)


def test_flow(start):
    with pytest.raises(xf.XentflowError, match="flow: expected an instance of GradientFlow, got Linear"):
        xf.integrate(start[0].model, start[1], method=xf.Euler(), step=0.1, steps=1)


@pytest.mark.parametrize("splitting", [xf.LieTrotter, xf.Strang, xf.Yoshida])
def test_refuses_what_is_no_integrator(splitting):
    with pytest.raises(xf.XentflowError, match="substep: expected an instance of Integrator, got str"):
        splitting(substep="rk4")
    with pytest.raises(xf.XentflowError, match=r"substep: expected .* got the class Euler itself"):
        splitting(substep=xf.Euler)
