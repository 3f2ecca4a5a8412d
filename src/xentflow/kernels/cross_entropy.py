"""ℓ of softmax distributions as an operator with one derivative; see ``loss`` for the mathematics.

Summed, ℓ and its gradients come from one sweep in the forward pass. Row by row, what weighs each row is known only in
the backward pass, which then sweeps again. Second derivatives are the plain form's and take the memory of all logits.
"""

from typing import Any

import torch
from torch import Tensor

from xentflow.kernels import dispatch, fused, matmul, reference
from xentflow.kernels.dispatch import Backend
from xentflow.kernels.loss import Gradients, Problem, sweep
from xentflow.kernels.tiles import widened

_CONFIDENT = 1.0
"""Where ℓ is below this, R − N_y has lost digits and the row is done again by the sweep."""


def cross_entropy(problem: Problem, weights: Tensor | None, backend: Backend = "auto") -> Tensor:
    """Σ w ℓ over all rows; or, without weights, ℓ ``(n, S)`` of every row."""
    dispatch.require_backend(backend)
    q, k = problem.q, problem.k
    few = dispatch.are_few(problem.q.shape[0] * q.shape[-2] * k.shape[-2], q.device)
    soft = problem.targets is not None and problem.targets.requires_grad
    if backend == "reference" or (few and backend == "auto") or soft or torch._C._are_functorch_transforms_active():
        ell = plain(problem)
        return ell if weights is None else (weights * ell).sum()
    operands = (q, k, problem.bias, problem.mask, problem.labels, problem.targets, problem.smoothing)
    if weights is None:
        rows: Tensor = _of_rows(*operands)
        return rows
    wants = [torch.is_grad_enabled() and X is not None and X.requires_grad for X in (q, k, problem.bias)]
    found: tuple[Tensor, ...] = _summed(*operands, weights, *wants, backend)
    return found[0]


def plain(problem: Problem) -> Tensor:
    """ℓ ``(n, S)`` in plain torch, differentiable in everything."""
    N = _logits(problem)
    masked = problem.mask is not None
    dead = N.isneginf().all(-1) if masked else None
    N = N if dead is None else N.masked_fill(dead.unsqueeze(-1), 0)
    if problem.one_class:
        assert problem.labels is not None
        labels = problem.labels.unsqueeze(-1)
        # Differences to the peak first: a log-sum-exp of large logits has lost the digits that near ties need.
        N = N - N.amax(-1, keepdim=True).detach()
        others, own = N.scatter(-1, labels, -torch.inf), N.gather(-1, labels).squeeze(-1)
        if not masked and N.shape[-1] > 1:
            return -torch.nn.functional.logsigmoid(own - torch.logsumexp(others, -1))
        # A row that its own class has to itself: ℓ = 0, and so is its derivative.
        alone = others.isneginf().all(-1) if dead is None else others.isneginf().all(-1) | dead
        away = torch.logsumexp(others.masked_fill(alone.unsqueeze(-1), 0), -1) - own.masked_fill(alone, 0)
        return (-torch.nn.functional.logsigmoid(-away)).masked_fill(alone, 0)
    S, K = N.shape[-2:]
    C = torch.cat([problem.targets_of(i, slice(0, S), slice(0, K))[None] for i in range(len(N))])
    C = C if dead is None else C.masked_fill(dead.unsqueeze(-1), 0)
    peak = N.amax(-1, keepdim=True).detach()
    R = torch.logsumexp(N - peak, -1)
    linear = (C * (N.masked_fill(N.isneginf(), 0) - peak)).sum(-1)
    ell: Tensor = R * C.sum(-1) - linear
    return ell


def _logits(problem: Problem) -> Tensor:
    wide = widened(problem.q[:0]).dtype
    q, k = problem.q.to(wide), problem.k.to(wide)
    if problem.mask is None and len(q) == len(k) and not torch._C._are_functorch_transforms_active():
        return matmul.nt(q, k, problem.bias)
    return reference.logits(q, k, problem.bias, problem.mask, False)


def _value_and_gradients(
    problem: Problem, weights: Tensor, wants: tuple[bool, bool, bool], backend: str
) -> tuple[Tensor, Gradients]:
    wants_q, wants_k, wants_b = wants
    q, k = problem.q, problem.k
    fits = problem.one_class and not (wants_k or wants_b)
    if not (fits and dispatch.fuses_by_choice(q, backend) and fused.supports(q, q, problem.mask)):
        return sweep(problem, weights, wants_q, wants_k, wants_b)
    assert problem.labels is not None
    n = len(q)
    keys = k.expand(n, *k.shape[1:])
    bias = None if problem.bias is None else problem.bias.expand(n, -1)
    O, _, R = fused.attend(q, keys, None, keys, bias, False)
    assert O is not None
    own = torch.stack([k[min(i, len(k) - 1)][problem.labels[i]] for i in range(n)])
    N_own = (widened(q) * widened(own)).sum(-1)
    if bias is not None:
        N_own = N_own + bias.gather(-1, problem.labels)
    ell = R - N_own
    dq = weights.unsqueeze(-1).to(O.dtype) * (O - own) if wants_q else None
    for index in range(n):
        rows = (ell[index] < _CONFIDENT).nonzero().squeeze(-1)
        if len(rows):
            of_key = min(index, len(k) - 1)
            few = Problem(
                q[index : index + 1, rows],
                k[of_key : of_key + 1],
                None if problem.bias is None else problem.bias[of_key : of_key + 1],
                None,
                problem.labels[index : index + 1, rows],
                None,
            )
            again, grads = sweep(few, weights[index : index + 1, rows], wants_q, False, False)
            ell[index, rows] = again[0].to(ell.dtype)
            if dq is not None and grads.q is not None:
                dq[index, rows] = grads.q[0].to(dq.dtype)
    return ell, Gradients(dq, None, None)


