"""Tiles so small that problems of a few tokens have several of them, with remainders."""

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xentflow.kernels import dispatch, tiles


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 12)
    monkeypatch.setattr(tiles, "COLUMNS", 4)
    monkeypatch.setattr(tiles, "KEPT", 21)
    monkeypatch.setattr(tiles, "FEWEST_ROWS", 2)
    monkeypatch.setattr(dispatch, "FEW", 0)


class Largest(TorchDispatchMode):
    """Counts the entries of the largest tensor any operation makes: memory without a clock."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            # A view or an expanded number takes the memory of what it looks at.
            if isinstance(tensor, Tensor):
                self.entries = max(self.entries, tensor.untyped_storage().nbytes() // tensor.element_size())
        return found


@pytest.fixture
def largest():
    return Largest
