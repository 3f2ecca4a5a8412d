import io
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from PIL import Image

from xentflow.report.figures import DARK, LIGHT, _energy, _figure1, energy, figure1


def test_figure_1_shows_original_noisy_and_every_pass(result):
    figure = _figure1(result, LIGHT)
    images = [axis for axis in figure.axes if axis.images and axis.get_title()]
    first = [axis for axis in images if "−" not in axis.get_title()]
    second = [axis for axis in images if "−" in axis.get_title()]
    assert [axis.get_title() for axis in first] == ["X", *(f"Z$^{{({n})}}$" for n in range(6))]
    assert len(second) == 5
    path = result.tensors["sample.path"].reshape(6, 4, 4).numpy()
    for number, axis in enumerate(second, start=1):
        assert (axis.images[0].get_array() == path[number] - path[0]).all()
    labels = [axis.get_xlabel() for axis in first]
    assert labels[0] == "Bag\n0.91 ✗"
    assert labels[-1] == "Shirt & tie\n0.97 ✓"


def test_every_difference_has_a_colour_bar_of_its_own(result):
    figure = _figure1(result, LIGHT)
    limits = {axis.images[0].get_clim() for axis in figure.axes if axis.images and "−" in axis.get_title()}
    assert len(limits) == 5
    assert all(low == -high for low, high in limits)


def test_the_energies_are_the_records_with_labelled_axes(result):
    figure = _energy(result, DARK)
    assert [axis.get_xlabel() for axis in figure.axes] == ["pass", "pass"]
    assert "log scale" in figure.axes[0].get_ylabel()
    for axis, quantity in zip(figure.axes, ("energy", "energy_to_labels"), strict=True):
        assert len(axis.lines) == 6
        for line, starts in zip(axis.lines, result.record["summary"].values(), strict=True):
            assert list(line.get_ydata()) == starts["noisy"][quantity]["mean"]
        looks = {(line.get_color(), line.get_marker()) for line in axis.lines}
        assert len(looks) == 6


@pytest.fixture(scope="module")
def drawings(result):
    return figure1(result), energy(result)


def test_files_open_and_are_the_same_each_time(result, drawings):
    assert drawings[0] == figure1(result)
    for drawing in drawings:
        with Image.open(io.BytesIO(drawing.png)) as image:
            assert image.format == "PNG"
            assert image.width >= 1400
        for svg in (drawing.svg, drawing.dark_svg):
            assert ET.fromstring(svg).tag.endswith("svg")
        assert drawing.svg != drawing.dark_svg


def test_the_words_for_those_who_do_not_see_it(drawings):
    assert "the noisy image: Bag 0.82" in drawings[0].text
    assert "pass 5: Shirt & tie 0.97" in drawings[0].text
    assert "Shuffled labels: " in drawings[1].text


def test_matplotlib_is_imported_only_to_draw():
    code = "import sys, xentflow.report, xentflow.experiments.reproduce; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
