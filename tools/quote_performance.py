"""Take records of benchmarks into the documents: ``python tools/quote_performance.py results/bench``.

Reads ``attention``, ``loss`` and ``block`` below that folder; writes ``docs/performance.json`` with their records,
their tables into ``docs/performance.md``, and their figures into ``docs/figures``.
"""

import json
import shutil
import sys
from pathlib import Path

from xentflow.bench.tables import as_markdown

DOCS = Path(__file__).parent.parent / "docs"
NAMES = ("loss", "attention", "block")


def quoted(text, records):
    """The document with the tables of these records."""
    for name in NAMES:
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = before + begin + "\n" + as_markdown(records[name]) + "\n" + end + after
    return text


def main(source):
    records = {}
    for name in NAMES:
        records[name] = json.loads((Path(source) / name / "result.json").read_text())
        shutil.copy(Path(source) / name / f"{name}.svg", DOCS / "figures" / f"bench-{name}.svg")
    (DOCS / "performance.json").write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    page = DOCS / "performance.md"
    page.write_text(quoted(page.read_text(), records))


if __name__ == "__main__":
    main(sys.argv[1])
