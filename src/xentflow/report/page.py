"""``report.html``: tables and figures in one file that needs nothing else, in light and dark, wide and narrow."""

import base64
from html import escape

from xentflow.report.figures import Drawing
from xentflow.report.reading import Result
from xentflow.report.tables import MAIN, Table, heading, labels_sentence, tables, verdict

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --faint: #d4d4d4; --quiet: #555; --tint: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --paper: #16181c; --faint: #3c4046; --quiet: #a8adb4; --tint: #1f2227; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 64rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; line-height: 1.3; }
.scroll { overflow-x: auto; border: 1px solid var(--faint); border-radius: .4rem; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .88rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--faint); }
tbody tr:last-child > * { border-bottom: 0; }
tbody th { text-align: left; font-weight: 500; position: sticky; left: 0; background: var(--paper); }
thead th { background: var(--tint); }
thead th:first-child { text-align: left; position: sticky; left: 0; }
td small { display: block; color: var(--quiet); font-weight: 400; line-height: 1.2; }
tr.ours > * { font-weight: 650; }
p.caption, figcaption { color: var(--quiet); font-size: .92rem; margin: .5rem 0 0; max-width: 46rem; }
p.sentence { border-left: .25rem solid #0072B2; padding-left: .8rem; max-width: 46rem; }
figure { margin: 0; }
figure img { display: block; width: 100%; min-width: 40rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .92rem; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  body { padding: 1rem .75rem 3rem; } h1 { font-size: 1.3rem; }
  th, td { padding: .25rem .4rem; } table { font-size: .8rem; }
  tbody th { white-space: normal; min-width: 7.5rem; }
  .hint { display: block; }
}
@media (min-width: 40.01rem) { .hint { display: none; } }
.hint { color: var(--quiet); font-size: .8rem; margin: .25rem 0 0; }
"""

_HINT = '<p class="hint">Swipe sideways to see all of it.</p>'


def as_html(result: Result, figure: Drawing, energy: Drawing) -> str:
    """The page."""
    sample = result.record["sample"]
    main, *others = tables(result)
    caption = (
        f"Figure 1, our sample: image {sample['image']}, {sample['rule']}. Below the images: the predicted class with "
        "its probability. Second line: the difference to Z⁽⁰⁾, each with its own scale. It shows one image chosen for "
        "its correction; how often images are corrected, and towards what, is in the tables."
    )
    energy_caption = (
        "From the noisy images, mean over the seeds. It shows what the passes do to the energy of the targets the "
        "block was given (left) and to that of the true labels (right). Where the left falls and the right rises, the "
        "block follows its targets away from the truth. It says nothing of images whose labels nobody knows."
    )
    sections = [
        _section(main),
        *(f'<p class="sentence">{escape(text)}</p>' for text in (verdict(result), labels_sentence(result)) if text),
        *map(_section, others[:1]),
        f"<h2>One image on its way</h2>{_figure(figure, caption, 'figure1')}",
        f"<h2>Energy per pass</h2>{_figure(energy, energy_caption, 'energy')}",
        *map(_section, others[1:]),
        f"<h2>How it was made</h2>{_facts(result)}",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(heading(result))}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(heading(result))}</h1>\n" + "\n".join(sections) + "\n</body>\n</html>\n"
    )


def _section(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.heading)
    rows = "".join(
        f"<tr{' class=ours' if table.title == MAIN and name.endswith('ours') else ''}>"
        f'<th scope="row">{escape(name)}</th>{"".join(map(_cell, cells))}</tr>\n'
        for name, *cells in table.rows
    )
    # The caption is read with the table and drawn below it, outside of what scrolls.
    return (
        f'<h2>{escape(table.title)}</h2>\n<div class="scroll" tabindex="0"><table aria-label="{escape(table.title)}">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n{_HINT}\n"
        f'<p class="caption">{escape(table.caption)}</p>'
    )


def _cell(text: str) -> str:
    mean, sign, deviation = escape(text).partition(" ± ")
    return f"<td>{mean}<small> ± {deviation}</small></td>" if sign else f"<td>{mean}</td>"


def _figure(drawing: Drawing, caption: str, name: str) -> str:
    return (
        f'<figure id="{name}"><div class="scroll" tabindex="0"><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="{_uri(drawing.dark_svg)}">'
        f'<img src="{_uri(drawing.svg)}" alt="{escape(drawing.text)}"></picture></div>{_HINT}'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _uri(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def _facts(result: Result) -> str:
    record = result.record
    settings = ", ".join(f"{name} {value}" for name, value in record["config"].items() if value is not None)
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
    sees = "; ".join(f"{control['title']}: {control['sees']}" for control in record["controls"].values())
    facts = {"Targets": sees, "Seeds": ", ".join(map(str, record["seeds"])), "Settings": settings, "Versions": versions}
    facts["Check"] = (
        "the controls iterate logits instead of images; on the paper's row both were run, and logits differed by at "
        f"most {max(one['largest_gap_of_logit_iteration'] for one in record['per_seed']):.0e} of the largest"
    )
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()) + "</dl>"