@torch.library.custom_op("xentflow::cross_entropy", mutates_args=())
def _summed(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    labels: Tensor | None,
    targets: Tensor | None,
    smoothing: float,
    weights: Tensor,
    wants_q: bool,
    wants_k: bool,
    wants_b: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem = Problem(q, k, bias, mask, labels, targets, smoothing)
    with torch.autocast(q.device.type, enabled=False):
        ell, grads = _value_and_gradients(problem, weights, (wants_q, wants_k, wants_b), backend)
    # However q lies, and whichever way was taken, what is promised below is contiguous.
    dq, dk, db = (q.new_empty(0) if X is None else X.contiguous() for X in grads)
    return (weights.to(ell.dtype) * ell).sum(), dq, dk, db


@_summed.register_fake
def _(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    labels: Tensor | None,
    targets: Tensor | None,
    smoothing: float,
    weights: Tensor,
    wants_q: bool,
    wants_k: bool,
    wants_b: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shapes = [
        q.shape if wants_q else (0,),
        k.shape if wants_k else (0,),
        k.shape[:2] if wants_b and bias is not None else (0,),
    ]
    return (q.new_empty((), dtype=widened(q[:0]).dtype), *(q.new_empty(shape) for shape in shapes))  # type: ignore[return-value]


@torch.library.custom_op("xentflow::cross_entropy_rows", mutates_args=())
def _of_rows(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    labels: Tensor | None,
    targets: Tensor | None,
    smoothing: float,
) -> Tensor:
    ones = torch.ones(q.shape[:-1], dtype=widened(q[:0]).dtype, device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        return sweep(Problem(q, k, bias, mask, labels, targets, smoothing), ones, False, False, False)[0]


@_of_rows.register_fake
def _(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    labels: Tensor | None,
    targets: Tensor | None,
    smoothing: float,
) -> Tensor:
    return q.new_empty(q.shape[:-1], dtype=widened(q[:0]).dtype)


@torch.library.custom_op("xentflow::cross_entropy_backward", mutates_args=())
def _gradients(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    labels: Tensor | None,
    targets: Tensor | None,
    smoothing: float,
    weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        _, grads = sweep(Problem(q, k, bias, mask, labels, targets, smoothing), weights)
    assert grads.q is not None
    assert grads.k is not None
    return grads.q, grads.k, q.new_empty(0) if grads.b is None else grads.b


@_gradients.register_fake
def _(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    labels: Tensor | None,
    targets: Tensor | None,
    smoothing: float,
    weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), k.new_empty((0,) if bias is None else k.shape[:2])


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6], inputs[7], *output[1:])
    ctx.smoothing, ctx.wants = inputs[6], inputs[8:11]
    # Nothing comes back through the gradients among the outputs: no zeros of their size are made for it.
    ctx.set_materialize_grads(False)


def _differentiate_sum(ctx: Any, upstream: Tensor | None, *unused: Tensor | None) -> tuple[Any, ...]:
    if upstream is None:
        return (None,) * 12
    *operands, weights, dq, dk, db = ctx.saved_tensors
    if torch.is_grad_enabled():
        dq, dk, db = _gradients(*operands, ctx.smoothing, weights * upstream)
    elif torch.compiler.is_compiling() or float(upstream) != 1:
        dq, dk, db = (X * upstream.to(X.dtype) for X in (dq, dk, db))
    found = [X if wanted else None for X, wanted in zip((dq, dk, db), ctx.wants, strict=True)]
    return (*found, *(None,) * 9)


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.smoothing = inputs[6]


def _differentiate_rows(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    operands = ctx.saved_tensors
    dq, dk, db = _gradients(*operands, ctx.smoothing, upstream)
    return dq, dk, None if operands[2] is None else db, *(None,) * 4


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6], inputs[7])
    ctx.smoothing = inputs[6]


def _differentiate_gradients(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
    q, k, bias, mask, labels, targets, weights = ctx.saved_tensors

    def gradients(*operands: Tensor) -> tuple[Tensor, ...]:
        q, k, weights, *b = operands

        def summed(q: Tensor, k: Tensor, *b: Tensor) -> Tensor:
            problem = Problem(q, k, b[0] if b else None, mask, labels, targets, ctx.smoothing)
            return (weights * plain(problem)).sum()

        found: tuple[Tensor, ...] = torch.func.grad(summed, argnums=tuple(range(2 + len(b))))(q, k, *b)
        return found

    operands = [q, k, weights, *([] if bias is None else [bias])]
    dq, dk, dw, *db = torch.func.vjp(gradients, *operands)[1](tuple(upstream[: len(operands) - 1]))
    return dq, dk, db[0] if db else None, None, None, None, None, dw


_summed.register_autograd(_differentiate_sum, setup_context=_keep_sum)
_of_rows.register_autograd(_differentiate_rows, setup_context=_keep_rows)
_gradients.register_autograd(_differentiate_gradients, setup_context=_keep_gradients)
