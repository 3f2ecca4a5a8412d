"""Records of finished parts of a run, so that an interrupted one goes on where it stopped.

A part is one safetensors file, tensors and figures together, written whole or not at all. It carries the settings it
was made with; a record made with others, or one that cannot be read, counts as not made, and is replaced.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from xentflow.data.idx import LabelledImages
from xentflow.records import PART, versions, write_whole

Part = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors, and figures as they come back from JSON."""


@dataclass(frozen=True)
class Ledger:
    """The records in one folder; ``announce`` is told why one that is there is not used."""

    folder: Path
    announce: Callable[[str], None]

    def get(self, name: str, settings: Mapping[str, Any]) -> Part | None:
        """The record of a part, where it was made with these settings."""
        path = self._path(name)
        try:
            with safe_open(path, "pt") as file:
                record = json.loads((file.metadata() or {})["record"])
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # no mapping
            made_with, figures = record["settings"], record["figures"]
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            self.announce(f"{path} is no record that can be read ({error}): doing it again")
            return None
        wanted = _as_json(settings)
        if made_with != wanted:
            keys = sorted(key for key in {*wanted, *made_with} if wanted.get(key) != made_with.get(key))
            self.announce(f"{path} was made with other settings ({', '.join(keys)}): starting that part afresh")
            return None
        return tensors, figures

    def put(
        self, name: str, settings: Mapping[str, Any], tensors: dict[str, Tensor], figures: Mapping[str, Any]
    ) -> Part:
        """Write the record of a finished part; gives it back as ``get`` would."""
        write_whole(self._path(name), as_file(tensors, {"settings": settings, "figures": figures}))
        return tensors, _as_json(figures)

    def clear_leftovers(self) -> None:
        """Remove what a killed run left of files it had not finished."""
        for folder in (self.folder, self.folder.parent):
            for path in folder.glob(f".*{PART}"):
                path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def as_file(tensors: dict[str, Tensor], record: Mapping[str, Any]) -> bytes:
    """A safetensors file with a JSON record in its header; the same input gives the same bytes."""
    # One key only: the order of several is not fixed.
    header = {"record": json.dumps(record, allow_nan=False)}
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, header)


def settings_of(data: LabelledImages, **values: Any) -> dict[str, Any]:
    """What a record depends on: the values given, the data's content, and the versions of what computes."""
    return {**values, "data": digest(data.images, data.labels), "versions": versions()}


def digest(*tensors: Tensor) -> str:
    """SHA-256 of the content of tensors, one after another."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().numpy().data)
    return found.hexdigest()


def _as_json(value: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))
