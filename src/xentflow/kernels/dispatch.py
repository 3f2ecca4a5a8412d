"""Which way an attention term is computed, and its derivatives whichever way that is.

``attend`` is one operator with one derivative. Where the logits are few it is the plain form, which autograd takes
apart by itself. Where they are many it is opaque to autograd and to ``torch.compile``, and its derivative is a second
opaque operator on the output and log-sum-exp, memory linear like itself. The derivative of that one is the plain form's:
second derivatives are exact, but take the memory of all logits.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from xentflow.errors import XentflowError
from xentflow.kernels import chunked, fused, reference

Backend = Literal["auto", "reference", "chunked", "fused"]

FEW = 2**21
"""Logits up to which the plain form is fastest: 8 MiB in float32, about what a core's cache holds."""

FEW_ON_GPU = 2**26
"""The same on a GPU, where 256 MiB are soon gone through."""


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


def choose(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backend: Backend
) -> Literal["reference", "chunked", "fused"]:
    """The backend for these operands; ``"auto"`` picks by size, device and what the fused kernels support."""
    if torch._C._are_functorch_transforms_active():
        # Only plain operations are transformed by torch.func in every way.
        return "reference"
    if backend == "auto":
        if is_plain(_batch(q, k)[..., None, None].expand(*_batch(q, k).shape, q.shape[-2], k.shape[-2]), backend):
            return "reference"
        return "fused" if fused.supports(q, v, mask) and q.shape[-1] <= fused.WIDEST else "chunked"
    if backend == "fused" and not fused.supports(q, v, mask):
        return "chunked"
    return backend


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """O ``(*batch, S, G)`` and R ``(*batch, S)`` of ``reference.attend``; leading dimensions broadcast."""
    require_backend(backend)
    chosen = choose(q, k, v, mask, backend)
    if chosen == "reference":
        return reference.attend(q, k, v, bias, mask, causal)
    batch = _batch(q, k).shape
    S, K = q.shape[-2], k.shape[-2]
    flat = [X.expand(*batch, *X.shape[-2:]).reshape(-1, *X.shape[-2:]) for X in (q, k, v)]
    b = None if bias is None else bias.expand(*batch, K).reshape(-1, K)
    # A mask shared by the batch stays one matrix: expanded, not copied.
    m = None if mask is None else _flat_mask(mask, batch, S, K)
    O, R = _attend(*flat, b, m, causal, chosen)
    return O.reshape(*batch, *O.shape[-2:]), R.reshape(*batch, S)


def _batch(q: Tensor, k: Tensor) -> Tensor:
    """A tensor of the shape of the leading dimensions of both, to be looked at for that alone."""
    return q.new_empty(()).expand(torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]))


def _flat_mask(mask: Tensor, batch: torch.Size, S: int, K: int) -> Tensor:
    if all(size == 1 for size in mask.shape[:-2]):
        return mask.reshape(1, *mask.shape[-2:]).expand(batch.numel(), S, K)
    return mask.expand(*batch, S, K).reshape(-1, S, K)


@torch.library.custom_op("xentflow::attend", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, causal: bool, backend: str
) -> tuple[Tensor, Tensor]:
    if backend == "fused":
        O, R = fused.attend(q, k, v, bias, causal)
        return O.contiguous(), R.contiguous()
    return chunked.attend(q, k, v, bias, mask, causal)


@_attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, causal: bool, backend: str
) -> tuple[Tensor, Tensor]:
    wide = chunked.widened(q[:0]).dtype
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=wide)


@torch.library.custom_op("xentflow::attend_backward", mutates_args=())
def _attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    O: Tensor,
    R: Tensor,
    grad_O: Tensor,
    grad_R: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return chunked.attend_backward(q, k, v, bias, mask, causal, O, R, grad_O, grad_R)


@_attend_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    O: Tensor,
    R: Tensor,
    grad_O: Tensor,
    grad_R: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    db = k.new_empty(k.shape[:-1], dtype=R.dtype)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), db


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:  # type: ignore[type-arg]
    q, k, v, bias, mask, causal, _ = inputs
    ctx.save_for_backward(q, k, v, bias, mask, *output)
    ctx.causal = causal  # type: ignore[attr-defined]


def _differentiate(ctx, grad_O: Tensor, grad_R: Tensor):  # type: ignore[no-untyped-def]
    q, k, v, bias, mask, O, R = ctx.saved_tensors
    dq, dk, dv, db = _attend_backward(q, k, v, bias, mask, ctx.causal, O, R, grad_O, grad_R)
    return dq, dk, dv, None if bias is None else db.to(bias.dtype), None, None, None


def _keep_again(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, bias, mask, ctx.causal, _, _, grad_O, grad_R = inputs
    ctx.save_for_backward(q, k, v, bias, mask, grad_O, grad_R)


def _differentiate_again(ctx, *upstream: Tensor):  # type: ignore[no-untyped-def]
    q, k, v, bias, mask, grad_O, grad_R = ctx.saved_tensors
    causal = ctx.causal
    wide = chunked.widened(q[:0]).dtype

    def plain(*operands: Tensor) -> tuple[Tensor, ...]:
        q, k, v, grad_O, grad_R, *b = (operand.to(wide) for operand in operands)
        return reference.attend_backward(q, k, v, b[0] if b else None, mask, causal, grad_O, grad_R)

    operands = [q, k, v, grad_O, grad_R, *([] if bias is None else [bias])]
    pulled = torch.func.vjp(plain, *operands)[1](tuple(given.to(wide) for given in upstream))
    dq, dk, dv, d_grad_O, d_grad_R, *db = pulled
    # O and R are functions of the other operands, through which the derivative has gone already.
    return dq, dk, dv, db[0] if db else None, None, None, None, None, d_grad_O, d_grad_R


_attend.register_autograd(_differentiate, setup_context=_keep)
_attend_backward.register_autograd(_differentiate_again, setup_context=_keep_again)
