"""Softmax attention with its log-sum-exp from a fused kernel of torch's own, where there is one.

On a CPU that is the kernel below ``scaled_dot_product_attention``, which keeps the log-sum-exp its public face drops.
It is private, so it is looked up by name and tried on a few numbers once, and is not used if it is missing or answers
otherwise than ``reference``. On CUDA it is ``flex_attention``, public, compiled.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from xentflow.kernels import reference

_CPU_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"

WIDEST = 512
"""Features beyond which tiles are the faster way."""


def supports(q: Tensor, values: Tensor | None, mask: Tensor | None, both: bool = False) -> bool:
    """Whether there is a fused kernel for these; ``both``: for pᵀu too, of which ``values`` is the u."""
    if mask is not None or values is None or q.shape[-1] != values.shape[-1]:
        return False
    if q.dtype not in _DTYPES.get(q.device.type, ()):
        return False
    # On a CPU a second pass costs more than one pass of tiles for both, and its digits too.
    return q.device.type == "cuda" or (not both and cpu_kernel() is not None)


def attend(
    a: Tensor, c: Tensor, u: Tensor | None, v: Tensor | None, bias: Tensor | None, causal: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """pv, pᵀu and R of ``reference.attend``, R in float32 at least; the second by a second pass.

    With β = −R as a bias, softmax attention the other way round is O′, R′ with pᵀu = exp(R′ + b) O′, since
    p = exp(N − R); exp(R′) is at most S.
    """
    own, R = _pass(a, c, c if v is None else v, bias, causal)
    other = None
    if u is not None:
        reverse = (-R).masked_fill(R.isneginf(), -torch.inf).to(a.dtype)
        other, back = _pass(c, a, u, reverse, causal, earlier_are_rows=True)
        other = other * (back if bias is None else back + bias).exp().to(other.dtype).unsqueeze(-1)
    return None if v is None else own, other, R


def _pass(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, earlier_are_rows: bool = False
) -> tuple[Tensor, Tensor]:
    if q.device.type == "cuda":
        return _flexible(q, k, v, bias, causal, earlier_are_rows)
    kernel = cpu_kernel()
    assert kernel is not None
    added = None if bias is None else bias.to(q.dtype)[:, None, None, :].expand(-1, 1, q.shape[-2], -1)
    O, R = kernel(q[:, None], k[:, None], v[:, None], 0.0, causal, attn_mask=added, scale=1.0)
    return _settled(O[:, 0], R[:, 0], bias)


def _settled(O: Tensor, R: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows without any entry as ``reference`` has them: fused kernels differ in what they give there."""
    if bias is None:
        return O, R
    dead = (bias == -torch.inf).all(-1)[:, None]
    return O.masked_fill(dead.unsqueeze(-1), 0), R.masked_fill(dead, -torch.inf)


@cache
def cpu_kernel() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The private kernel, if it is there and gives what it should."""
    kernel: Any = getattr(_operators(), _CPU_KERNEL, None)
    if kernel is None:
        return None
    q = torch.linspace(-1, 1, 12).reshape(1, 1, 3, 4)
    bias = torch.linspace(-1, 1, 3)
    try:
        O, R = kernel(q, q.sin(), q.cos(), 0.0, False, attn_mask=bias.expand(1, 1, 3, 3), scale=1.0)
        own, _, log_sum_exp = reference.attend(q, q.sin(), None, q.cos(), bias.expand(1, 1, 3))
        assert own is not None
        right = torch.allclose(O, own, atol=1e-5) and torch.allclose(R, log_sum_exp, atol=1e-5)
    except (RuntimeError, TypeError, ValueError):
        return None
    return kernel if right else None


def _operators() -> Any:
    return torch.ops.aten


def _flexible(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, earlier_are_rows: bool = False
) -> tuple[Tensor, Tensor]:
    def score(N: Tensor, n: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if bias is not None:
            N = N + bias[n, j]
        if not causal:
            return N
        return torch.where(i <= j if earlier_are_rows else i >= j, N, -torch.inf)

    changed = None if bias is None and not causal else score
    from torch.nn.attention.flex_attention import AuxRequest

    request = AuxRequest(lse=True)
    O, more = _flex()(q[:, None], k[:, None], v[:, None], score_mod=changed, scale=1.0, return_aux=request)
    return _settled(O[:, 0], more.lse[:, 0], bias)


@cache
def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


_DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
