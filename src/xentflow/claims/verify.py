"""``xentflow verify``: try every claim, show the table, say whether each verdict is the expected one."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from xentflow.claims import TOLERANCE, Claim, Finding, Verdict, try_claims
from xentflow.claims.package import PACKAGE_CLAIMS
from xentflow.claims.paper import PAPER_CLAIMS
from xentflow.errors import XentflowError
from xentflow.records import report_console, require_writable, write_result

_STYLE = {Verdict.HOLDS: "green", Verdict.CORRECTED: "yellow", Verdict.REFUTED: "red"}


@dataclass(frozen=True)
class VerifyConfig:
    """What to try.

    Args:
        instances: random instances of each claim on each axis.
        seed: of the instances.
    """

    instances: int = 60
    seed: int = 0

    def __post_init__(self) -> None:
        if self.instances < 2:
            raise XentflowError(f"instances: expected at least 2, got {self.instances}")


def run(config: VerifyConfig, output: Path) -> int:
    """The command: tables on the terminal, ``result.json`` in ``output``, 0 if every verdict is the expected one."""
    require_writable(output)
    console = report_console()
    findings = verify(config, console)
    path = write_result(output, "verify", asdict(config), figures(findings), labels="nowhere")
    console.print(f"Written: {path}", soft_wrap=True, highlight=False)
    return 0 if all(finding.as_expected for finding in findings) else 1


def verify(config: VerifyConfig, console: Console) -> list[Finding]:
    """Try the paper's claims and the package's own, with a progress bar, and print a table of each."""
    findings = []
    with _one_thread():
        for title, claims in (("The paper's claims", PAPER_CLAIMS), ("The package's own identities", PACKAGE_CLAIMS)):
            found = list(_tracked(claims, config, console, title))
            console.print(table(title, found))
            console.print()
            findings += found
    console.print("[bold]Slips, with the right form[/]")
    for slip in slips(findings):
        console.print(f"  {slip}", highlight=False)
    console.print(summary(findings), highlight=False)
    return findings


def figures(findings: list[Finding]) -> dict[str, Any]:
    """The findings as they go into ``result.json``."""
    rows = []
    for finding in findings:
        row = asdict(finding) | {"claim": finding.claim.name, "source": finding.claim.source}
        rows.append(row | {"right_form": finding.claim.right_form, "as_expected": finding.as_expected})
    return {"tolerance": TOLERANCE, "all_as_expected": all(f.as_expected for f in findings), "findings": rows}


def table(title: str, findings: list[Finding]) -> Table:
    """One row for each claim: its verdict on each axis, with the largest error where it holds, else the median."""
    shown = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    shown.add_column("claim", max_width=42)
    for heading in ("where", "sequence axis", "classes axis"):
        shown.add_column(heading, no_wrap=True)
    for claim in dict.fromkeys(f.claim for f in findings):
        cells = {f.axis: _cell(f) for f in findings if f.claim is claim}
        shown.add_row(claim.name, claim.source, cells.get("sequence", "–"), cells.get("classes", "–"))
    return shown


def slips(findings: list[Finding]) -> Iterator[str]:
    """A sentence for each claim that does not hold: how far off it is, and the right form with its error."""
    for f in findings:
        if f.verdict is Verdict.HOLDS:
            continue
        mended = f" by the constant {f.constant:.6g}" if f.constant is not None else ""
        right = f" Right: {f.claim.right_form}, error {f.right_error:.0e}." if f.right_error is not None else ""
        yield (
            f"{f.claim.source}, {f.axis} axis: {f.verdict}{mended}; "
            f"relative error {f.median_error:.2g} (median), {f.max_error:.2g} (largest).{right}"
        )


def summary(findings: list[Finding]) -> str:
    """One sentence: how many of each verdict, and whether all are as expected."""
    count = Counter(f.verdict for f in findings)
    counted = ", ".join(f"{count[verdict]} {verdict}" for verdict in Verdict)
    surprises = sum(not f.as_expected for f in findings)
    outcome = "every verdict is the expected one" if not surprises else f"[bold red]{surprises} not as expected[/]"
    return f"{findings[0].instances} instances each, float64, tolerance {TOLERANCE:.0e}: {counted}; {outcome}."


def _cell(finding: Finding) -> str:
    worst = f"{finding.max_error:.0e}" if finding.max_error else "exactly"
    amount = worst if finding.verdict is Verdict.HOLDS else f"{finding.median_error:.2f}"
    surprise = "" if finding.as_expected else " [bold red]UNEXPECTED[/]"
    return f"[{_STYLE[finding.verdict]}]{finding.verdict.split()[0]}[/] {amount}{surprise}"


def _tracked(claims: tuple[Claim, ...], config: VerifyConfig, console: Console, title: str) -> Iterator[Finding]:
    count = sum(len(claim.expected) for claim in claims)
    findings = try_claims(claims, config.instances, config.seed)
    yield from track(findings, title, total=count, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def _one_thread() -> Iterator[None]:
    """These matrices are tiny: a second thread costs more than it brings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
