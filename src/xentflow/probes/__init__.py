"""``xentflow probe``: the faithfulness meter on the command line.

With ``--module FILE:FUNCTION`` it measures what that function returns: (module, energy, Z). Without, it measures the
meter itself, on a toy task: a planted derived block, the same with its energy doubled, and a pre-norm transformer layer
before and after training.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor, nn

from xentflow.errors import XentflowError
from xentflow.meter import Energy, Faithfulness, measure_faithfulness
from xentflow.probes.toy import measure_toy
from xentflow.records import report_console, require_writable, write_result


@dataclass(frozen=True)
class ProbeConfig:
    """What to measure.

    Args:
        module: FILE.py:FUNCTION, a function without arguments that returns (module, energy, Z).
        seeds: of the toy task, where no module is given.
        training_steps: of its transformer layer.
        controls: random directions for the control.
    """

    module: str | None = None
    seeds: int = 3
    training_steps: int = 300
    controls: int = 200

    def __post_init__(self) -> None:
        for name, least in (("seeds", 1), ("training_steps", 1), ("controls", 2)):
            if getattr(self, name) < least:
                raise XentflowError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if self.module is not None and ":" not in self.module:
            raise XentflowError(f"module: expected FILE.py:FUNCTION, got {self.module!r}")


def run(config: ProbeConfig, output: Path) -> int:
    """The command: a table on the terminal, ``result.json`` in ``output``."""
    require_writable(output)
    console = report_console()
    if config.module is None:
        readings = [reading for seed in range(config.seeds) for reading in measure_toy(config, seed)]
        labels = "in the energy of the toy task: its true targets"
        console.print(
            "Toy task: each token names the class of the token before it. The energy is the cross-entropy of a"
        )
        console.print(
            "read-out of the features against the true targets (labels enter); updates are at the first layer."
        )
    else:
        whole = measure(config.module, config.controls)
        readings = [whole, *whole.layers]
        labels = "whatever the energy given holds"
    console.print(table(readings))
    console.print("control: cosine of random directions with the descent direction, mean ± standard deviation.")
    figures = {"readings": [record(reading) for reading in readings]}
    settings = {name: getattr(config, name) for name in config.__dataclass_fields__}
    path = write_result(output, "probe", settings, figures, labels)
    console.print(f"Written: {path}", soft_wrap=True, highlight=False)
    return 0


def measure(target: str, controls: int) -> Faithfulness:
    """The reading of what FILE.py:FUNCTION returns."""
    module, energy, Z = load(target)
    try:
        return measure_faithfulness(module, energy, Z, controls=controls)
    except XentflowError:
        raise
    except Exception as error:  # the module and the energy are the caller's, and may fail in any way
        name = target.rpartition(":")[2]
        raise XentflowError(f"module: {name}() could not be measured: {type(error).__name__}: {error}") from error


def load(target: str) -> tuple[nn.Module, Energy, Tensor]:
    """What FILE.py:FUNCTION returns."""
    file, _, name = target.rpartition(":")
    if not Path(file).is_file():
        raise XentflowError(f"module: expected a Python file, got {file!r}, which is none")
    spec = importlib.util.spec_from_file_location("probed", file)
    if spec is None or spec.loader is None:
        raise XentflowError(f"module: expected a Python file, got {file!r}")
    source = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(source)
        made = getattr(source, name)()
    except Exception as error:
        raise XentflowError(f"module: {target} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple) or len(made) != 3:
        raise XentflowError(f"module: expected {name}() to return (module, energy, Z), got {type(made).__name__}")
    return made


def record(reading: Faithfulness) -> dict[str, Any]:
    """A reading as it goes into ``result.json``."""
    return {
        "name": reading.name,
        "cosine": reading.cosine,
        "scale": reading.scale,
        "relative_error": reading.relative_error,
        "energy_change": reading.energy_change.flatten().tolist(),
        "control_cosine": list(reading.control_cosine),
    }


def table(readings: list[Faithfulness]) -> Table:
    """One row for each reading."""
    shown = Table(title="Faithfulness", title_justify="left", title_style="bold", box=None, pad_edge=False)
    shown.add_column("update")
    for heading in ("cosine", "control", "scale", "relative error", "samples descending"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for reading in readings:
        mean, spread = reading.control_cosine
        shown.add_row(
            reading.name,
            f"{reading.cosine:+.4f}",
            f"{mean:+.4f} ± {spread:.4f}",
            f"{reading.scale:.4g}",
            f"{reading.relative_error:.2g}",
            f"{reading.fraction_descending:.0%}",
        )
    return shown
