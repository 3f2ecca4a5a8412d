"""Several processes that train one network on one batch, by PyTorch's own means.

Every process draws the same plan and takes its share of each batch's samples. With n_r decisions asked for in share r,
out of n in all, and R processes,

    ∇ℓ = 1/R Σ_r ∇(R n_r/n · ℓ_r),     ℓ_r the mean over share r,

and the mean over processes is what ``DistributedDataParallel`` and ``fully_shard`` take of gradients. So a batch has
the same gradient whoever shares it, though decisions may be unevenly spread. With "ddp" each process holds the whole
network; with "fully-shard" parameters, gradients and moments are cut along their first dimension, layer by layer.

A process that died or hangs is noticed by the others wherever they next wait for it, after ``SILENCE`` at the latest.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xentflow.errors import XentflowError
from xentflow.networks import DerivedTransformer, Transformer
from xentflow.training.tasks import IGNORED

Parallel = Literal["none", "ddp", "fully-shard"]

SILENCE = timedelta(seconds=45)
"""How long a process waits for another."""


@dataclass(frozen=True)
class Processes:
    """This process among those that train together; ``ALONE`` where there is no other."""

    parallel: Parallel = "none"
    rank: int = 0
    size: int = 1
    barrier: Any = None

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.rank == 0

    def require_divisor(self, batch: int) -> None:
        """Raise unless every process gets as many samples of a batch."""
        if batch % self.size:
            raise XentflowError(f"batch: expected a multiple of the number of processes, {self.size}, got {batch}")

    def spread(self, network: nn.Module, whole: nn.Module) -> Callable[..., Any]:
        """Make ``whole``, which calls the network, a step of all processes; it may replace the parameters."""
        if self.parallel == "ddp":
            # A graph that stays: parameters that no loss reaches, as in two-stage training, are found out once.
            return nn.parallel.DistributedDataParallel(whole, forward_sync_buffers=False, static_graph=True)
        if self.parallel == "fully-shard":
            from torch.distributed.fsdp import fully_shard

            mesh = dist.device_mesh.init_device_mesh(next(network.parameters()).device.type, (self.size,))
            for module in (*_layers(network), network):
                module.register_forward_hook(_as_own)
                # The outermost too, which would else stay whole until a backward pass that judging does not make.
                fully_shard(module, mesh=mesh, reshard_after_forward=True)
        return whole

    def share(self, rows: Tensor, dim: int = 0) -> Tensor:
        """This process's samples."""
        return rows.tensor_split(self.size, dim)[self.rank]

    def to_judge(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """This process's samples; where there are fewer than processes, one of which nothing is asked."""
        mine = self.share(x), self.share(y)
        return mine if len(mine[0]) else (x[:1], torch.full_like(y[:1], IGNORED))

    def weighted(self, loss: Tensor, asked: Tensor) -> Tensor:
        """R n_r/n ℓ_r, whose mean over processes is ℓ."""
        if self.parallel == "none":
            return loss
        return loss * (asked * self.size / self.total(asked).clamp_min(1))

    def total(self, values: Tensor) -> Tensor:
        """The sum over processes."""
        if self.parallel == "none":
            return values
        summed = values.clone()
        dist.all_reduce(summed)
        return summed

    def from_first(self, value: Any) -> Any:
        """What the first process has."""
        if self.parallel == "none":
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def meet(self) -> None:
        """Wait for all, without the device: who does not come is named by the first."""
        if self.parallel != "none":
            dist.monitored_barrier(self.barrier, timeout=SILENCE, wait_all_ranks=True)


ALONE = Processes()


@contextmanager
def joined(parallel: Parallel) -> Iterator[Processes]:
    """The processes that torchrun started, or those of a process group that is there already."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if parallel == "none":
        if size > 1:
            raise XentflowError(f"parallel: expected ddp or fully-shard with {size} processes, got none")
        yield ALONE
        return
    there = dist.is_initialized()
    if not there:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise XentflowError(
                f"parallel: expected a start by torchrun with parallel={parallel}, got no {', '.join(missing)}"
            )
    try:
        if not there:
            dist.init_process_group(_backend(), timeout=SILENCE)
        # Of its own, on the CPU: it is asked before anything waits for a device.
        processes = Processes(parallel, dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))
        processes.meet()
        yield processes
        processes.meet()
    except RuntimeError as error:
        if not _is_of_others(error):
            raise
        who = f"process {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else "a process"
        raise XentflowError(
            f"parallel: expected every process to answer {who} within {SILENCE.seconds} s, got silence: another "
            f"died or hangs ({str(error).strip().splitlines()[0].partition('. ')[0]})"
        ) from error
    # After a failure the group is left as it is: taking it down would wait for those who are gone.
    if not there:
        dist.destroy_process_group()


def device_of_process(device: str) -> str:
    """A GPU of its own for each process on a machine."""
    if device != "cuda" or "LOCAL_RANK" not in os.environ:
        return device
    own = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(own)
    return own


def whole(tensor: Tensor) -> Tensor:
    """A tensor in full, gathered where it is cut."""
    return tensor.full_tensor() if _is_cut(tensor) else tensor  # type: ignore[attr-defined]


def fill(tensor: Tensor, value: Tensor) -> None:
    """Copy a whole value into a tensor that may be cut."""
    if _is_cut(tensor):
        from torch.distributed.tensor import distribute_tensor

        cut: Any = tensor
        value = distribute_tensor(value.to(tensor.device), cut.device_mesh, cut.placements, src_data_rank=None)
    tensor.copy_(value)


@contextmanager
def gathered(network: nn.Module) -> Iterator[None]:
    """The network with all its parameters whole, so that any part of it may be called."""
    if not any(map(_is_cut, network.parameters())):
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    parts = [module for module in network.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(True, recurse=False)


def _layers(network: nn.Module) -> Sequence[nn.Module]:
    """Modules whose parameters nothing outside their own forward pass uses."""
    if isinstance(network, DerivedTransformer):
        return list(network.stack.blocks)
    return list(network.encoder.layers) if isinstance(network, Transformer) else []


def _as_own(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    # A view, changed in place by whoever gets it, would lose what ``fully_shard`` hangs on it.
    return output.clone() if output._is_view() else output


def _is_cut(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _is_of_others(error: RuntimeError) -> bool:
    """Whether another process is what an error is about; gloo's come as plain ones, with their place in the text."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL", "monitoredBarrier"))
