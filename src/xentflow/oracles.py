"""Oracles: where the targets C of a block come from, and whether true labels are among their sources.

An oracle is a module that is asked once at the start of a step, with the features and their logits, and gives C like
the logits: each distribution non-negative and summing to one along the axis, over the entries that a mask leaves. C is
then held fixed for the step, as in the paper; where an oracle reads C off the features, the step descends ℓ(·, C) at
that C.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from xentflow.axes import Axis, dimension, holds, is_number, require_features, require_finite, require_float_tensor
from xentflow.errors import XentflowError
from xentflow.masks import Masking
from xentflow.models import Features
from xentflow.potentials import Logits, Mask


class Oracle(nn.Module, ABC):
    """Gives C for a step."""

    uses_labels: ClassVar[bool]
    """Whether the true labels of the very samples it acts on enter."""

    sees: ClassVar[str]
    """In words, for tables and reports, where C comes from."""

    reads_logits: ClassVar[bool] = False
    """Whether it looks at the logits' values; else a tensor of their shape, dtype and device will do."""

    @abstractmethod
    def forward(
        self, Z: Features, N: Logits, axis: Axis, mask: Mask | None = None, given: Tensor | None = None
    ) -> Tensor:
        """C like N; ``given`` is what the caller of the block passed as ``targets``."""

    def labels(self, like: Tensor, axis: Axis, masking: Masking) -> Tensor | None:
        """C as one entry for each distribution, int64, where that is what it is and ``masking`` allows; else None."""
        return None

    def _refuse(self, given: Tensor | None) -> None:
        if given is not None:
            raise XentflowError(
                f"targets: expected none, since this block's oracle, {type(self).__name__}, makes its own; "
                "a block with the oracle Given takes them"
            )


class Given(Oracle):
    """C as the caller passes it: soft targets or integer labels. What the paper's experiment does, with true labels."""

    uses_labels: ClassVar[bool] = True
    sees: ClassVar[str] = "the targets given, true labels among them for all it knows"

    def forward(
        self, Z: Features, N: Logits, axis: Axis, mask: Mask | None = None, given: Tensor | None = None
    ) -> Tensor:
        if given is None:
            raise XentflowError("targets: expected C or labels, since this block's oracle is Given; got none")
        return given


class SelfPrediction(Oracle):
    """C = softmax(N / temperature), the model's own prediction; ``hard`` puts all weight on its largest entry.

    At temperature 1, not hard, C = p and a LogSumExp flow stands still: colder or hard targets sharpen.
    """

    uses_labels: ClassVar[bool] = False
    sees: ClassVar[str] = "the block's own prediction"
    reads_logits: ClassVar[bool] = True

    def __init__(self, temperature: float = 1.0, hard: bool = False) -> None:
        super().__init__()
        if not is_number(temperature):
            raise XentflowError(f"temperature: expected a positive finite number, got {temperature!r}")
        self.temperature = temperature
        self.hard = hard

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, hard={self.hard}"

    def forward(
        self, Z: Features, N: Logits, axis: Axis, mask: Mask | None = None, given: Tensor | None = None
    ) -> Tensor:
        self._refuse(given)
        dim = dimension(axis)
        if not self.hard:
            return _distributed(N / self.temperature, dim, mask)
        present = N if mask is None else N.masked_fill(~mask, -torch.inf)
        best = present.argmax(dim, keepdim=True)
        return _within(torch.zeros_like(N).scatter(dim, best, 1.0), dim, mask)


class Uniform(Oracle):
    """The same weight on every entry: no information, and so a control."""

    uses_labels: ClassVar[bool] = False
    sees: ClassVar[str] = "nothing"

    def forward(
        self, Z: Features, N: Logits, axis: Axis, mask: Mask | None = None, given: Tensor | None = None
    ) -> Tensor:
        self._refuse(given)
        return _within(torch.ones_like(N), dimension(axis), mask)


class Learned(Oracle):
    """C = softmax(net(Z)) along the axis, for any module that gives logits like the model's.

    Labels shape it through the training loss alone. For a causal block the net must act on each token by itself.
    """

    uses_labels: ClassVar[bool] = False
    sees: ClassVar[str] = "the features, through a learned network"

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise XentflowError(f"net: expected an nn.Module from features to logits, got {type(net).__name__}")
        self.net = net

    def forward(
        self, Z: Features, N: Logits, axis: Axis, mask: Mask | None = None, given: Tensor | None = None
    ) -> Tensor:
        self._refuse(given)
        logits = self.net(Z)
        if not isinstance(logits, Tensor):
            raise XentflowError(f"net: expected a tensor of logits out, got {type(logits).__name__}")
        if logits.shape != N.shape:
            if logits.shape != (*N.shape[:-3], *N.shape[-2:]) or N.ndim != Z.ndim + 1:
                raise XentflowError(
                    f"net: expected logits like the model's, {tuple(N.shape)}, got {tuple(logits.shape)}"
                )
            logits = logits.unsqueeze(-3).expand(N.shape)
        return _distributed(logits, dimension(axis), mask)


