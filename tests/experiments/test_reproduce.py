import io
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from small import config

from xentflow import records
from xentflow.cli import main
from xentflow.experiments import paper
from xentflow.experiments import reproduce as module
from xentflow.experiments.controls import CONTROLS, PAPER
from xentflow.experiments.reproduce import against_paper, load, reproduce, summarise
from xentflow.training import recipe


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


@pytest.fixture(params=[0, 1], ids="seed {}".format)
def judged(request, finished, files):
    """One seed's weights and data, found again without the experiment's own code."""
    seed, settings = request.param, config(files)
    data, tensors = load(settings), load_file(finished / "weights.safetensors")
    begin = recipe.start(data, seed, settings.fitting)
    index = begin.validation_index
    clean = (data.images.flatten(1) / 255 - 0.5) / 0.5
    starts = {"clean": clean[index], "noisy": settings.fitting.corruption.apply(data.images, seed, 0, index)}
    memory = clean[begin.train_index], data.labels[begin.train_index]
    return seed, tensors[f"seed-{seed}.theta"], tensors[f"seed-{seed}.bias"], starts, data.labels[index], memory


def test_the_table_is_of_held_out_images_through_the_papers_block(record, judged):
    seed, theta, bias, starts, labels, _ = judged
    C = torch.nn.functional.one_hot(labels, 3).float()
    assert len(C) == 60
    for start, Z in starts.items():
        accuracy = []
        for _ in range(6):
            N = Z @ theta.T + bias
            accuracy.append((N.argmax(1) == labels).double().mean().item())
            Z = Z - N.softmax(1) @ theta + C @ theta
        assert record["per_seed"][seed]["runs"][PAPER][start]["accuracy"] == pytest.approx(accuracy)
        assert accuracy[-1] > accuracy[0]


def test_the_neighbours_are_training_images(record, judged):
    seed, _, _, starts, labels, (memory, known) = judged
    for start, Z in starts.items():
        nearest = torch.cdist(Z[:20], memory).topk(5, largest=False).indices
        votes = torch.nn.functional.one_hot(known[nearest], 3).sum(1)
        right = (votes.argmax(1) == labels[:20]).double().mean().item()
        assert record["per_seed"][seed]["neighbours_right"][start] == pytest.approx(right)


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
    (tmp_path / "seeds").mkdir()
    kept = [tmp_path / "seeds/.hidden.txt", tmp_path / ".notes.md.template"]
    for path in kept:
        path.write_bytes(b"not ours")
    killed = "import os, signal\nos.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)\n"
    path = tmp_path / "seeds/seed-0.safetensors"
    write = f"from xentflow.records import *\nwrite_whole(Path({str(path)!r}), b'half')"
    assert subprocess.run([sys.executable, "-c", killed + write], check=False).returncode == -signal.SIGKILL
    (leftover,) = set((tmp_path / "seeds").iterdir()) - set(kept)
    assert leftover.read_bytes() == b"half"
    again(config(files, quick=True), tmp_path)
    assert not leftover.exists()
    assert all(path.exists() for path in kept)


class TestExitStatus:
    """2 where something impossible is asked for, 1 where something goes wrong; one message, nothing half done."""

    @pytest.fixture
    def exits(self, files, tmp_path, capsys):
        def run(*arguments, data=files):
            given = ("--quick", "--epochs", "1", "--dataset", "files", "--data_dir", str(data))
            status = main(["reproduce", *given, "--output", str(tmp_path / "out"), *arguments])
            return status, capsys.readouterr().err

        return run

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--sample", "300"], "sample: expected an image held out of training, such as"),
            (["--neighbours", "241"], "neighbours: expected at most the 240 training images, got 241"),
            (["--epochs", "65536"], "epochs: expected an integer from 1 to 65535, got 65536"),
            (["--first_seed", str(2**63)], f"first_seed: expected seeds below 2**63, got {2**63} for the last"),
            (["--study"], "study: expected Fashion-MNIST, which the paper's cells are of, got files"),
            (["--seeds", "0"], "seeds: expected a positive whole number, got 0"),
        ],
        ids=lambda value: value[0].strip("-") if isinstance(value, list) else "",
    )
    def test_wrong_use_is_refused_before_anything_is_fitted(self, exits, tmp_path, monkeypatch, arguments, message):
        monkeypatch.setattr(module, "fit_fast", None)
        status, said = exits(*arguments)
        assert (status, message in said) == (2, True)
        assert not list(tmp_path.rglob("*.*"))

    def test_missing_data(self, exits, tmp_path):
        status, said = exits(data=tmp_path / "nowhere")
        assert (status, "nowhere: expected a file train-images-idx3-ubyte" in said) == (1, True)

    def test_corrupt_data(self, exits, files, tmp_path):
        copied = shutil.copytree(files, tmp_path / "copied")
        images = copied / "train-images-idx3-ubyte"
        images.write_bytes(images.read_bytes()[:-1])
        status, said = exits(data=copied)
        assert (status, f"{images}: expected" in said, "truncated" in said) == (1, True, True)

    def test_a_full_disk_keeps_the_seeds_that_were_finished(self, exits, tmp_path, monkeypatch):
        sync, written = os.fsync, []

        def full(file):
            if len(written) == 2:
                raise OSError(28, "No space left on device")
            written.append(sync(file))

        with monkeypatch.context() as patched:
            patched.setattr(records.os, "fsync", full)
            status, said = exits()
        assert (status, "No space left on device; nothing was changed" in said) == (1, True)
        names = {str(path.relative_to(tmp_path / "out")) for path in tmp_path.rglob("*") if path.is_file()}
        assert names == {"seeds/seed-0.safetensors", "weights.safetensors"}
        monkeypatch.setattr(module, "fit_fast", None)
        assert exits()[0] == 0

    def test_an_output_in_the_way(self, exits, tmp_path):
        (tmp_path / "out").write_text("a file")
        status, said = exits()
        assert (status, "expected a folder that can be written" in said) == (1, True)

    def test_ctrl_c(self, exits, monkeypatch):
        def interrupted(*arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr(module, "fit_fast", interrupted)
        status, said = exits()
        assert (status, "interrupted; every file in the output is whole" in said) == (130, True)
