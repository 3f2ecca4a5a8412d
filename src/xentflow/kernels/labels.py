"""Products with targets that are labels: C is one-hot, so Cc picks rows of c, and Cᵀa brings rows of a back to them."""

import torch
from torch import Tensor


def chosen(c: Tensor, labels: Tensor, present: Tensor | None) -> Tensor:
    """Cc ``(*batch, D, F)`` for labels ``(*batch, D)`` of rows of c ``([*batch], E, F)``; zero where not present."""
    if c.ndim == 2:
        picked = c[labels]
    else:
        full = c.expand(*labels.shape[:-1], *c.shape[-2:])
        picked = full.gather(-2, labels.unsqueeze(-1).expand(*labels.shape, c.shape[-1]))
    return picked if present is None else picked.masked_fill(~present.unsqueeze(-1), 0)


def returned(a: Tensor, labels: Tensor, present: Tensor | None, length: int) -> Tensor:
    """Cᵀa ``(*batch, length, F)`` for a ``([*batch], D, F)``: each row goes to its label's place."""
    full = a.expand(*labels.shape, a.shape[-1])
    if present is not None:
        full = full.masked_fill(~present.unsqueeze(-1), 0)
    places = labels.unsqueeze(-1).expand(full.shape)
    zeros = torch.zeros(*labels.shape[:-1], length, a.shape[-1], dtype=a.dtype, device=a.device)
    return zeros.scatter_add(-2, places, full)
