"""Records made by hand: numbers that no run would give, so that a report cannot have computed them."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

from xentflow.report import read

CONTROLS = {
    "true labels": ("True labels (the paper)", True, False),
    "shuffled labels": ("Shuffled labels", False, True),
    "own prediction": ("Own prediction", False, False),
    "uniform": ("Uniform", False, False),
    "nearest neighbours": ("Nearest neighbours", False, True),
    "certified step": ("Certified step", True, False),
}
TABLE_1 = {
    "clean": [0.8424, 0.9788, 0.9963, 0.9992, 0.9998, 0.9999],
    "noisy": [0.8139, 0.9835, 0.9978, 0.9999, 1.0, 1.0],
}


def _cell(number, several):
    return {"mean": [0.01 * number + 0.1 * step for step in range(6)], "sd": [0.0011 * number] * 6 if several else None}


def make_record(seeds):
    several, summary, number = len(seeds) > 1, {}, 0
    for name, (_, _, named) in CONTROLS.items():
        for start in ("clean", "noisy"):
            for quantity in ("accuracy", *(["agreement"] if named else []), "energy", "energy_to_labels"):
                number += 1
                summary.setdefault(name, {}).setdefault(start, {})[quantity] = _cell(number % 40 + 1, several)
    each = {"certified_step": 0.125, "neighbours_right": {"clean": 0.8111, "noisy": 0.7222}}
    return {
        "command": "reproduce",
        "config": {"seeds": len(seeds), "sample": None},
        "labels_used": "labels went <there>",
        "versions": {"torch": "9.9"},
        "seeds": seeds,
        "class_names": ["Shirt & tie", "Bag"],
        "image_shape": [4, 4],
        "paper_row": "true labels",
        "neighbours_tried_on": 77,
        "controls": {n: {"title": t, "sees": f"what {n} sees", "uses_labels": u} for n, (t, u, _) in CONTROLS.items()},
        "paper": {
            "table_1": TABLE_1,
            "differences": {"clean": [0.0123, -0.0045, -0.00001, 0, 0, 0], "noisy": [0.0] * 6},
            "rmse_of_mean": 0.00147,
            "largest_difference_of_mean": 0.0123,
            "rmse_of_each_seed": [0.0011, 0.0029][: len(seeds)],
        },
        "summary": summary,
        "sample": {
            "image": 4321,
            "rule": "the clearest correction",
            "label": "Shirt & tie",
            "predicted": ["Bag", "Bag", *["Shirt & tie"] * 5],
            "probability": [0.91, 0.82, 0.53, 0.64, 0.75, 0.86, 0.97],
        },
        "per_seed": [copy.deepcopy(each) | {"largest_gap_of_logit_iteration": 3e-7} for _ in seeds],
    }


def write_records(folder, record):
    generator = torch.Generator().manual_seed(0)
    path = torch.randn(6, 16, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"sample.original": path[0].clamp(-1, 1), "sample.path": path}, folder / "weights.safetensors")
    (folder / "result.json").write_text(json.dumps(record))
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return write_records(tmp_path_factory.mktemp("report"), make_record([3, 4]))


@pytest.fixture(scope="session")
def result(folder):
    return read(folder)
