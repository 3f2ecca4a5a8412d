"""What a benchmark reports is what its clock said: the clock here is a list."""

import io
import json

import pytest
import torch
from rich.console import Console

from xentflow import XentflowError
from xentflow.bench import BenchConfig, Timing, interleaved, run, table, training
from xentflow.data import LabelledImages


def test_ways_take_turns():
    turns = []
    ways = {name: lambda name=name: turns.append(name) or float(len(turns)) for name in ("slow", "fast")}
    timings = interleaved(ways, 3)
    assert turns == ["slow", "fast"] * 3
    assert [timing.seconds for timing in timings] == [(1.0, 3.0, 5.0), (2.0, 4.0, 6.0)]
    assert [timing.fastest for timing in timings] == [1.0, 2.0]


def test_ratios_are_to_ours():
    ours = Timing("ours", (2.0, 4.0, 12.0))
    console = Console(file=io.StringIO(), width=120)
    console.print(table([Timing("theirs", (60.0, 20.0, 40.0)), ours], ours))
    rows = [line.split() for line in console.file.getvalue().splitlines()[1:]]
    assert rows == [["theirs", "20.000", "40.000", "10.0", "10.0"], ["ours", "2.000", "4.000", "1.0", "1.0"]]


def test_a_hundred_epochs_from_the_fastest_but_the_first(monkeypatch):
    # Epochs of 1, 5, 2 and 3 seconds: the first starts workers and compiles.
    clock = iter([10.0, 11.0, 16.0, 18.0, 21.0])
    monkeypatch.setattr(training.time, "perf_counter", lambda: next(clock))

    def fit(config, tick):
        for epoch in range(config.epochs):
            tick(epoch + 1, 0.0)

    assert training._epochs(4, fit)() == 200.0


def test_the_command_times_every_way_and_scikit_learn_to_the_same_objective(tmp_path, monkeypatch, generator):
    labels = torch.randint(3, (200,), generator=generator)
    images = (60 * labels[:, None, None] + torch.randint(60, (200, 4, 4), generator=generator)).to(torch.uint8)
    data = LabelledImages(images, labels, ("a", "b", "c"))
    monkeypatch.setattr(training, "load_fashion_mnist", lambda split, folder: data)
    threads = torch.get_num_threads()
    assert run(BenchConfig(rounds=2, threads=1), tmp_path) == 0
    assert torch.get_num_threads() == threads
    record = json.loads((tmp_path / "result.json").read_text())
    counts = {name: len(seconds) for name, seconds in record["seconds"].items()}
    assert list(counts.values()) == [2, 2, 2, 1]
    assert "160 images" in record["notes"][-1]
    assert "(reached)" in record["notes"][0]
    assert all(second > 0 for seconds in record["seconds"].values() for second in seconds)


@pytest.mark.parametrize(("name", "least"), [("rounds", 2), ("threads", 1)])
def test_too_few_are_refused(name, least):
    with pytest.raises(XentflowError, match=f"{name}: expected at least {least}, got {least - 1}"):
        BenchConfig(**{name: least - 1})
