"""A block as a plain dictionary of names and numbers, and back: the architecture, without the values of θ.

``block_config(block)`` and ``block_from_config(config)`` round-trip every block whose parts are data. A ``Functional``
model, a ``Learned`` oracle and a step of one's own hold code, which no dictionary can; such a block is refused by name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from xentflow.block import DerivedBlock
from xentflow.constraints import Dual, Free, Sphere, Whitened
from xentflow.derive import derive
from xentflow.errors import XentflowError
from xentflow.integrators import RK4, Euler, Heun
from xentflow.models import Bilinear, Linear, Model, Quadratic
from xentflow.objective import Objective
from xentflow.oracles import Band, Given, LearnedTargets, NearestNeighbours, Oracle, SelfPrediction, Shift, Uniform
from xentflow.potentials import Entmax, HalfSquare, LogSumExp, Softplus
from xentflow.splitting import LieTrotter, Strang, Yoshida
from xentflow.steps import CertifiedStep, LearnedStep, LineSearch

Config = dict[str, Any]

_DATACLASSES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(LogSumExp, Softplus, HalfSquare, Entmax),
        *(Euler, Heun, RK4, LieTrotter, Strang, Yoshida),
        *(Free, Sphere, Dual, Whitened),
        *(CertifiedStep, LineSearch),
    )
}

_ORACLES: dict[str, tuple[type[Oracle], tuple[str, ...]]] = {
    "Given": (Given, ()),
    "SelfPrediction": (SelfPrediction, ("temperature", "hard")),
    "Uniform": (Uniform, ()),
    "LearnedTargets": (LearnedTargets, ("rows", "columns", "heads", "relative")),
    "Shift": (Shift, ("offset",)),
    "Band": (Band, ("width",)),
    "NearestNeighbours": (NearestNeighbours, ("k",)),
}


def block_config(block: DerivedBlock) -> Config:
    """The parts of a block, of types that JSON and YAML know."""
    return {
        "dtype": _dtype(block),
        "potential": _described(block.objective.potential),
        "model": _model_config(block.model),
        "target_model": None if block.target_model is None else _model_config(block.target_model),
        "oracle": _oracle_config(block.oracle),
        "splitting": _described(block.splitting),
        "step": _step_config(block.step),
        "constraint": _described(block.constraint),
        "causal": block.causal,
        "printed_form": block.printed_form,
    }


def block_from_config(config: Mapping[str, Any]) -> DerivedBlock:
    """The block described, with θ zero until a state is loaded."""
    expected = {field for field in DerivedBlock.__init__.__annotations__ if field != "return"}
    expected = (expected - {"objective"}) | {"potential", "dtype"}
    if not isinstance(config, Mapping) or set(config) != expected:
        came = sorted(config) if isinstance(config, Mapping) else type(config).__name__
        raise XentflowError(f"config: expected exactly the entries {sorted(expected)}, got {came}")
    dtype = getattr(torch, str(config["dtype"]), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise XentflowError(f"config: expected a floating dtype such as 'float32', got {config['dtype']!r}")
    block = derive(
        Objective(_rebuilt(config["potential"])),
        _model(config["model"]),
        oracle=_oracle(config["oracle"]),
        splitting=_rebuilt(config["splitting"]),
        step=_step(config["step"]),
        constraint=_rebuilt(config["constraint"]),
        target_model=None if config["target_model"] is None else _model(config["target_model"]),
        causal=config["causal"],
        printed_form=config["printed_form"],
    )
    return block.to(dtype)


def _dtype(block: DerivedBlock) -> str:
    return str(next(tensor.dtype for tensor in block.model.tensors())).removeprefix("torch.")


def _described(part: Any) -> Config:
    if type(part).__name__ not in _DATACLASSES:
        raise XentflowError(f"config: expected a part that is data, got {type(part).__name__}, which holds code")
    described: Config = {"type": type(part).__name__}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        described[field.name] = _described(value) if dataclasses.is_dataclass(value) else value
    return described


def _rebuilt(config: Mapping[str, Any]) -> Any:
    kind, settings = _typed(config, _DATACLASSES)
    fields = {field.name for field in dataclasses.fields(kind)}
    _require_entries(kind.__name__, settings, fields)
    return kind(**{name: _rebuilt(value) if isinstance(value, Mapping) else value for name, value in settings.items()})


def _model_config(model: Model) -> Config:
    if isinstance(model, Linear):
        return {"type": "Linear", "theta": list(model.theta.shape), "bias": model.bias is not None}
    if isinstance(model, Quadratic):
        names = [name for name in ("theta", "phi", "psi") if getattr(model, name) is not None]
        shapes = {name: list(getattr(model, name).shape) for name in names}
        return {"type": "Quadratic", **shapes, "roles": model.roles}
    if isinstance(model, Bilinear):
        if model.context is not None:
            raise XentflowError("config: expected a Bilinear model without a context, got one that holds its context")
        return {"type": "Bilinear", "theta": list(model.theta.shape)}
    raise XentflowError(f"config: expected a Linear, Quadratic or Bilinear model, got {type(model).__name__}")


def _model(config: Mapping[str, Any]) -> Model:
    kind, settings = _typed(config, {"Linear": Linear, "Quadratic": Quadratic, "Bilinear": Bilinear})
    if kind is Linear:
        _require_entries("Linear", settings, {"theta", "bias"})
        theta = torch.zeros(settings["theta"])
        return Linear(theta, torch.zeros(settings["theta"][:-1]) if settings["bias"] else None)
    if kind is Quadratic and "psi" in settings:
        _require_entries("Quadratic", settings, {"phi", "psi", "roles"})
        phi, psi = torch.zeros(settings["phi"]), torch.zeros(settings["psi"])
        return Quadratic.from_factor(phi, settings["roles"], psi)
    if kind is Quadratic and "phi" in settings:
        _require_entries("Quadratic", settings, {"phi", "roles"})
        return Quadratic.from_factor(torch.zeros(settings["phi"]), settings["roles"])
    if kind is Quadratic:
        _require_entries("Quadratic", settings, {"theta", "roles"})
        return Quadratic(torch.zeros(settings["theta"]), settings["roles"])
    _require_entries("Bilinear", settings, {"theta"})
    return Bilinear(torch.zeros(settings["theta"]))


def _oracle_config(oracle: Oracle) -> Config:
    name = type(oracle).__name__
    if name not in _ORACLES:
        raise XentflowError(f"config: expected an oracle that is data, got {name}, which holds a network")
    return {"type": name, **{setting: getattr(oracle, setting) for setting in _ORACLES[name][1]}}


def _oracle(config: Mapping[str, Any]) -> Oracle:
    (kind, names), settings = _typed(config, _ORACLES)
    _require_entries(kind.__name__, settings, set(names))
    made: Oracle = kind(**settings)
    return made


def _step_config(step: object) -> float | Config:
    if isinstance(step, LearnedStep):
        return {"type": "LearnedStep", "initial": step.initial, "features": step.features, "heads": step.heads}
    return step if isinstance(step, float | int) else _described(step)


def _step(config: Any) -> Any:
    if not isinstance(config, Mapping):
        return config
    if config.get("type") == "LearnedStep":
        _, settings = _typed(config, {"LearnedStep": nn.Module})
        _require_entries("LearnedStep", settings, {"initial", "features", "heads"})
        return LearnedStep(settings["initial"], features=settings["features"], heads=settings["heads"])
    return _rebuilt(config)


def _typed(config: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[Any, Config]:
    if not isinstance(config, Mapping) or config.get("type") not in known:
        came = config.get("type") if isinstance(config, Mapping) else config
        raise XentflowError(f"config: expected a type among {sorted(known)}, got {came!r}")
    return known[config["type"]], {name: value for name, value in config.items() if name != "type"}


def _require_entries(kind: str, settings: Config, expected: set[str]) -> None:
    if set(settings) != expected:
        raise XentflowError(
            f"config: expected for {kind} exactly the entries {sorted(expected)}, got {sorted(settings)}"
        )
