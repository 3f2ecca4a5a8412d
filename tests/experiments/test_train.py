"""``xentflow train``: records, refusals, and runs that are killed at any moment."""

import json
import multiprocessing
import os
import random
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from training import config, train, write_both_splits
from xentflow.cli import main
from xentflow.errors import XentflowError
from xentflow.experiments.train import TrainConfig, checkpoint_settings, make_network, make_task, run
from xentflow.networks import count


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_both_splits(tmp_path_factory.mktemp("both"))


def test_killed_at_ten_random_moments_a_run_ends_with_the_same_bits(folder, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(config(folder), whole)
    # A server that has imported everything forks the runs: ten starts cost little more than one.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["xentflow.experiments.train"])
    moments = random.Random(0)
    steps_seen = []
    for _ in range(10):
        process = context.Process(target=train, args=(folder, killed))
        process.start()
        before = _checkpoint(killed)
        # Into the run by a random number of milliseconds after its first checkpoint, or after it is over.
        while process.is_alive() and _checkpoint(killed) == before:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.05))
        os.kill(process.pid, signal.SIGKILL) if process.is_alive() else None
        process.join()
        steps_seen.append(_checkpoint(killed))
    assert len(set(steps_seen)) > 2
    run(config(folder), killed)
    assert (killed / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()
    logs = [[json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()] for path in (whole, killed)]
    for entry in [*logs[0], *logs[1]]:
        assert entry.pop("seconds") >= 0
    assert logs[0] == logs[1]
    assert [path.name for path in killed.rglob(".*")] == []


def _checkpoint(output):
    return max((path.stem for path in (output / "checkpoints").glob("step-*.safetensors")), default="")


def test_the_record_says_what_was_done_and_where_labels_entered(folder, tmp_path):
    assert run(config(folder, network="derived", steps=12), tmp_path) == 0
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["steps"] == 12
    assert record["uses_labels_at_inference"] is False
    assert "none at inference" in record["labels_used"]
    assert len(record["depth"]["own_energy"]) == 8
    assert min(record["depth"]["own_cosine"]) > 0.99
    weights = load_file(tmp_path / "weights.safetensors")
    assert sum(value.numel() for value in weights.values()) == record["parameters"]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 12]
    assert all(line["energy"] < 0 for line in lines)


def test_a_run_that_is_over_is_not_done_again_and_other_settings_start_afresh(folder, tmp_path, capsys):
    run(config(folder, steps=10), tmp_path)
    first = (tmp_path / "weights.safetensors").read_bytes()
    run(config(folder, steps=10), tmp_path)
    assert "going on from step 10" in capsys.readouterr().out
    assert (tmp_path / "weights.safetensors").read_bytes() == first
    run(config(folder, steps=10, seed=1), tmp_path)
    assert "other settings (seed)" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "weights.safetensors").read_bytes() != first


def test_both_networks_have_as_many_parameters_and_first_weights_of_the_seed_alone(folder):
    settings = config(folder, network="derived")
    task = make_task(settings)
    derived = make_network(settings, task)
    torch.manual_seed(5)
    again = make_network(settings, task)
    assert all(torch.equal(*pair) for pair in zip(derived.parameters(), again.parameters(), strict=True))
    baseline = make_network(config(folder, network="transformer"), task)
    assert abs(count(baseline) / count(derived) - 1) < 0.02


def test_sequences_and_text_go_through_the_command_line(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 60)
    few = ["--steps", "2", "--batch", "4"]
    of_text = ["--task", "text", "--text", str(text), "--tokens", "16"]
    assert main(["train", *of_text, *few, "--output", str(tmp_path / "a")]) == 0
    assert main(["train", "--task", "recall", "--network", "transformer", *few, "--output", str(tmp_path / "b")]) == 0
    assert json.loads((tmp_path / "b/result.json").read_text())["test"]["loss"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "text"}, "text: expected a file"),
        ({"task": "files"}, "data_dir"),
        ({"task": "recall", "roles": "both"}, "roles"),
        ({"task": "recall", "network": "paper"}, "network"),
        ({"optimisation": "two-stage"}, "two-stage"),
        ({"seed": -1}, "seed"),
        ({"keep": 0}, "keep"),
        ({"steps": 2.5}, "steps: expected a whole number"),
        ({"device": "gpu"}, "device: expected"),
        ({"budget": float("inf")}, "budget"),
        ({"compare": True, "task": "recall"}, "task: expected images"),
        ({"network": "transformer", "roles": "both"}, "roles: expected own with network=transformer"),
        ({"mixing_step": 0.0}, "mixing_step"),
        ({"network": "transformer", "mixing_step": 2.0}, "mixing_step"),
        ({"relative": True, "target": False}, "relative"),
        ({"network": "paper", "tied": True, "optimisation": "two-stage", "compiled": True}, "compiled"),
        ({"budget": 0.0}, "budget"),
        ({"seeds": 1}, "seeds"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(XentflowError, match=message):
        TrainConfig(**settings)


def test_other_data_is_another_run(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    settings = TrainConfig(task="text", text=str(text), tokens=4, steps=2, batch=4, network="transformer")
    for content in ("to be or not to be, " * 60, "that is the question " * 60):
        text.write_text(content)
        assert run(settings, tmp_path / "out") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "other settings (data)" in said
    assert "going on" not in said


def test_a_comparison_with_more_time_goes_on_from_the_checkpoints_it_has():
    assert checkpoint_settings(TrainConfig(minutes=1.0, workers=2)) == checkpoint_settings(TrainConfig())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said():
    with pytest.raises(XentflowError, match="torch sees no GPU"):
        make_task(TrainConfig(device="cuda"))


def test_a_text_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe" * 9)
    for path in (tmp_path / "none", tmp_path / "bytes"):
        with pytest.raises(XentflowError, match="text: expected a file of text"):
            make_task(TrainConfig(task="text", text=str(path)))


def test_tensorboard_without_its_package_says_what_to_install(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(XentflowError, match=r"xentflow\[log\]"):
        run(config(folder, steps=1, tensorboard=True), tmp_path)
