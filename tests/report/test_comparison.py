"""The comparison's tables, from records that are written down here."""

import json
import statistics
from pathlib import Path

import pytest
from scipy import stats
from torch.testing import assert_close

from xentflow.report.comparison import as_markdown, difference

FIRST, SECOND = [0.91, 0.92, 0.915], [0.90, 0.905, 0.89]


def run(task="fashion-mnist", network="derived", accuracy=0.9, loss=0.3, depth=None, rate=0.002):
    return {
        "settings": {"task": task, "network": network, "learning_rate": rate},
        "result": {
            "parameters": 1234,
            "steps": 10,
            "training": {"loss": loss, "accuracy": accuracy},
            "validation": {"loss": loss, "accuracy": accuracy},
            "test": {"accuracy": accuracy, "loss": loss},
            "depth": depth,
        },
    }


def records():
    depth = {
        "readout": [{"cosine": 0.25, "control_deviation": 0.01, "change_of_energy": -0.5, "descending": 0.75}],
        "readout_energy_at_start": 2.0,
        "own_energy": [[3.0, 2.5]],
        "own_cosine": [0.9876],
    }
    runs = {"tuning derived 0.002": run()}
    for seed, (first, second) in enumerate(zip(FIRST, SECOND, strict=True)):
        runs[f"derived seed {seed}"] = run(accuracy=first, depth=depth)
        runs[f"transformer seed {seed}"] = run(network="transformer", accuracy=second, depth={**depth})
    runs["shuffled derived seed 0"] = run(accuracy=0.101)
    runs["paper two-stage seed 0"] = run(accuracy=0.8642)
    runs["recall derived seed 0"] = run("recall", accuracy=0.995)
    runs["text derived seed 0"], runs["text transformer seed 0"] = run("text", loss=1.02), run("text", loss=1.0)
    for seed, accuracy in enumerate([0.90, 0.92]):
        runs[f"short derived seed {seed}"] = run(accuracy=accuracy)
        runs[f"short transformer seed {seed}"] = run(network="transformer", accuracy=accuracy - 0.2)
    runs["ablation Lie–Trotter seed 0"] = run(accuracy=0.9)
    of = {"compiled": True}
    timing = {"seconds": {"derived": 0.002, "transformer": 0.001}, "of": of}
    config = {
        "task": "fashion-mnist",
        "device": "cuda",
        "size": "small",
        "patch": 4,
        "batch": 128,
        "shift": 2,
        "budget": 20.0,
    }
    return {"config": config, "timing": timing, "runs": runs}


def test_the_interval_is_welchs():
    mean, low, high = difference(FIRST, SECOND)
    assert_close(mean, statistics.fmean(FIRST) - statistics.fmean(SECOND))
    # Written out: standard error and degrees of freedom of two samples of unlike variance.
    a, b = statistics.variance(FIRST) / 3, statistics.variance(SECOND) / 3
    freedom = (a + b) ** 2 / (a**2 / 2 + b**2 / 2)
    half = stats.t.ppf(0.975, freedom) * (a + b) ** 0.5
    assert_close((low, high), (mean - half, mean + half))


def test_every_record_is_in_its_table():
    text = as_markdown(records())
    mean, low, high = difference(FIRST, SECOND)
    assert "10,000 and 20,000 steps" in text
    assert f"{statistics.fmean(FIRST):.4f} ± {statistics.stdev(FIRST):.4f}" in text
    assert f"accuracy {mean:+.4f} ({low:+.4f} to {high:+.4f}, which excludes zero); test loss +0.0000 (" in text
    assert "a loss of 2.3026" in text
    assert "| derived | 1 | 0.3000 | 0.1010 |" in text
    assert "| derived | 1,234 | 10 | 0.9950 |" in text
    assert "Derived over transformer: +2.00%" in text
    assert "a quarter of it" in text
    assert "accuracy +0.2000 (" in text
    assert "10 steps at one learning rate" in text
    assert f"| nothing | 2 | 1,234 | 0.9100 ± {statistics.stdev([0.90, 0.92]):.4f} |  |" in text
    assert "| Lie–Trotter | 1 | 1,234 | 0.9000 | -0.0100 |" in text
    assert "| two-stage | 1 | 1,234 | 0.3000 | 0.8642 |" in text
    assert "| 1 | mix | 3.0000 | 2.5000 | 0.9876 |" in text
    assert "| 1 | 1.5000 | -0.5000 | 75% | +0.2500 | 0.0100 |" in text


def test_an_interval_around_zero_is_said_to_include_it():
    found = records()
    for seed in range(3):
        found["runs"][f"transformer seed {seed}"]["result"]["test"]["accuracy"] = [0.93, 0.90, 0.915][seed]
    assert "which includes zero); test loss" in as_markdown(found)


def test_records_of_settings_that_have_changed_are_left_out():
    found = records()
    for seed in range(2, 4):
        found["runs"][f"transformer seed {seed}"] = run(network="transformer", accuracy=seed / 10, rate=0.001)
    assert "| transformer | 1,234 | 10 | 0.001 | 0.3000 ± 0.0000 | 0.3000 ± 0.0000 | 0.2500" in as_markdown(found)


def test_images_that_were_not_moved_are_said_to_be_as_they_are():
    found = records()
    found["config"]["shift"] = 0
    assert "training images as they are" in as_markdown(found)


def test_records_of_nothing_make_no_table():
    assert as_markdown({"config": {}, "runs": {}}) == "Nothing has been measured yet.\n"


@pytest.mark.parametrize("name", ["small", "tiny"])
def test_the_tables_in_the_document_are_of_the_records_beside_it(name):
    docs = Path(__file__).parents[2] / "docs"
    _, _, rest = (docs / "label-free.md").read_text().partition(f"<!-- tables {name}: begin -->\n")
    tables, end, _ = rest.partition(f"<!-- tables {name}: end -->")
    kept = json.loads((docs / f"label-free-{name}.json").read_text())
    assert end
    assert len(kept["runs"]) > 20
    assert tables.strip() == as_markdown(kept).strip()
