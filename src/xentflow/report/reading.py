"""Records as the report reads them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from xentflow.errors import XentflowError


@dataclass(frozen=True, eq=False)
class Result:
    """``result.json`` and the tensors beside it."""

    record: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def several(self) -> bool:
        """Whether there are standard deviations."""
        return len(self.record["seeds"]) > 1

    def cells(self, control: str, start: str, quantity: str) -> tuple[list[float], list[float] | None]:
        """Mean over the seeds, and standard deviation where there are several, before and after each pass."""
        entry = self.record["summary"][control][start][quantity]
        return entry["mean"], entry["sd"]

    def has(self, control: str, quantity: str) -> bool:
        """Whether a run was measured in this way."""
        return all(quantity in quantities for quantities in self.record["summary"][control].values())


def read(folder: Path) -> Result:
    """The records of ``xentflow reproduce`` in a folder."""
    try:
        record = json.loads((folder / "result.json").read_text())
        tensors = load_file(folder / "weights.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise XentflowError(f"{folder}: expected the records of xentflow reproduce, got {error}") from None
    if not isinstance(record, dict) or record.get("command") != "reproduce":
        raise XentflowError(f"{folder / 'result.json'}: expected a record of xentflow reproduce, got another's")
    return Result(record, tensors)
