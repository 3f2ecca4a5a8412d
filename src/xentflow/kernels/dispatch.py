"""Which way an attention term is computed, and its derivatives whichever way that is.

``attend_both`` is one operator with one derivative. Where the logits are few it is the plain form, which autograd takes
apart by itself. Where they are many it is opaque to autograd and to ``torch.compile``, and its derivative is a second
opaque operator, memory linear like itself. The derivative of that one is the plain form's: second derivatives are
exact, but take the memory of all logits.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from xentflow.errors import XentflowError
from xentflow.kernels import chunked, fused, matmul, reference
from xentflow.kernels.tiles import widened

Backend = Literal["auto", "reference", "chunked", "fused"]

FEW = 2**21
"""Logits up to which the plain form is fastest: 8 MiB in float32, about what a core's cache holds."""

FEW_ON_GPU = 2**26
"""The same on a GPU, where 256 MiB are soon gone through."""

LONG = 2**14
"""Keys beyond which tiles have too few rows to be multiplied fast."""


def are_few(count: int, device: torch.device) -> bool:
    """Whether so many logits are best formed as they are."""
    return count <= (FEW if device.type == "cpu" else FEW_ON_GPU)


def require_backend(backend: str) -> None:
    """Raise unless ``backend`` names one."""
    if backend not in get_args(Backend):
        raise XentflowError(f"backend: expected one of {', '.join(get_args(Backend))}, got {backend!r}")


def is_plain(logits: Tensor, backend: Backend) -> bool:
    """Whether logits of this shape are best, or have to be, formed as they are."""
    if backend == "auto":
        return are_few(logits.numel(), logits.device) or torch._C._are_functorch_transforms_active()
    return backend == "reference"


def choose_plain(a: Tensor, c: Tensor, backend: Backend) -> bool:
    """Whether attention of these operands is the plain form's; only plain operations go through all of torch.func."""
    return torch._C._are_functorch_transforms_active() or is_plain(logits_of(a, c), backend)


def choose(
    a: Tensor, c: Tensor, u: Tensor | None, v: Tensor | None, mask: Tensor | None, backend: str
) -> Literal["chunked", "fused"]:
    """The backend for operands of many logits; ``"auto"`` takes the fastest that can do it."""
    # Tiles of few rows are multiplied slowly, and rows are few where keys are many.
    wanted = fuses_by_choice(a, backend) or (backend == "auto" and c.shape[-2] > LONG)
    fuses = wanted and all(fused.supports(a, X, mask, both=u is not None) for X in (u, v) if X is not None)
    return "fused" if fuses else "chunked"


def fuses_by_choice(q: Tensor, backend: str) -> bool:
    """Whether a fused kernel is asked for, or the faster; tiles outrun it where their products have wider registers."""
    faster = q.shape[-1] <= fused.WIDEST and not matmul.is_doubled(q)
    return backend == "fused" or (backend == "auto" and faster)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """pv and R alone."""
    own, _, R = attend_both(q, k, None, v, bias, mask, causal, backend)
    assert own is not None
    return own, R


