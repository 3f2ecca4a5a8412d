"""How an order of convergence is measured, and the reference it is measured against."""

import math
from collections.abc import Callable

import torch
from scipy.integrate import solve_ivp
from torch import Tensor

import xentflow as xf


def reference(velocity: Callable[[Tensor], Tensor], Z0: Tensor, time: float) -> Tensor:
    """Z(time) by an eighth-order method of scipy at a tolerance of 1e-12."""

    def field(_: float, z: object) -> object:
        return velocity(torch.as_tensor(z).reshape(Z0.shape)).reshape(-1).numpy()

    solved = solve_ivp(field, (0, time), Z0.reshape(-1).numpy(), method="DOP853", rtol=1e-12, atol=1e-13)
    assert solved.success
    return torch.from_numpy(solved.y[:, -1].copy()).reshape(Z0.shape)


def errors(
    flow: xf.GradientFlow, Z0: Tensor, exact: Tensor, method, time: float, counts: tuple[int, ...]
) -> list[float]:
    """The error at ``time`` for each number of steps."""
    return [(xf.integrate(flow, Z0, method=method, step=time / n, steps=n).Z[-1] - exact).norm().item() for n in counts]


def measured_order(found: list[float]) -> float:
    """The slope of log error against log step, over the two finest runs; each run halves the step of the one before."""
    return math.log2(found[-2] / found[-1])
