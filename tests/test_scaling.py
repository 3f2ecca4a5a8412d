"""docs/scaling.md shows what tools/scaling.py makes of its record, and its formula is what it says."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def _tool():
    spec = importlib.util.spec_from_file_location("scaling_tool", ROOT / "tools/scaling.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool():
    return _tool()


@pytest.fixture(scope="module")
def record():
    return json.loads((ROOT / "docs/scaling.json").read_text())


def test_the_document_shows_the_tables_of_its_record(tool, record):
    text = (ROOT / "docs/scaling.md").read_text()
    assert tool.quoted(text, record) == text
    assert text.count("**Computed**") == 3


def test_the_record_is_of_the_network_it_names(record):
    import torch

    from xentflow.networks import SHAPES, DerivedTransformer, Inputs, count

    of = record["training"]
    with torch.device("meta"):
        network = DerivedTransformer(Inputs((28 // of["patch"]) ** 2, 10, patch=of["patch"] ** 2), SHAPES[of["size"]])
    assert count(network) == of["parameters"]
    assert len(network.stack.blocks) == of["layers"]


def test_messages_take_as_long_as_the_formula_says(tool):
    assumed = {
        "GPUs in a machine": 8,
        "bytes a second between GPUs": {"value": 100.0},
        "bytes a second between machines": {"value": 10.0},
        "seconds a message between GPUs": {"value": 0.5},
        "seconds a message between machines": {"value": 0.25},
    }
    assert tool.Machines(1, assumed).gather(800) == 0
    # 7/8 of 800 at 100 a second, and three rounds.
    assert tool.Machines(8, assumed).gather(800) == pytest.approx(7 + 1.5)
    # And 3/4 of the eighth that each port takes, at 10 a second, and two rounds more.
    assert tool.Machines(32, assumed).gather(800) == pytest.approx(7 + 1.5 + 7.5 + 0.5)
    assert tool.Machines(32, assumed).reduce(800) == pytest.approx(33)
