"""Sums over processes with their derivatives.

A value is either the same on every process, or a part that belongs to one. A loss is the same on every process, and so
is its derivative with respect to anything that is. From the one to the other lead two maps, each other's derivatives:

    copied:  the same → parts     x ↦ x          derivative: Σ_r ẋ_r
    summed:  parts → the same     x_r ↦ Σ_r x_r  derivative: ẋ
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xentflow.errors import XentflowError

Group = dist.ProcessGroup | None
"""The processes; None is all of them."""


def require_group(group: Group) -> None:
    """Raise unless there are processes to share work."""
    if not dist.is_available() or not dist.is_initialized():
        raise XentflowError(
            "group: expected a process group, got none; torch.distributed.init_process_group makes one, under torchrun"
        )
    if dist.get_rank(group) < 0:
        raise XentflowError("group: expected one that this process belongs to, got another")


def pieces(length: int, like: Tensor, group: Group) -> list[int]:
    """The lengths that the processes hold, by rank."""
    held = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=like.device)
    held[dist.get_rank(group)] = length
    dist.all_reduce(held, group=group)
    return [int(each) for each in held.tolist()]


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which sums are made: 32 bits at least."""
    return torch.promote_types(dtype, torch.float32)


def copied(x: Tensor, group: Group) -> Tensor:
    """What is the same on every process, for each to go on with by itself."""
    found: Tensor = _Copied.apply(x, group)  # type: ignore[no-untyped-call]
    return found


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum of the processes' parts."""
    found: Tensor = _Summed.apply(x, group)  # type: ignore[no-untyped-call]
    return found


def largest(x: Tensor, group: Group) -> Tensor:
    """The largest of the processes' values, entry by entry, as a constant; 0 where all are −∞."""
    found = x.detach().clone()
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found.masked_fill_(found == -torch.inf, 0)


def log_sum_exp(R: Tensor, group: Group) -> Tensor:
    """log Σ_r exp R_r."""
    peak = largest(R, group)
    return peak + summed((R - peak).exp(), group).log()


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return summed(upstream, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return copied(upstream, ctx.group), None
