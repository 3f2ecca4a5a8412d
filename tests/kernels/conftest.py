"""Tiles so small that problems of a few tokens have several of them, with remainders; and what is alive at once."""

from importlib import import_module

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xentflow.kernels import chunked, dispatch, tiles

# The package has the function by that name.
losses = import_module("xentflow.kernels.cross_entropy")


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 12)
    monkeypatch.setattr(tiles, "COLUMNS", 4)
    monkeypatch.setattr(tiles, "KEPT", 21)
    monkeypatch.setattr(tiles, "FEWEST_ROWS", 2)
    monkeypatch.setattr(dispatch, "FEW", 0)


class Alive(TorchDispatchMode):
    """Counts the most entries, in tensors that operations made, that are alive at once: memory without a process."""

    def __init__(self):
        super().__init__()
        self.entries = 0
        self._made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {_storage(leaf).cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                storage = _storage(leaf)
                # A view, or what was changed in place, takes the memory of what it was given.
                if storage.cdata not in given:
                    self._made[storage.cdata] = (storage, leaf.untyped_storage().nbytes() // leaf.element_size())
        self._made = {at: held for at, held in self._made.items() if not held[0].expired()}
        self.entries = max(self.entries, sum(entries for _, entries in self._made.values()))
        return found

    def seeing_inside(self, function):
        """What runs within an operator of ours, which a mode does not look into by itself."""

        def seen(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return seen


def _storage(tensor):
    return StorageWeakRef(tensor.untyped_storage())


@pytest.fixture
def alive(monkeypatch):
    """Counts afresh at every call."""

    def start():
        mode = Alive()
        for module, name, function in INSIDE:
            monkeypatch.setattr(module, name, mode.seeing_inside(function))
        return mode

    return start


INSIDE = [
    (chunked, "attend", chunked.attend),
    (chunked, "attend_backward", chunked.attend_backward),
    (losses, "sweep", losses.sweep),
]
