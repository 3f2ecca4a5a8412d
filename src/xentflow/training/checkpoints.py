"""Checkpoints of a training run: each written whole or not at all, the last few kept.

One is a record of the ledger: weights, the optimiser's moments and the generator's state as tensors, the step and the
history beside them. It carries the settings of its run, and is used by no other.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xentflow.errors import XentflowError
from xentflow.ledger import Ledger, Part
from xentflow.training.trainer import Trainer


class Checkpoints:
    """The checkpoints in one folder; ``announce`` is told of any that is there and cannot be used.

    Of several processes that train together all call both methods, and the first reads and writes.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], keep: int = 2, announce: Callable[[str], None] = print
    ) -> None:
        if keep < 1:
            raise XentflowError(f"keep: expected at least 1 checkpoint, got {keep}")
        self._ledger = Ledger(folder, announce)
        self._settings, self._keep = settings, keep
        self._own: list[str] = []

    def save(self, trainer: Trainer) -> None:
        """Write the trainer's state, then remove all but the last few."""
        trainer.require_finite()
        tensors, figures = trainer.state()
        if not trainer.processes.first:
            return
        name = f"step-{trainer.step:08d}"
        self._ledger.put(name, self._settings, tensors, figures)
        self._own = [name, *(other for other in self._own if other != name)]
        # What other runs left behind in this folder is theirs, and counts for nothing.
        for old in self._own[self._keep :]:
            (self._ledger.folder / f"{old}.safetensors").unlink(missing_ok=True)
        self._own = self._own[: self._keep]

    def resume(self, trainer: Trainer) -> bool:
        """Bring the trainer to the latest checkpoint that can be used; whether there was one."""
        part = trainer.processes.from_first(self._latest() if trainer.processes.first else None)
        if part is not None:
            trainer.restore(*part)
        return part is not None

    def _latest(self) -> Part | None:
        self._ledger.clear_leftovers()
        latest = None
        for name in sorted((path.stem for path in self._ledger.folder.glob("step-*.safetensors")), reverse=True):
            part = self._ledger.get(name, self._settings)
            if part is not None:
                self._own.append(name)
                latest = part if latest is None else latest
        return latest
