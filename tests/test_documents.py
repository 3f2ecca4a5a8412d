"""The documents say what is so: snippets run and print what stands below them, links and names lead somewhere, and
measured sizes are the measured ones."""

import contextlib
import functools
import importlib
import io
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

import xentflow
from xentflow.claims import try_claims
from xentflow.claims.paper import PAPER_CLAIMS
from xentflow.claims.verify import VerifyConfig, table

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
