"""The comparison: what is run and in which order, equal parameters and time, and nothing done twice."""

import io
import json
import time
from dataclasses import replace

import pytest
from rich.console import Console

from training import config, write_both_splits
from xentflow.errors import XentflowError
from xentflow.experiments import compare, stepping
from xentflow.experiments.compare import RATES, Pool, Run, finished, planned, read

SECONDS = {"derived": 0.02, "transformer": 0.01}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_both_splits(tmp_path_factory.mktemp("both"))


@pytest.fixture
def settings(folder):
    return config(folder, network="derived", compare=True, budget=2.0, seeds=2, ablation_seeds=1)


def fresh():
    return {"runs": {}, "timing": {"seconds": SECONDS}}


def done(run, loss=1.0):
    result = {"validation": {"loss": loss, "accuracy": 0.5}, "test": {"loss": 1.0, "accuracy": 0.5}}
    return {"settings": json.loads(json.dumps(run.settings)), "result": result}


def test_learning_rates_come_first_and_the_best_is_taken_for_each_network(settings):
    records = fresh()
    tuning = planned(settings, records)
    assert [(run.config.network, run.config.learning_rate) for run in tuning] == [
        (network, rate) for network in ("derived", "transformer") for rate in RATES
    ]
    assert {run.config.seed for run in tuning} == {1000}
    best = {"derived": RATES[3], "transformer": RATES[1]}
    for run in tuning:
        loss = 0.5 if run.config.learning_rate == best[run.config.network] else 1.0
        records["runs"][run.name] = done(run, loss)
    judged = planned(settings, records)[len(tuning) : len(tuning) + 4]
    assert [run.name for run in judged] == [
        "derived seed 0", "transformer seed 0", "derived seed 1", "transformer seed 1",
    ]  # fmt: skip
    assert [run.config.learning_rate for run in judged] == [RATES[3], RATES[1]] * 2


def test_both_get_the_same_time_and_so_the_slower_fewer_steps(settings):
    records = fresh()
    for run in planned(settings, records):
        records["runs"][run.name] = done(run)
    by_name = {run.name: run.config for run in planned(settings, records)}
    assert by_name["derived seed 0"].steps == 100
    assert by_name["transformer seed 0"].steps == 200
    assert by_name["short derived seed 1"].steps == 25
    assert by_name["short transformer seed 1"].steps == 50
    assert by_name["shuffled derived seed 0"].shuffle_labels
    ablations = [by_name[name] for name in by_name if name.startswith("ablation")]
    assert len(ablations) == len(compare.ABLATIONS)
    assert {run.steps for run in ablations} == {25}
    assert by_name["paper two-stage seed 0"].optimisation == "two-stage"
    assert by_name["ablation both roles, as printed seed 0"].printed
    assert by_name["ablation both roles, as printed seed 0"].roles == "both"


def test_a_record_counts_only_with_the_settings_it_was_made_with(settings):
    records = fresh()
    run = planned(settings, records)[0]
    records["runs"][run.name] = done(run)
    assert finished(run, records) is not None
    assert finished(Run(run.name, replace(run.config, steps=7)), records) is None
    # How many run at once, or where the data lies, is nothing to a run.
    assert finished(Run(run.name, replace(run.config, workers=9, minutes=1.0, data_dir="/elsewhere")), records)


def test_the_pool_runs_what_is_open_records_it_and_does_not_repeat_it(folder, tmp_path, monkeypatch):
    base = config(folder, steps=2, save_every=2)
    runs = [Run("one", base), Run("two", replace(base, learning_rate=1e-3)), Run("bad", replace(base, patch=3))]
    monkeypatch.setattr(compare, "planned", lambda *_: runs)
    said = io.StringIO()
    records = {"runs": {"one": done(runs[0])}}
    pool = Pool(replace(base, workers=2), tmp_path, Console(file=said, width=500), records, time.monotonic() + 120)
    with pytest.raises(XentflowError, match=r"failures of.*bad"):
        pool.work()
    assert "patch: expected a side that divides 8" in " ".join(said.getvalue().split())
    kept = read(tmp_path)["runs"]
    assert sorted(kept) == ["one", "two"]
    assert kept["two"]["result"]["steps"] == 2
    assert not (tmp_path / "runs/one").exists()


def test_no_run_is_started_after_the_time_is_up(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "planned", lambda *_: [Run("one", config(folder))])
    Pool(config(folder), tmp_path, Console(file=io.StringIO()), {"runs": {}}, time.monotonic()).work()
    assert not (tmp_path / "runs").exists()


def test_times_of_steps_are_taken_for_every_network(folder):
    networks = {name: config(folder, network=name) for name in ("paper", "transformer")}
    seconds = stepping.seconds_per_step(networks, rounds=2, steps=3)
    assert set(seconds) == set(networks)
    assert all(taken > 0 for taken in seconds.values())


def test_records_that_are_none_are_refused(tmp_path):
    assert read(tmp_path) == {"runs": {}}
    for content in ("{", "[]", '{"runs": 3}'):
        (tmp_path / "records.json").write_text(content)
        with pytest.raises(XentflowError, match="expected the records"):
            read(tmp_path)
