import io
import json
import statistics

import pytest
from rich.console import Console
from safetensors.torch import load_file
from small import config

from xentflow import XentflowError
from xentflow.experiments import paper
from xentflow.experiments.controls import CONTROLS, PAPER
from xentflow.experiments.reproduce import against_paper, load, reproduce, summarise


def again(settings, output):
    printed = io.StringIO()
    reproduce(settings, output, load(settings), Console(file=printed, width=300))
    return printed.getvalue()


@pytest.fixture(scope="module")
def record(finished):
    return json.loads((finished / "result.json").read_text())


def test_the_record_says_what_was_run(record, files):
    assert record["command"] == "reproduce"
    assert record["config"]["seeds"] == 2
    assert record["config"]["data_dir"] == str(files)
    assert record["seeds"] == [0, 1]
    assert set(record["versions"]) >= {"torch", "numpy", "xentflow"}
    assert "given to the block as its targets C at every pass" in record["labels_used"]
    assert record["paper"] is None
    assert set(record["summary"]) == set(CONTROLS)


def test_the_summary_is_of_the_seeds(record):
    for name, start in ((PAPER, "clean"), ("shuffled labels", "noisy")):
        each = [one["runs"][name][start]["accuracy"] for one in record["per_seed"]]
        entry = record["summary"][name][start]["accuracy"]
        assert entry["mean"] == [statistics.fmean(column) for column in zip(*each, strict=True)]
        assert entry["sd"] == [statistics.stdev(column) for column in zip(*each, strict=True)]
        assert len(entry["mean"]) == 6


def test_the_whole_block_agrees_with_its_logits(record):
    assert all(one["largest_gap_of_logit_iteration"] < 1e-5 for one in record["per_seed"])


def test_weights_and_the_sample_are_kept(finished, record):
    tensors = load_file(finished / "weights.safetensors")
    parameters = {f"seed-{seed}.{name}" for seed in (0, 1) for name in ("theta", "bias")}
    assert set(tensors) == parameters | {"sample.original", "sample.path"}
    assert tensors["seed-1.theta"].shape == (3, 64)
    assert len(tensors["sample.path"]) == 6
    assert len(record["sample"]["predicted"]) == len(record["sample"]["probability"]) == 7


def test_the_distance_to_the_paper():
    exact = {start: {"accuracy": row} for start, row in paper.TABLE_1.items()}
    off = exact | {"clean": {"accuracy": [cell + 0.01 for cell in paper.TABLE_1["clean"]]}}
    records = [{"runs": {PAPER: off}}, {"runs": {PAPER: exact}}]
    compared = against_paper(records, summarise(records))
    assert compared["rmse_of_each_seed"] == pytest.approx([0.01 / 2**0.5, 0])
    assert compared["rmse_of_mean"] == pytest.approx(0.005 / 2**0.5)
    assert compared["largest_difference_of_mean"] == pytest.approx(0.005)


def test_a_finished_run_is_not_done_again_and_stays_the_same(finished, files):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    said = again(config(files), finished)
    assert "seed 0 taken from an earlier run" in said
    assert "seed 1 taken from an earlier run" in said
    assert before == {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}


def test_more_seeds_go_on_from_fewer(files, tmp_path, finished):
    again(config(files, quick=True), tmp_path)
    said = again(config(files), tmp_path)
    assert "seed 0 taken from an earlier run" in said
    assert "seed 1 done" in said
    assert (tmp_path / "result.json").read_bytes() == (finished / "result.json").read_bytes()


def test_other_settings_start_afresh_and_say_so(files, tmp_path):
    again(config(files, quick=True), tmp_path)
    said = again(config(files, quick=True, passes=2), tmp_path)
    assert "seed-0.safetensors was made with other settings (passes): starting that part afresh" in said
    assert "seed 0 done" in said


def test_a_record_that_is_broken_is_made_again(files, tmp_path):
    again(config(files, quick=True), tmp_path)
    path = tmp_path / "seeds/seed-0.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert "is no record that can be read" in again(config(files, quick=True), tmp_path)
    assert path.read_bytes() == whole


def test_what_a_killed_run_left_unfinished_is_removed(files, tmp_path):
    leftover = tmp_path / "seeds/.seed-0.safetensors.abcd_123"
    leftover.parent.mkdir()
    leftover.write_bytes(b"half")
    kept = tmp_path / "seeds/.hidden.txt"
    kept.write_bytes(b"not ours")
    again(config(files, quick=True), tmp_path)
    assert not leftover.exists()
    assert kept.exists()


def test_the_sample_asked_for_must_be_held_out(files, tmp_path):
    with pytest.raises(XentflowError, match="sample: expected an image held out of training, such as"):
        again(config(files, quick=True, sample=300), tmp_path)
