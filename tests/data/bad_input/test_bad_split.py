"""A split that no dataset has."""

import pytest

from xentflow.data import load_fashion_mnist, load_mnist_format
from xentflow.errors import XentflowError


@pytest.mark.parametrize("load", [load_mnist_format, load_fashion_mnist])
def test_unknown_split(tmp_path, load):
    with pytest.raises(XentflowError, match='split: expected "train" or "test", got \'validation\''):
        load("validation", tmp_path) if load is load_fashion_mnist else load(tmp_path, "validation")