class LearnedTargets(Oracle):
    """C = softmax of a free matrix of logits ``(S, K)``, the same for every sample; for self-attention (S, S).

    heads: H, where each head has a matrix of its own; relative: one logit for each distance k − s, S + K − 1 of them,
    instead of one for each pair.
    """

    uses_labels: ClassVar[bool] = False
    sees: ClassVar[str] = "nothing but what training has taught it"

    def __init__(self, rows: int, columns: int | None = None, heads: int | None = None, relative: bool = False) -> None:
        super().__init__()
        columns = rows if columns is None else columns
        shape = (rows, columns) if heads is None else (heads, rows, columns)
        if not all(isinstance(size, int) and size > 0 for size in shape):
            came = " and ".join(repr(size) for size in shape)
            raise XentflowError(f"LearnedTargets: expected positive whole numbers, got {came}")
        self.rows, self.columns, self.heads, self.relative = rows, columns, heads, relative
        self.logits = nn.Parameter(torch.zeros((*shape[:-2], rows + columns - 1) if relative else shape))

    def extra_repr(self) -> str:
        heads = "" if self.heads is None else f", heads={self.heads}"
        return f"{self.rows}, {self.columns}{heads}" + (", relative=True" if self.relative else "")

    def forward(
        self, Z: Features, N: Logits, axis: Axis, mask: Mask | None = None, given: Tensor | None = None
    ) -> Tensor:
        self._refuse(given)
        # The window that begins at the last row's first distance is the last row.
        logits = self.logits.unfold(-1, self.columns, 1).flip(-2) if self.relative else self.logits
        if logits.shape != N.shape[-logits.ndim :]:
            raise XentflowError(
                f"LearnedTargets: expected logits of size {tuple(logits.shape)}, got {tuple(N.shape[-2:])}"
            )
        return _distributed(logits.to(N.dtype).expand(N.shape), dimension(axis), mask)


class Shift(Oracle):
    """Each token's target is the token ``offset`` places on (1: the next one); past the end it is the token itself.

    For the quadratic model. A causal block can look back only: ``offset=-1``.
    """

    uses_labels: ClassVar[bool] = False
    sees: ClassVar[str] = "positions only"

    def __init__(self, offset: int = 1) -> None:
        super().__init__()
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise XentflowError(f"offset: expected a whole number, got {offset!r}")
        self.offset = offset

    def extra_repr(self) -> str:
        return f"offset={self.offset}"

    def forward(
        self, Z: Features, N: Logits, axis: Axis, mask: Mask | None = None, given: Tensor | None = None
    ) -> Tensor:
        self._refuse(given)
        places = _positions(N, type(self).__name__)
        aim = self._aim(places)
        rows = (aim[:, None] == places[None, :]).to(N.dtype)
        # A token owns a row on the classes axis, a column on the sequence axis.
        C = (rows if axis == "classes" else rows.mT).expand(N.shape)
        if mask is not None:
            # A token whose aim is masked, padding for example, is like the last one: it aims at itself.
            reached = (C.bool() & mask).any(dimension(axis), keepdim=True)
            C = torch.where(reached, C, torch.eye(len(places), dtype=N.dtype, device=N.device))
        return _within(C, dimension(axis), mask)

    def labels(self, like: Tensor, axis: Axis, masking: Masking) -> Tensor | None:
        if masking.dense is not None:
            return None
        places = _positions(like, type(self).__name__)
        owners = like.shape[:-1]
        aim = self._aim(places).expand(owners)
        present = masking.at_labels(aim, axis)
        return aim if present is None else torch.where(present, aim, places.expand(owners))

    def _aim(self, places: Tensor) -> Tensor:
        aim = places + self.offset
        return torch.where((aim < 0) | (aim >= places.numel()), places, aim)


class Band(Oracle):
    """Each token's target is spread evenly over the tokens at most ``width`` places away, itself included."""

    uses_labels: ClassVar[bool] = False
    sees: ClassVar[str] = "positions only"

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        if isinstance(width, bool) or not isinstance(width, int) or width < 0:
            raise XentflowError(f"width: expected a whole number of at least 0, got {width!r}")
        self.width = width

    def extra_repr(self) -> str:
        return f"width={self.width}"

    def forward(
        self, Z: Features, N: Logits, axis: Axis, mask: Mask | None = None, given: Tensor | None = None
    ) -> Tensor:
        self._refuse(given)
        places = _positions(N, type(self).__name__)
        near = ((places[:, None] - places[None, :]).abs() <= self.width).to(N.dtype)
        return _within(near.expand(N.shape), dimension(axis), mask)


