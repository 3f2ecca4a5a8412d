"""What the corruption of images refuses, and in which words."""

import math
import re

import pytest
import torch

from xentflow.errors import XentflowError
from xentflow.training import Corruption


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"std": -1.0}, "std: expected a finite number, at least 0, got -1.0"),
            ({"std": math.nan}, "std: expected a finite number, at least 0, got nan"),
            ({"when": "never"}, 'when: expected "before" or "after", got \'never\''),
            ({"normalisation": "z"}, 'normalisation: expected "half", "unit" or "standard", got \'z\''),
            ({"deviation": 0.0}, "mean, deviation: expected finite numbers, deviation above 0, got 0.286, 0.0"),
        ],
    )
    def test_settings(self, arguments, message):
        with pytest.raises(XentflowError, match=re.escape(message)):
            Corruption(**arguments)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"images": torch.zeros(2, 3)}, "images: expected a non-empty uint8 tensor"),
            ({"images": [[1]]}, "images: expected a non-empty uint8 tensor (n, height, width) or (n, F), got list"),
            ({"images": torch.zeros(1, 2**17 + 1, dtype=torch.uint8)}, "images: expected at most 131072 pixels"),
            ({"seed": -1}, "seed: expected an integer from 0 to 2**64 - 1, got -1"),
            ({"seed": 2**64}, "seed: expected an integer from 0"),
            ({"stream": 2**16}, "stream: expected an integer from 0 to 65535, got 65536"),
            ({"index": torch.tensor([2])}, "index: expected numbers from 0 to 1, got 2 to 2"),
            ({"index": torch.tensor([-1])}, "index: expected numbers from 0 to 1, got -1 to -1"),
            ({"index": torch.tensor([0.0])}, "index: expected an int64 tensor (n,), got torch.float32 (1,)"),
        ],
    )
    def test_arguments(self, arguments, message):
        given = {"images": torch.zeros(2, 4, dtype=torch.uint8), "seed": 0} | arguments
        with pytest.raises(XentflowError, match=re.escape(message)):
            Corruption().apply(**given)
