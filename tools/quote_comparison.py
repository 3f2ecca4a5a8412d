"""Take the records of a comparison into the documents: ``python tools/quote_comparison.py results/compare/records.json``.

Writes ``docs/label-free.json``, the records without what no table shows, and the tables into ``docs/label-free.md``.
"""

import json
import sys
from pathlib import Path

from xentflow.report.comparison import as_markdown

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"


def quoted(text, records):
    """The document with the tables of these records."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + as_markdown(records) + "\n" + END + after


def main(source):
    records = json.loads(Path(source).read_text())
    for name, run in records["runs"].items():
        if name not in ("derived seed 0", "transformer seed 0"):
            run["result"].pop("depth", None)
    (DOCS / "label-free.json").write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    page = DOCS / "label-free.md"
    page.write_text(quoted(page.read_text(), records))


if __name__ == "__main__":
    main(sys.argv[1])