class NearestNeighbours(Oracle):
    """C of a token is the mean target of its k nearest tokens in a stored memory (scikit-learn finds them).

    Call ``remember`` first. The memory's labels enter, those of the samples acted on do not.
    """

    uses_labels: ClassVar[bool] = False
    sees: ClassVar[str] = "the labels of a stored memory, not those of the samples it acts on"

    memory: Tensor | None
    memory_targets: Tensor | None

    def __init__(self, k: int) -> None:
        super().__init__()
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise XentflowError(f"k: expected a whole number of at least 1, got {k!r}")
        self.k = k
        self.register_buffer("memory", None)
        self.register_buffer("memory_targets", None)
        self._index: object = None

    def extra_repr(self) -> str:
        return f"k={self.k}, remembers {0 if self.memory is None else self.memory.shape[0]} tokens"

    def remember(self, Z: Tensor, C: Tensor) -> "NearestNeighbours":
        """Store tokens ``(M, F)`` and their targets ``(M, K)``; returns itself."""
        require_features(Z, "memory")
        require_float_tensor("memory targets", C, "(M, K)", 2)
        require_finite("memory targets", C)
        if Z.ndim != 2 or C.ndim != 2 or len(Z) != len(C) or len(Z) < self.k:
            raise XentflowError(
                f"remember: expected (M, F) tokens and (M, K) targets with M of at least k = {self.k}, "
                f"got {tuple(Z.shape)} and {tuple(C.shape)}"
            )
        if not (holds(C >= 0) and holds(C.sum(-1) > 0)):
            raise XentflowError("remember: expected targets that are not negative, some weight in each row, got others")
        self.memory, self.memory_targets, self._index = Z.detach(), C.detach(), None
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # A memory has the size it was saved with, whatever is remembered here, and its index is another.
        for name in ("memory", "memory_targets"):
            saved, held = state_dict.get(prefix + name), getattr(self, name)
            if saved is not None:
                setattr(self, name, (saved if held is None else held).new_empty(saved.shape))
        self._index = None
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(
        self, Z: Features, N: Logits, axis: Axis, mask: Mask | None = None, given: Tensor | None = None
    ) -> Tensor:
        self._refuse(given)
        if self.memory is None or self.memory_targets is None:
            raise XentflowError("NearestNeighbours: expected a memory, got none; call remember(Z, C) first")
        flat = Z.detach().reshape(-1, Z.shape[-1])
        if flat.shape[-1] != self.memory.shape[-1] or self.memory_targets.shape[-1] != N.shape[-1]:
            raise XentflowError(
                f"NearestNeighbours: expected features of width {self.memory.shape[-1]} and "
                f"{self.memory_targets.shape[-1]} classes, like the memory, got {Z.shape[-1]} and {N.shape[-1]}"
            )
        nearest = torch.as_tensor(self._neighbours(flat), device=Z.device)
        C = self.memory_targets[nearest].mean(1).reshape(*Z.shape[:-1], -1).to(N.dtype)
        return _within((C if C.ndim == N.ndim else C.unsqueeze(-3)).expand(N.shape), dimension(axis), mask)

    def _neighbours(self, tokens: Tensor) -> object:
        # Built on first use: importing scikit-learn and indexing the memory are both slow.
        from sklearn.neighbors import NearestNeighbors

        assert self.memory is not None
        if self._index is None:
            self._index = NearestNeighbors(n_neighbors=self.k).fit(self.memory.cpu().numpy())
        return self._index.kneighbors(tokens.cpu().numpy(), return_distance=False)  # type: ignore[attr-defined]


def _positions(N: Logits, name: str) -> Tensor:
    if N.shape[-1] != N.shape[-2]:
        raise XentflowError(f"{name}: expected square logits (a quadratic model's), got {tuple(N.shape)}")
    return torch.arange(N.shape[-1], device=N.device)


def _distributed(logits: Tensor, dim: int, mask: Mask | None) -> Tensor:
    """Softmax over the entries a mask leaves; zero where it leaves none."""
    if mask is None:
        return torch.softmax(logits, dim)
    mask = mask.expand(logits.shape)
    alive = mask.any(dim, keepdim=True)
    return torch.softmax(logits.masked_fill(~mask & alive, -torch.inf), dim).masked_fill(~mask, 0)


def _within(weights: Tensor, dim: int, mask: Mask | None) -> Tensor:
    """Weights kept where the mask leaves them and made to sum to one; evenly spread where none was left."""
    left = torch.ones_like(weights) if mask is None else mask.expand(weights.shape).to(weights.dtype)
    kept = weights * left
    kept = torch.where(kept.sum(dim, keepdim=True) > 0, kept, left)
    return kept / kept.sum(dim, keepdim=True).clamp_min(torch.finfo(kept.dtype).tiny)
