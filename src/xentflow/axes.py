"""Axis names, the shape legend, and the validation every public entry shares.

Shapes: ``Z (*batch, S, F)`` features; ``N (*batch, S, K)`` logits, with a head dimension ``H`` before ``S`` where the
model has heads; ``C`` like ``N``, the targets; ``S`` sequence, ``F`` features, ``K`` classes (``K = S`` for the
quadratic model).

``axis`` says where a potential acts, and so along which direction a distribution lies: ``"sequence"`` is dimension -2
(the paper's σ_i: every column of the softmax sums to one), ``"classes"`` is dimension -1 (every row sums to one: the
usual attention). There is no default anywhere in the package.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from xentflow.errors import XentflowError

Axis = Literal["sequence", "classes"]

_DIMENSION = {"sequence": -2, "classes": -1}


def dimension(axis: Axis) -> int:
    """The tensor dimension a distribution lies along: -2 for ``"sequence"``, -1 for ``"classes"``."""
    if not isinstance(axis, str) or axis not in _DIMENSION:
        raise XentflowError(f'axis: expected "sequence" or "classes", got {axis!r}')
    return _DIMENSION[axis]


def holds(condition: Tensor) -> bool:
    """Whether a boolean tensor is true throughout; taken on trust where values cannot be looked at.

    Inside ``torch.compile`` a look at a value breaks the graph, inside ``torch.vmap`` it is refused, and while a CUDA
    graph is captured it would end the capture, so there only shapes and dtypes are checked.
    """
    if _is_recorded():
        return True
    try:
        return bool(condition.all())
    except RuntimeError:
        return True


def _is_recorded() -> bool:
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def is_finite(value: Tensor) -> bool:
    """Whether no entry is NaN or infinite; one reduction in the usual case."""
    if _is_recorded():
        return True
    # A finite sum proves that every entry is finite; an infinite one may be an overflow, so only then look at each.
    return holds(torch.isfinite(value.sum())) or holds(torch.isfinite(value))


def require_type(name: str, value: Any, kind: type) -> None:
    """Raise unless ``value`` is an instance of ``kind``."""
    if not isinstance(value, kind):
        raise XentflowError(f"{name}: expected an instance of {kind.__name__}, got {_shown(value)}")


def is_number(value: Any, above: float = 0.0, below: float = float("inf")) -> bool:
    """Whether ``value`` is a real number strictly between two bounds; True and False are no numbers here."""
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value < below


def require_float_tensor(name: str, value: Any, shape: str, ndim: int) -> None:
    """Raise unless ``value`` is a non-empty floating tensor of at least ``ndim`` dimensions."""
    if not isinstance(value, Tensor):
        raise XentflowError(f"{name}: expected a torch.Tensor {shape}, got {type(value).__name__}")
    if not value.is_floating_point():
        raise XentflowError(f"{name}: expected a floating dtype, got {value.dtype}")
    if value.ndim < ndim:
        raise XentflowError(f"{name}: expected shape {shape}, got {tuple(value.shape)}")
    if value.numel() == 0:
        raise XentflowError(f"{name}: expected shape {shape} with no empty dimension, got {tuple(value.shape)}")


def require_finite(name: str, value: Tensor) -> None:
    """Raise, saying how many entries are NaN and how many infinite, unless all are finite."""
    if not is_finite(value):
        nan, infinite = int(value.isnan().sum()), int(value.isinf().sum())
        raise XentflowError(
            f"{name}: expected finite values, got {nan} NaN and {infinite} infinite among {value.numel()}"
        )


def require_features(Z: Any, name: str = "Z") -> None:
    """Raise unless ``Z`` is a finite floating tensor ``(*batch, S, F)``."""
    require_float_tensor(name, Z, "(*batch, S, F)", 2)
    require_finite(name, Z)


def require_alike(name: str, value: Tensor, reference_name: str, reference: Tensor) -> None:
    """Raise unless two tensors share dtype and device."""
    if value.dtype != reference.dtype:
        raise XentflowError(
            f"{name}: expected the dtype of {reference_name}, {reference.dtype}, got {value.dtype}; convert one of them"
        )
    if value.device != reference.device:
        raise XentflowError(f"{name}: expected the device of {reference_name}, {reference.device}, got {value.device}")


def require_mask(mask: Any, logits: Tensor) -> None:
    """Raise unless ``mask`` is boolean, on the logits' device, and broadcasts to them."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        came = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise XentflowError(f"mask: expected a boolean tensor, True where an entry takes part, got {came}")
    trailing = logits.shape[logits.ndim - mask.ndim :] if mask.ndim <= logits.ndim else ()
    # A leading dimension missing among several could be meant for samples or for heads: that is not guessed.
    guessed = 2 < mask.ndim < logits.ndim
    if guessed or len(trailing) != mask.ndim or any(m not in (1, n) for m, n in zip(mask.shape, trailing, strict=True)):
        raise XentflowError(
            f"mask: expected a shape that broadcasts to the logits {tuple(logits.shape)}, got {tuple(mask.shape)}"
        )
    if mask.device != logits.device:
        raise XentflowError(f"mask: expected the device of the logits, {logits.device}, got {mask.device}")


def _shown(value: Any) -> str:
    return f"the class {value.__name__} itself" if isinstance(value, type) else type(value).__name__
