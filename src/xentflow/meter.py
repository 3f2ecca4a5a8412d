"""How far is any module from a step of descent on any energy? The faithfulness meter.

A module's update D = module(Z) − Z is compared with the descent direction V of an energy: −∂E/∂Z, or the velocity of a
``GradientFlow``. With c = ⟨D, V⟩/‖V‖² the best multiple,

    cosine = ⟨D, V⟩ / (‖D‖‖V‖),   scale = c,   relative_error = ‖D − cV‖ / ‖D‖,   energy_change = E(Z + D) − E(Z).

(so relative_error² = 1 − cosine²: they say one thing in two ways.) A derived block has cosine 1 and scale h; an update
of zero has cosine 0 and relative error 1. Random directions give the control: in n dimensions their cosine is about
0 ± 1/√n, so a small cosine can still be far from chance, and the reverse.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from xentflow.axes import require_features, require_float_tensor
from xentflow.errors import XentflowError
from xentflow.flow import GradientFlow
from xentflow.models import Features

Energy = GradientFlow | Callable[[Tensor], Tensor]
"""A flow of ours, or any callable that gives one number for each sample (or one in all) of features."""


@dataclass(frozen=True)
class Faithfulness:
    """How an update compares with descent on an energy; all samples taken as one vector, but ``energy_change``."""

    name: str
    cosine: float
    scale: float
    relative_error: float
    energy_change: Float[Tensor, "*batch"]
    """E after the update minus E before, of each sample."""
    control_cosine: tuple[float, float]
    """Mean and standard deviation of the cosine of random directions with the descent direction."""
    layers: tuple["Faithfulness", ...] = field(default=(), repr=False)

    @property
    def fraction_descending(self) -> float:
        """The fraction of samples whose energy fell."""
        return float((self.energy_change < 0).double().mean())


def measure_faithfulness(
    module: nn.Module,
    energy: Energy,
    Z: Features,
    *,
    layers: Sequence[str] | None = None,
    controls: int = 200,
    seed: int = 0,
) -> Faithfulness:
    """Compare ``module(Z) − Z`` with descent on ``energy`` at Z, and so each layer at its own input.

    Nothing of the module is changed: layers are read through forward hooks. ``layers`` names the sub-modules to read;
    None takes the children of the first ``nn.ModuleList`` or ``nn.Sequential`` that map features to their own shape.
    Of a module or layer that returns a tuple the first entry counts. What is random in training, dropout say, is random
    here too: put the module in ``eval()`` first.
    """
    if not isinstance(module, nn.Module):
        raise XentflowError(f"module: expected an nn.Module, got {type(module).__name__}")
    if not callable(energy) and not isinstance(energy, GradientFlow):
        raise XentflowError(f"energy: expected a GradientFlow or a callable of features, got {type(energy).__name__}")
    require_features(Z)
    named = _layers(module) if layers is None else _named(module, layers)
    seen: list[tuple[str, Tensor, Tensor]] = []
    entered: dict[str, Tensor] = {}
    handles = [layer.register_forward_pre_hook(_entry(name, entered), with_kwargs=True) for name, layer in named]
    handles += [layer.register_forward_hook(_reader(name, entered, seen)) for name, layer in named]
    try:
        with torch.no_grad():
            # A copy: a module that writes in place would change what it is compared with.
            output = _first(module(Z.clone()))
    finally:
        for handle in handles:
            handle.remove()
    unread = [] if layers is None else sorted(set(layers) - {name for name, _, _ in seen})
    if unread:
        raise XentflowError(f"layers: expected layers that map features to their own shape, got {unread}, which do not")
    if output.shape != Z.shape:
        raise XentflowError(f"module: expected features like Z, {tuple(Z.shape)}, got {tuple(output.shape)}")
    read = tuple(_compare(name, energy, before, after, controls, seed) for name, before, after in seen)
    whole = _compare(type(module).__name__, energy, Z, output, controls, seed)
    return Faithfulness(
        whole.name, whole.cosine, whole.scale, whole.relative_error, whole.energy_change, whole.control_cosine, read
    )


def _compare(name: str, energy: Energy, before: Tensor, after: Tensor, controls: int, seed: int) -> Faithfulness:
    update = (after - before).detach()
    descent, start = _descent(energy, before)
    end = _energies(energy, after)
    along, length, reach = float((update * descent).sum()), float(descent.norm()), float(update.norm())
    if length == 0:
        raise XentflowError(f"{name}: the energy is stationary at its input; there is no direction to compare with")
    scale = along / length**2
    generator = torch.Generator().manual_seed(seed)
    unit = (descent / length).flatten().double().cpu()
    cosines = []
    for _ in range(controls):
        direction = torch.randn(unit.numel(), dtype=torch.float64, generator=generator)
        cosines.append(float(direction @ unit / direction.norm()))
    spread = torch.tensor(cosines)
    return Faithfulness(
        name=name,
        cosine=along / (length * reach) if reach else 0.0,
        scale=scale,
        relative_error=float((update - scale * descent).norm()) / reach if reach else 1.0,
        energy_change=end - start,
        control_cosine=(float(spread.mean()), float(spread.std())),
    )


def _descent(energy: Energy, Z: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(energy, GradientFlow):
        with torch.no_grad():
            return energy.velocity(Z), energy.energy(Z)
    with torch.enable_grad():
        Z = Z.detach().requires_grad_()
        values = _energies(energy, Z)
        if not values.requires_grad:
            raise XentflowError("energy: expected a differentiable function of Z, got one that does not depend on it")
        (gradient,) = torch.autograd.grad(values.sum(), Z)
    return -gradient, values.detach()


def _energies(energy: Energy, Z: Tensor) -> Tensor:
    values = energy.energy(Z) if isinstance(energy, GradientFlow) else energy(Z)
    require_float_tensor("energy", values, "one number for each sample", 0)
    if values.shape not in (torch.Size(()), Z.shape[:-2]):
        raise XentflowError(
            f"energy: expected one number, or one for each sample {tuple(Z.shape[:-2])}, got {tuple(values.shape)}"
        )
    return values if values.requires_grad else values.detach()


def _layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    for name, child in module.named_modules():
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) > 0:
            return [(f"{name}.{index}" if name else str(index), layer) for index, layer in enumerate(child)]
    return []


def _named(module: nn.Module, names: Sequence[str]) -> list[tuple[str, nn.Module]]:
    known = dict(module.named_modules())
    for name in names:
        if name not in known:
            raise XentflowError(f"layers: expected names of sub-modules, got {name!r}; there are {sorted(known)[1:]}")
    return [(name, known[name]) for name in names]


def _entry(name: str, entered: dict[str, Tensor]) -> Callable[[nn.Module, tuple[object, ...], dict[str, object]], None]:
    def keep(layer: nn.Module, inputs: tuple[object, ...], named: dict[str, object]) -> None:
        tensors = [value for value in (*inputs, *named.values()) if isinstance(value, Tensor)]
        if tensors:
            entered[name] = tensors[0].detach().clone()

    return keep


def _reader(
    name: str, entered: dict[str, Tensor], seen: list[tuple[str, Tensor, Tensor]]
) -> Callable[[nn.Module, object, object], None]:
    def read(layer: nn.Module, inputs: object, output: object) -> None:
        after, before = _first(output), entered.pop(name, None)
        if before is not None and before.shape == after.shape:
            seen.append((name, before, after.detach().clone()))

    return read


def _first(output: object) -> Tensor:
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(first, Tensor):
        raise XentflowError(f"module: expected a tensor of features out, got {type(first).__name__}")
    return first
