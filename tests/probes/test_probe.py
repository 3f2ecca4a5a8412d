"""``xentflow probe``: the toy task tells apart what it should, and modules of one's own are read or refused."""

import json

import pytest

from xentflow.cli import main

SOURCE = """
import torch

def stacked():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    return layers, lambda Z: Z.square().sum((-2, -1)), torch.randn(5, 3, 4)

def misfit():
    return torch.nn.Linear(3, 4), lambda Z: Z.square().sum(), torch.randn(3, 4)

def a_bad_energy():
    return torch.nn.Linear(4, 4), lambda Z: Z @ torch.zeros(3, 3), torch.randn(3, 4)

def no_energy():
    return torch.nn.Linear(4, 4), "none", torch.randn(3, 4)

def a_number():
    return 3

def failing():
    raise KeyError("weights")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def probe(folder, *arguments):
    return main(["probe", *arguments, "--output", str(folder)])


def test_the_toy_task(tmp_path, capsys):
    """A few steps of training are enough to lift a transformer layer out of the control."""
    assert probe(tmp_path, "--seeds", "2", "--training_steps", "60") == 0
    printed = capsys.readouterr().out
    assert "labels enter" in printed
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["labels_used"].startswith("in the energy")
    assert len(record["readings"]) == 8
    for seed in range(2):
        planted, doubled, untrained, trained = record["readings"][4 * seed : 4 * seed + 4]
        for reading, name in zip(
            (planted, doubled, untrained, trained),
            ("derived block, h = 0.1", "derived block, energy doubled", "transformer layer, untrained",
             "transformer layer, trained"),
            strict=True,
        ):  # fmt: skip
            assert reading["name"] == f"{name}, seed {seed}"
            assert f"{reading['cosine']:+.4f}" in printed
            assert abs(reading["control_cosine"][0]) < reading["control_cosine"][1] < 0.01
        assert planted["cosine"] >= 1 - 1e-12
        assert doubled["cosine"] >= 1 - 1e-12
        assert planted["scale"] == pytest.approx(0.1, rel=1e-12)
        assert doubled["scale"] == pytest.approx(0.2, rel=1e-12)
        assert abs(untrained["cosine"]) < 0.1 < 0.3 < trained["cosine"]


def test_a_module_of_ones_own_is_read_whole_and_by_layer(file, tmp_path, capsys):
    assert probe(tmp_path, "--module", f"{file}:stacked", "--controls", "50") == 0
    readings = json.loads((tmp_path / "result.json").read_text())["readings"]
    assert [reading["name"] for reading in readings] == ["Sequential", "0", "1"]
    assert all(len(reading["energy_change"]) == 5 for reading in readings)
    assert readings[2]["cosine"] > 0.5  # tanh pulls towards the origin
    assert "control" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("misfit", "module: misfit() could not be measured: RuntimeError: mat1 and mat2"),
        ("a_bad_energy", "module: a_bad_energy() could not be measured: RuntimeError: mat1 and mat2"),
        ("no_energy", "energy: expected a GradientFlow or a callable of features, got str"),
        ("a_number", "expected a_number() to return (module, energy, Z), got int"),
        ("failing", "failed: KeyError: 'weights'"),
        ("missing", "failed: AttributeError"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(function, message, file, tmp_path, capsys):
    assert probe(tmp_path, "--module", f"{file}:{function}") == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--seeds", "0"], 2, "seeds: expected at least 1, got 0"),
        (["--controls", "1"], 2, "controls: expected at least 2, got 1"),
        (["--module", "mine.py"], 2, "module: expected FILE.py:FUNCTION, got 'mine.py'"),
        (["--module", "nowhere.py:f"], 1, "module: expected a Python file, got 'nowhere.py', which is none"),
    ],
)
def test_wrong_use(arguments, status, message, tmp_path, capsys):
    assert probe(tmp_path, *arguments) == status
    assert message in capsys.readouterr().err
