"""Derive a new attention from a new potential: state Ω, and get its attention, its energy and its block.

The potential is Ω(N) = Σ √(1 + N²), whose gradient N / √(1 + N²) gives weights between −1 and 1: an attention that can
push tokens apart as well as pull them together. Nothing else has to be written.
"""

import torch

import xentflow as xf

torch.set_num_threads(1)  # tensors here are small: a second thread costs more than it brings


class Pseudohuber(xf.Potential):
    """Ω(N) = Σ √(1 + N²), each entry for itself."""

    curvature = 1.0

    def value(self, N, mask=None):
        values = torch.sqrt(1 + N.square())
        return (values if mask is None else values.masked_fill(~mask, 0)).sum(self.dim)

    def gradient(self, N, mask=None):
        weights = N / torch.sqrt(1 + N.square())
        return weights if mask is None else weights.masked_fill(~mask, 0)

    def conjugate(self, p):
        return -torch.sqrt(1 - p.square()).sum(self.dim)

    def require_domain(self, name, p, mask=None):
        if not bool((p.abs() <= 1).all()):
            raise xf.XentflowError(f"{name}: expected weights between -1 and 1, got up to {p.abs().max():.3g}")


generator = torch.Generator().manual_seed(0)
Z = torch.randn(2, 12, 8, generator=generator, dtype=torch.float64)
theta = torch.randn(8, 8, generator=generator, dtype=torch.float64) / 8

loss = xf.Objective(Pseudohuber(axis="classes"))
block = xf.derive(loss, xf.Quadratic(theta), oracle=xf.Band(width=2), splitting=xf.Strang(), step=0.1)
print(block.derivation())

with torch.no_grad():
    path = block.trajectory(Z, steps=5)
    falls = path.energy[path.ends]
print("\nenergy of each sample, pass by pass:")
for energies in falls.T:
    print("  " + " → ".join(f"{value:.3f}" for value in energies))

flow = block.flow(Z)
moving = Z.clone().requires_grad_()
(gradient,) = torch.autograd.grad(flow.energy(moving).sum(), moving)
error = (flow.velocity(Z) + gradient).norm() / gradient.norm()
print(f"\nattention term − target term against autograd of the energy: {error:.1e} relative")
assert error < 1e-13
assert bool((falls.diff(dim=0) < 0).all())
