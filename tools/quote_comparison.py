"""Take the records of a comparison into the documents.

    python tools/quote_comparison.py tiny results/compare/records.json

writes ``docs/label-free-tiny.json``, the records without what no table shows, and the tables into
``docs/label-free.md``, between the marks of that name.
"""

import json
import sys
from pathlib import Path

from xentflow.report.comparison import as_markdown

DOCS = Path(__file__).parent.parent / "docs"
SHOWN_DEPTH = ("derived seed 0", "transformer seed 0")


def quoted(page, name, records):
    """The page with the tables of these records between the marks of that name."""
    begin, end = (f"<!-- tables {name}: {word} -->\n" for word in ("begin", "end"))
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"expected the marks {begin.strip()} and {end.strip()} in the page, got none")
    return before + begin + "\n" + as_markdown(records) + "\n" + end + after


def main(name, source):
    records = json.loads(Path(source).read_text())
    for run, record in records["runs"].items():
        if run not in SHOWN_DEPTH:
            record["result"].pop("depth", None)
    page = DOCS / "label-free.md"
    text = quoted(page.read_text(), name, records)
    (DOCS / f"label-free-{name}.json").write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    page.write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