def attend_both(
    a: Tensor,
    c: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """pv, pᵀu and R of ``reference.attend``, each product where its values are given; leading dimensions broadcast."""
    require_backend(backend)
    # What is fastest may ask what this machine has, which is no business of torch.compile's: inside the operator.
    if choose_plain(a, c, backend):
        return reference.attend(a, c, u, v, bias, mask, causal)
    batch = logits_of(a, c).shape[:-2]
    S, K = a.shape[-2], c.shape[-2]
    flat = [None if X is None else _flat(X, batch, *X.shape[-2:]) for X in (a, c, u, v)]
    b = None if bias is None else bias.expand(*batch, K).reshape(-1, K)
    m = None if mask is None else _flat(mask, batch, S, K)
    own, other, R = _attend(*flat, b, m, causal, backend)
    return (
        None if v is None else own.reshape(*batch, *own.shape[-2:]),
        None if u is None else other.reshape(*batch, *other.shape[-2:]),
        R.reshape(*batch, S),
    )


def logits_of(a: Tensor, c: Tensor) -> Tensor:
    """A tensor of the shape of the logits, to be looked at for that alone."""
    batch = torch.broadcast_shapes(a.shape[:-2], c.shape[:-2])  # type: ignore[no-untyped-call]
    return a.new_empty(()).expand(*batch, a.shape[-2], c.shape[-2])


def _flat(X: Tensor, batch: torch.Size, rows: int, columns: int) -> Tensor:
    """One matrix after another; where all share one it stays one, expanded and not copied."""
    if all(size == 1 for size in X.shape[:-2]):
        return X.reshape(1, *X.shape[-2:]).expand(batch.numel(), rows, columns)
    return X.expand(*batch, rows, columns).reshape(-1, rows, columns)


# An operator returns tensors and nothing else: an empty one stands for what was not asked for.


@torch.library.custom_op("xentflow::attend", mutates_args=())
def _attend(
    a: Tensor,
    c: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(a.device.type, enabled=False):
        if choose(a, c, u, v, mask, backend) == "fused":
            own, other, R = fused.attend(a, c, u, v, bias, causal)
        else:
            own, other, R = chunked.attend(a, c, u, v, bias, mask, causal)
    return _or_empty(own, a), _or_empty(other, a), R.contiguous()


@_attend.register_fake
def _(
    a: Tensor,
    c: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    own = a.new_empty(0) if v is None else a.new_empty(*a.shape[:-1], v.shape[-1])
    other = a.new_empty(0) if u is None else a.new_empty(*c.shape[:-1], u.shape[-1])
    return own, other, a.new_empty(a.shape[:-1], dtype=widened(a[:0]).dtype)


@torch.library.custom_op("xentflow::attend_backward", mutates_args=())
def _attend_backward(
    a: Tensor,
    c: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    grad_own: Tensor,
    grad_other: Tensor,
    grad_R: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    of_own, of_other = None if v is None else grad_own, None if u is None else grad_other
    with torch.autocast(a.device.type, enabled=False):
        found = chunked.attend_backward(a, c, u, v, bias, mask, causal, of_own, of_other, grad_R)
    da, dc, du, dv, db = (_or_empty(X, a) for X in found)
    return da, dc, du, dv, db


@_attend_backward.register_fake
def _(
    a: Tensor,
    c: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    grad_own: Tensor,
    grad_other: Tensor,
    grad_R: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    da, dc, du, dv, db = (a.new_empty((0,) if X is None else X.shape) for X in (a, c, u, v, bias))
    return da, dc, du, dv, db


def _or_empty(X: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if X is None else X.contiguous()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.causal = inputs[6]


def _differentiate(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
    operands = ctx.saved_tensors
    found = _attend_backward(*operands, ctx.causal, *upstream)
    return (*(None if X is None else g for g, X in zip(found, operands[:5], strict=True)), None, None, None)


def _keep_again(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6], *inputs[7:])
    ctx.causal = inputs[6]


def _differentiate_again(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
    *operands, mask, grad_own, grad_other, grad_R = ctx.saved_tensors
    wide = widened(operands[0][:0]).dtype
    upstreams = [None if operands[3] is None else grad_own, None if operands[2] is None else grad_other, grad_R]
    given = [*operands, *upstreams]
    present = [X for X in given if X is not None]

    def plain(*tensors: Tensor) -> tuple[Tensor, ...]:
        tensor = iter(tensors)
        a, c, u, v, b, *grads = (None if X is None else next(tensor).to(wide) for X in given)
        found = reference.attend_backward(a, c, u, v, b, mask, ctx.causal, *grads)  # type: ignore[arg-type]
        return tuple(g for g, X in zip(found, operands, strict=True) if g is not None and X is not None)

    seeds = tuple(g.to(wide) for g, X in zip(upstream, operands, strict=True) if X is not None)
    pulled = iter(torch.func.vjp(plain, *present)[1](seeds))
    *first, of_own, of_other, of_R = (None if X is None else next(pulled) for X in given)
    return (*first, None, None, of_own, of_other, of_R)


_attend.register_autograd(_differentiate, setup_context=_keep)
_attend_backward.register_autograd(_differentiate_again, setup_context=_keep_again)
