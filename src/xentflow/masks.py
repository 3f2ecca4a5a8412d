"""Which logits take part, in parts that cost no memory of the size of the logits where none was given."""

from typing import NamedTuple

import torch
from torch import Tensor

from xentflow.axes import Axis


class Masking(NamedTuple):
    """Parts that must all agree for a logit to take part; each may be missing.

    dense: True where a logit takes part, broadcasting to the logits; rows ``(*batch, S)`` and columns ``(*batch, K)``,
    with the logits' head dimension of size one where they have heads: True for what is real, not padding; causal: a
    distribution's owner sees itself and what is earlier.
    """

    dense: Tensor | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None
    causal: bool = False

    def tensor(self, like: Tensor, axis: Axis) -> Tensor | None:
        """All parts as one boolean tensor that broadcasts to the logits ``like``; None where everything takes part."""
        S, K = like.shape[-2:]
        whole = self.dense
        if self.rows is not None:
            whole = both(whole, self.rows.unsqueeze(-1).expand(*self.rows.shape, K))
        if self.columns is not None:
            whole = both(whole, self.columns.unsqueeze(-2).expand(*self.columns.shape[:-1], S, K))
        if self.causal:
            # A token owns a row on the classes axis and a column on the sequence axis.
            lower = torch.ones(S, K, dtype=torch.bool, device=like.device).tril()
            whole = both(whole, lower if axis == "classes" else lower.mT)
        return whole

    def of_head(self, head: int) -> "Masking":
        """What is left of it for the logits of one head, which have no head dimension."""
        dense, rows, columns, causal = self
        if dense is not None and dense.ndim > 2:
            dense = dense.select(-3, head if dense.shape[-3] > 1 else 0)
        rows, columns = (X if X is None or X.ndim == 1 else X.squeeze(-2) for X in (rows, columns))
        return Masking(dense, rows, columns, causal)

    def at_labels(self, labels: Tensor, axis: Axis) -> Tensor | None:
        """Whether the entry that each distribution's label names takes part; None where all do."""
        classes = axis == "classes"
        owners, entries = (self.rows, self.columns) if classes else (self.columns, self.rows)
        present = None
        if self.dense is not None:
            dense: Tensor = torch.atleast_2d(self.dense)  # type: ignore[no-untyped-call]
            lengths = (labels.shape[-1], dense.shape[-1]) if classes else (dense.shape[-2], labels.shape[-1])
            dense = dense.expand(*labels.shape[:-1], *lengths)
            dim = -1 if classes else -2
            present = (
                dense.gather(dim, labels.unsqueeze(dim)).squeeze(dim) if dense.shape[dim] > 1 else dense.squeeze(dim)
            )
        if owners is not None:
            present = both(present, owners.expand(labels.shape))
        if entries is not None:
            present = both(present, entries.expand(*labels.shape[:-1], entries.shape[-1]).gather(-1, labels))
        if self.causal:
            present = both(present, labels <= torch.arange(labels.shape[-1], device=labels.device))
        return present


def both(first: Tensor | None, second: Tensor) -> Tensor:
    """Where both are True; an absent one always is."""
    return second if first is None else first & second
