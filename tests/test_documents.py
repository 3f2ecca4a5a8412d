"""The documents say what is so: snippets run and print what stands below them, links and names lead somewhere, and
measured sizes are the measured ones."""

import contextlib
import functools
import importlib
import io
import pkgutil
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

import xentflow
from xentflow import cli
from xentflow.claims import try_claims
from xentflow.claims.paper import PAPER_CLAIMS
from xentflow.claims.verify import VerifyConfig, table
from xentflow.experiments import paper
from xentflow.experiments.study import FITS, passes_of

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_SNIPPETS = [document for document in DOCUMENTS if "```python" in document.read_text()]
SNIPPET = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
named = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)


def _rows(text):
    """The cells of every row of every table, headings and rules included."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


@functools.cache
def _findings():
    config = VerifyConfig()
    return list(try_claims(PAPER_CLAIMS, config.instances, config.seed))


@pytest.mark.parametrize("document", WITH_SNIPPETS, ids=lambda document: document.name)
def test_snippets_run_and_print_what_stands_below_them(document):
    namespace = {}
    for number, (source, expected) in enumerate(SNIPPET.findall(document.read_text()), start=1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, f"{document.name}, snippet {number}", "exec"), namespace)
        assert printed.getvalue() == expected


def test_there_are_snippets_where_they_are_expected():
    assert {"README.md", "derivation.md", "errata.md"} <= {document.name for document in WITH_SNIPPETS}


@named
def test_relative_links_lead_to_files_and_headings(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        assert path.exists(), f"{document.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _exists(dotted):
    name, *attributes = dotted.split(".")
    for info in pkgutil.iter_modules(xentflow.__path__):
        found = getattr(importlib.import_module(f"xentflow.{info.name}"), name, None)
        if getattr(found, "__module__", "").startswith("xentflow"):
            return not attributes or hasattr(found, *attributes)
    return False


def _line_by_line():
    _, _, section = (ROOT / "docs/derivation.md").read_text().partition("## The paper, line by line")
    return _rows(section)[2:]


def test_every_name_in_the_derivations_table_exists():
    names = [name for row in _line_by_line() for name in re.findall(r"`([^`]+)`", row[2])]
    assert len(names) > 20
    assert [name for name in names if not _exists(name)] == []
    assert not _exists("Quadratic.no_such_method")
    assert not _exists("NoSuchClass")


def test_names_of_classes_and_methods_in_the_documents_exist():
    for document in DOCUMENTS:
        names = re.findall(r"`([A-Z][A-Za-z0-9]+\.[a-z_]+)[^`]*`", document.read_text())
        assert [name for name in names if not _exists(name)] == [], document.name


def test_the_derivations_table_names_every_claim_of_the_paper_and_no_other():
    claims = {claim.name for claim in PAPER_CLAIMS}
    cells = {row[3] for row in _line_by_line()}
    stated = {name for name in claims for cell in cells if cell.startswith(name)}
    assert stated == claims
    assert [cell for cell in cells if not cell.startswith(tuple(claims))] == []


def test_the_sizes_in_the_errata_are_the_measured_ones():
    rows = _rows((ROOT / "docs/errata.md").read_text())[2:]
    measured = [
        [f"{f.claim.source}: {f.claim.name}", f.axis, f"{f.median_error:.2f}", f"{f.max_error:.2f}"]
        for f in _findings()
        if f.verdict != "holds"
    ]
    assert rows == measured


def test_the_table_in_the_readme_is_what_verify_prints():
    console = Console(file=io.StringIO(), width=110, color_system=None)
    console.print(table("The paper's claims", _findings()))
    _, _, section = (ROOT / "README.md").read_text().partition("## What `xentflow verify` shows")
    excerpt = re.findall(r"^```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[0]

    def comparable(text):
        # Rounding differs from one processor to the next; its size is not the point.
        return [re.sub(r"\d+e-1\d|exactly", "~", line).split() for line in text.splitlines()]

    printed = comparable(console.file.getvalue())
    assert len(excerpt.splitlines()) > 5
    assert [line for line in comparable(excerpt) if line not in printed] == []


def test_the_architecture_lists_the_modules_in_the_order_of_the_import_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer.removeprefix("xentflow.") for layer in reversed(contracts[0]["layers"])]
    rows = _rows((ROOT / "docs/architecture.md").read_text())
    listed = [name.strip("`") for name, *_ in rows if re.fullmatch(r"`\w+(\.py|/)`", name)]
    assert [name for name in listed if not (ROOT / "src/xentflow" / name).exists()] == []
    assert [re.sub(r"\.py|/", "", name) for name in listed] == layers


def _cells(text):
    """The rows of every table by their first cell: means of the rest, as numbers where they are."""
    rows = {}
    for name, *cells in _rows(text):
        with contextlib.suppress(ValueError):
            rows.setdefault(name, [float(cell.partition(" ± ")[0].replace("−", "-")) for cell in cells])
    return rows


@pytest.fixture(scope="module")
def reproduction():
    return (ROOT / "docs/reproduction.md").read_text()


def test_the_reproductions_table_is_the_papers_ours_and_their_difference(reproduction):
    rows = _cells(reproduction)
    ours = {start: rows[f"{start}, ours"] for start in paper.STARTS}
    for start, cells in paper.TABLE_1.items():
        assert rows[f"{start}, paper"] == list(cells)
        # Both means are rounded to four digits before they are subtracted here.
        assert rows[f"{start}, difference"] == pytest.approx(paper.differences(ours)[start], abs=1.01e-4)
    said = re.search(r"RMSE of the mean to the paper's cells (\S+), furthest cell (\S+); single", reproduction)
    assert float(said[1]) == pytest.approx(paper.rmse(ours), abs=1e-4)
    assert float(said[2]) == pytest.approx(paper.largest_difference(ours), abs=1e-4)


def test_the_first_table_in_the_readme_is_the_reproductions(reproduction):
    rows = _cells(reproduction)
    shown = _cells((ROOT / "README.md").read_text())
    same = {
        "true labels, the paper": "noisy, paper",
        "true labels, ours": "noisy, ours",
        "shuffled labels": "Shuffled labels: noisy, with the true labels",
        "shuffled labels, agreement with them": "Shuffled labels: noisy, with C",
        "own prediction": "Own prediction: noisy, with the true labels",
    }
    assert {name: shown[name] for name in same} == {name: rows[there] for name, there in same.items()}


def test_the_study_tried_as_many_readings_as_are_said(reproduction):
    readings = sum(1 for fit in FITS for _ in passes_of(fit))
    assert f"{readings} readings in all" in reproduction
    assert f"of {readings} readings nearest" in reproduction
    assert f"tries {readings} readings" in (ROOT / "CHANGELOG.md").read_text()


def test_commands_in_the_documents_are_commands(monkeypatch):
    seen = []
    for name, command in cli._COMMANDS.items():
        typed, _ = command.load()
        stub = cli._Command(command.summary, lambda typed=typed, name=name: (typed, lambda *_: seen.append(name) or 0))
        monkeypatch.setitem(cli._COMMANDS, name, stub)
    shell = [block for path in DOCUMENTS for block in re.findall(r"^```sh\n(.*?)^```", path.read_text(), re.M | re.S)]
    lines = [line for block in shell for line in block.splitlines() if line.startswith("xentflow ")]
    for line in lines:
        assert cli.main(shlex.split(line.replace("FOLDER", "folder"), comments=True)[1:]) == 0, line
    assert len(seen) == len(lines) > 4
