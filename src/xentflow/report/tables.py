"""Tables: the same rows for the terminal, for ``table.md`` and for the page."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as RichTable

from xentflow.report.reading import Result


@dataclass(frozen=True)
class Table:
    """A table with what it shows and what it does not."""

    title: str
    caption: str
    heading: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(result: Result) -> list[Table]:
    """The paper's table beside ours, the controls, and the energies."""
    return [_main(result), _controls(result), _energies(result)]


def labels_sentence(result: Result) -> str:
    """Where true labels entered."""
    return f"Where labels entered: {result.record['labels_used']}"


def verdict(result: Result) -> str:
    """How near the twelve cells are, in one sentence; empty where the paper has nothing to compare with."""
    compared = result.record["paper"]
    if compared is None:
        return ""
    each = compared["rmse_of_each_seed"]
    single = f"; single seeds {min(each):.4f} to {max(each):.4f}" if result.several else ""
    return (
        f"RMSE of {'the mean' if result.several else 'this seed'} to the paper's cells {compared['rmse_of_mean']:.4f}, "
        f"furthest cell {compared['largest_difference_of_mean']:.4f}{single}."
    )


def as_markdown(result: Result) -> str:
    """``table.md``."""
    parts = [f"# {heading(result)}"]
    for table in tables(result):
        parts += [f"## {table.title}", _markdown_rows(table), table.caption]
        if table.title == MAIN:
            parts += [text for text in (verdict(result), labels_sentence(result)) if text]
    return "\n\n".join(parts) + "\n"


def print_tables(result: Result, console: Console) -> None:
    """The tables on a terminal."""
    for table in tables(result):
        shown = RichTable(title=table.title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for number, name in enumerate(table.heading):
            shown.add_column(name, justify="left" if number == 0 else "right", no_wrap=number > 0)
        for row in table.rows:
            # The deviation below its mean: six of both do not fit on a line.
            shown.add_row(*(cell.replace(" ± ", "\n±") for cell in row))
        console.print(shown)
        console.print(table.caption, highlight=False, style="dim")
        if table.title == MAIN:
            for text in (verdict(result), labels_sentence(result)):
                if text:
                    console.print(text, highlight=False)
        console.print()


def heading(result: Result) -> str:
    """What was run."""
    seeds = result.record["seeds"]
    which = f"{len(seeds)} seeds ({seeds[0]} to {seeds[-1]})" if result.several else f"one seed ({seeds[0]})"
    return f"Passes through the derived block, {which}"


MAIN = "Accuracy with the true labels as targets: the paper's Table 1"
CONTROLS = "Controls: the same classifier, images, passes and measure"
ENERGIES = "Energy ℓ per image, to the targets the block was given"


def _main(result: Result) -> Table:
    paper = result.record["paper"]
    row_name = result.record["paper_row"]
    rows = []
    for start in ("clean", "noisy"):
        mean, sd = result.cells(row_name, start, "accuracy")
        if paper is not None:
            rows.append((f"{start}, paper", *_padded([f"{cell:.4f}" for cell in paper["table_1"][start]], len(mean))))
        rows.append((f"{start}, ours", *_cells(mean, sd)))
        if paper is not None:
            cells = [_signed(cell) for cell in paper["differences"][start]]
            rows.append((f"{start}, difference", *_padded(cells, len(mean))))
    return Table(
        MAIN,
        "What it shows: how fast the block makes the classifier agree with the labels it is given. What it does not "
        "show: classification, since accuracy is measured with the very labels that were given.",
        _heading(result),
        tuple(rows),
    )


def _controls(result: Result) -> Table:
    rows = [
        (f"{title}: {start}, {what}", *_cells(*result.cells(name, start, quantity)))
        for name, title in _titles(result)
        if name != result.record["paper_row"]
        for quantity, what in (("agreement", "with C"), ("accuracy", "with the true labels"))
        if result.has(name, quantity)
        for start in ("clean", "noisy")
    ]
    return Table(CONTROLS, _what_controls_say(result), _heading(result), tuple(rows))


def _what_controls_say(result: Result) -> str:
    each = result.record["per_seed"]
    follows, keeps = (result.cells("shuffled labels", "noisy", kind)[0] for kind in ("agreement", "accuracy"))
    own = result.cells("own prediction", "noisy", "accuracy")[0]
    step = statistics.fmean(one["certified_step"] for one in each)
    clean, noisy = (statistics.fmean(one["neighbours_right"][start] for one in each) for start in ("clean", "noisy"))
    return (
        f"Shuffled labels: from noisy images, agreement with the label given goes from {follows[0]:.4f} to "
        f"{follows[-1]:.4f}, with the true one from {keeps[0]:.4f} to {keeps[-1]:.4f}. What is measured is how well "
        "the block follows C, right or wrong. Own prediction, with no label from outside: accuracy goes from "
        f"{own[0]:.4f} to {own[-1]:.4f}. Nearest neighbours use no label of the images judged; they are found before "
        f"the first pass, for {result.record['neighbours_tried_on']} images a seed, and by themselves name the right "
        f"class of {clean:.4f} of the clean and {noisy:.4f} of the noisy ones. The certified step is {step:.3f} on "
        "average, where the paper takes 1."
    )


def _energies(result: Result) -> Table:
    rows = [
        (f"{title}: {start}", *_cells(*result.cells(name, start, "energy"), digits=3))
        for name, title in _titles(result)
        for start in ("clean", "noisy")
    ]
    return Table(
        ENERGIES,
        "Each row descends its own ℓ, so rows differ in what is measured; own prediction chooses its targets anew at "
        "every pass. Uniform targets leave no less than ln K.",
        _heading(result),
        tuple(rows),
    )


def _titles(result: Result) -> Iterator[tuple[str, str]]:
    for name, control in result.record["controls"].items():
        yield name, control["title"]


def _heading(result: Result) -> tuple[str, ...]:
    mean, _ = result.cells(result.record["paper_row"], "clean", "accuracy")
    return ("pass", *(str(number) for number in range(len(mean))))


def _cells(mean: list[float], sd: list[float] | None, digits: int = 4) -> list[str]:
    if sd is None:
        return [f"{cell:.{digits}f}" for cell in mean]
    return [f"{cell:.{digits}f} ± {spread:.{digits}f}" for cell, spread in zip(mean, sd, strict=True)]


def _signed(value: float) -> str:
    text = f"{value:+.4f}".replace("-", "−")
    return text if float(f"{value:.4f}") else "0.0000"


def _padded(cells: list[str], length: int) -> list[str]:
    return (cells + ["–"] * length)[:length]


def _markdown_rows(table: Table) -> str:
    lines = ["| " + " | ".join(table.heading) + " |", "|---" + "|---:" * (len(table.heading) - 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    return "\n".join(lines)
