"""The page says what the records say: read as HTML, and as a browser shows it."""

import base64
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from xentflow.report import write
from xentflow.report.tables import tables

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(HTMLParser):
    """Tables as lists of rows of cells; images as (source, words)."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.images, self.sources, self.links = [], [], [], []
        self.text = ""
        self._cell = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self._cell = ""
        elif tag == "img":
            self.images.append((values["src"], values["alt"]))
        elif tag == "source":
            self.sources.append((values["media"], values["srcset"]))
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset")]

    def handle_data(self, data):
        self.text += data
        if self._cell is not None:
            self._cell += data

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.tables[-1][-1].append(self._cell.strip())
            self._cell = None


@pytest.fixture(scope="module")
def page_file(folder):
    write(folder)
    return folder / "report.html"


def expected(result):
    return [[list(table.heading), *map(list, table.rows)] for table in tables(result)]


def test_every_file_is_made(page_file):
    names = {path.name for path in page_file.parent.iterdir()}
    assert names >= {"table.md", "figure1.png", "figure1.svg", "energy.png", "report.html"}


def test_its_tables_are_those_of_the_records(page_file, result):
    page = Page(page_file.read_text())
    first, second, third = expected(result)
    assert page.tables == [first, second, third]


def test_it_needs_nothing_else(page_file):
    page = Page(page_file.read_text())
    assert page.links
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert "<script" not in page_file.read_text()
    assert "@import" not in page_file.read_text()
    assert "url(" not in page_file.read_text()


def test_its_figures_are_in_it_in_light_and_dark_and_in_words(page_file):
    page = Page(page_file.read_text())
    assert len(page.images) == len(page.sources) == 2
    assert base64.b64decode(page.images[0][0].partition(",")[2]) == (page_file.parent / "figure1.svg").read_bytes()
    assert {media for media, _ in page.sources} == {"(prefers-color-scheme: dark)"}
    assert "pass 5: Shirt & tie 0.97" in page.images[0][1]


def test_it_says_where_labels_entered_and_what_is_not_shown(page_file):
    text = Page(page_file.read_text()).text
    assert "Where labels entered: labels went <there>" in text
    assert "What it does not show" in text
    assert "torch 9.9" in text


SWITCHES = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync"""
"""What a browser does besides showing a page is switched off."""


def browse(page, profile, *arguments):
    """The document as the browser has it after laying it out; its profile is new."""
    command = [CHROMIUM, *SWITCHES.split(), f"--user-data-dir={profile}", *arguments, "--dump-dom", f"file://{page}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout


def laid_out(page, folder, width):
    """How wide the page becomes in a window of this width, told by a script in a copy of it to a page around it."""
    tell = "<script>onload = () => parent.postMessage(document.documentElement.scrollWidth, '*')</script></body>"
    (folder / "page.html").write_text(page.read_text().replace("</body>", tell))
    # Headless windows are at least 500 wide; a frame is not.
    frame = folder / "frame.html"
    frame.write_text(
        "<body><script>onmessage = (said) => { document.body.dataset.wide = said.data }</script>"
        f'<iframe src="page.html" style="width:{width}px;height:800px;border:0"></iframe></body>'
    )
    shown = browse(frame, folder / "profile", "--virtual-time-budget=3000")
    return int(re.search(r'data-wide="(\d+)"', shown).group(1))


def shown(page, folder, dark):
    """The page's colour and which figure it shows, to a reader who prefers dark or light."""
    tell = (
        "<script>onload = () => { document.body.dataset.paper = getComputedStyle(document.body).backgroundColor;"
        "document.body.dataset.figure = document.images[0].currentSrc }</script></body>"
    )
    (folder / "page.html").write_text(page.read_text().replace("</body>", tell))
    preference = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    text = browse(folder / "page.html", folder / "profile", preference, "--virtual-time-budget=3000")
    colour = re.search(r'data-paper="rgb\((\d+), (\d+), (\d+)\)"', text).groups()
    return tuple(map(int, colour)), re.search(r'data-figure="([^"]*)"', text).group(1)


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
class TestInABrowser:
    def test_the_tables_are_read_out_of_what_it_shows(self, page_file, result, tmp_path):
        page = Page(browse(page_file, tmp_path))
        assert page.tables == expected(result)

    def test_readers_in_the_dark_get_dark_paper_and_the_dark_figure(self, page_file, tmp_path):
        page = Page(page_file.read_text())
        assert shown(page_file, tmp_path, dark=False) == ((255, 255, 255), page.images[0][0])
        paper, figure = shown(page_file, tmp_path, dark=True)
        assert max(paper) < 40
        assert figure == page.sources[0][1]

    @pytest.mark.parametrize("width", [1200, 390], ids=["desktop", "phone"])
    def test_only_tables_and_figures_scroll_sideways(self, page_file, tmp_path, width):
        # A scroll bar takes up to 20.
        assert width - 20 <= laid_out(page_file, tmp_path, width) <= width
