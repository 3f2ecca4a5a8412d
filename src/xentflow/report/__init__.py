"""Reports: records on disk become tables, figures and a page. Nothing is computed anew that a record could hold."""

from pathlib import Path

from rich.console import Console

from xentflow.records import write_whole
from xentflow.report.reading import Result, read
from xentflow.report.tables import as_markdown, print_tables


def write(folder: Path) -> list[Path]:
    """Every file of the report from the records in a folder; returns all that a reader wants to know of."""
    from xentflow.report.figures import energy, figure1
    from xentflow.report.page import as_html

    result = read(folder)
    figure = figure1(result)
    energies = energy(result)
    contents = {
        "table.md": as_markdown(result).encode(),
        "figure1.png": figure.png,
        "figure1.svg": figure.svg,
        "energy.png": energies.png,
        "report.html": as_html(result, figure, energies).encode(),
    }
    for name, content in contents.items():
        write_whole(folder / name, content)
    return [folder / name for name in ("result.json", *contents, "weights.safetensors")]


def show(folder: Path, console: Console) -> None:
    """Print the tables of the records in a folder."""
    print_tables(read(folder), console)


__all__ = ["Result", "as_markdown", "print_tables", "read", "show", "write"]
