"""Results on disk: ``result.json`` and its siblings, each written whole or not at all."""

import json
import os
import platform
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from xentflow.errors import XentflowError

PART = ".xentflow-part"
"""How the names of files end that are not whole yet: what a killed run leaves may be known by it, and removed."""


def versions() -> dict[str, str]:
    """What a figure may depend on besides the seed."""
    packages = ("xentflow", "torch", "numpy", "numba", "scikit-learn", "entmax")
    return {"python": platform.python_version(), **{package: _installed(package) for package in packages}}


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        # Run from a folder of sources, or without what this run has no use for.
        return "not installed"


def write_result(
    folder: Path, command: str, config: Mapping[str, Any], figures: Mapping[str, Any], labels: str
) -> Path:
    """Write ``result.json``: what was run, with what, what came out, and where true labels entered ("nowhere")."""
    record = {"command": command, "config": config, "labels_used": labels, "versions": versions(), **figures}
    return write_whole(folder / "result.json", (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


def report_console() -> Console:
    """Where tables go: as wide as the terminal, and wide enough for a table where the output is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=110)


def require_writable(folder: Path) -> None:
    """Raise at once, before any work is done, where a result could not be written afterwards."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".", suffix=PART):
            pass
    except OSError as error:
        raise XentflowError(f"output: expected a folder that can be written, got {folder}: {error}") from error


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file so that a crash, a full disk or Ctrl-C leaves the old one or the new one, never a part."""
    require_writable(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        raise XentflowError(f"output: {path} could not be written: {error}; nothing was changed") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path
