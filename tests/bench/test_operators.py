"""Benchmarks of operators: arithmetic on records that are written down here, and each command once on small sizes."""

import json
import math
import re
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from xentflow import XentflowError
from xentflow.bench import BenchConfig, attention, block, loss, measure, run
from xentflow.bench.measure import Comparison, Growth, Peak, Report, alone, floor, slope
from xentflow.bench.tables import as_markdown, notes, tables

ROOT = Path(__file__).parent.parent.parent
RATES = {"matmul, GFLOP/s": 100.0, "convolution, GFLOP/s": 200.0, "copy, GiB/s": 10.0}


def report():
    ways = {"xentflow": [0.2, 0.1, 0.4], "eager": [0.5, 0.3, 0.4]}
    compared = [Comparison("a loss", "xentflow", ways, gflop=10.0, mib=100.0)]
    growths = [Growth("a loss", "S", [1, 2, 4], [1.0, 2.0, 4.0], [1.0, 4.0, 16.0], 5, 3)]
    return Report(RATES, compared, [Peak("a loss alone", 12.3, 0.456)], growths)


def test_exponents_are_slopes_of_logarithms():
    assert slope([1, 10, 100], [5, 50 * 10**0.5, 5000]) == pytest.approx(1.5)
    assert report().growths[0].exponents == pytest.approx((1.0, 2.0))


def test_the_floor_is_the_products_or_the_bytes_whichever_take_longer():
    compared = report().comparisons[0]
    assert floor(compared, RATES) == pytest.approx(10 / 200)
    assert floor(compared, {**RATES, "copy, GiB/s": 1.0}) == pytest.approx(100 / 1024)


def test_tables_hold_what_was_measured():
    record = json.loads(json.dumps(report().figures()))
    (_, _, ways), (_, _, peaks), (_, _, growths) = tables(record)
    assert ways == [
        ("xentflow", "100.0", "200.0", "1.00", "1.00"),
        ("eager", "300.0", "400.0", "3.00", "2.00"),
        ("floor", "50.0", "", "", ""),
    ]
    assert peaks == [("a loss alone", "12", "0.46")]
    assert growths == [("a loss", "S", "1, 2, 4", "1.00", "2.00")]
    assert list(tables(record))[2][0].endswith("the fastest of 5 turns of 3 calls each")
    # As records were before calls were counted.
    del record["growths"][0]["calls"]
    assert list(tables(record))[2][0].endswith("the fastest of 5 turns")
    assert "50% of the floor's speed" in notes(record)[1]
    text = as_markdown(record)
    assert "| eager | 300.0 | 400.0 | 3.00 | 2.00 |" in text


def test_a_process_of_its_own_counts_what_is_beyond_inputs_and_outputs():
    shape = {"S": 2048, "F": 16, "K": 16384}
    logits = 4 * 2048 * 16384 / 2**20
    assert alone("eager", "loss", "eager", 1, **shape).mib > logits
    assert alone("ours", "loss", "xentflow", 1, **shape).mib < logits / 2


def test_a_process_that_fails_is_said():
    with pytest.raises(XentflowError, match=r"bench: nothing ended with status 1: KeyError"):
        alone("nothing", "loss", "no such case", 1)


@pytest.mark.parametrize("rounds", [2, 7])
def test_sizes_take_turns_at_least_five_times_with_as_many_calls_each(rounds, monkeypatch):
    called = []
    monkeypatch.setattr(measure, "alone", lambda title, *_, **shape: Peak(title, float(shape["S"]), 0.1))
    # However much longer a call of the larger takes.
    clock = count()
    times = SimpleNamespace(perf_counter=lambda: 1e-3 * next(clock) * (called[-1][0] if called else 1) ** 9)
    monkeypatch.setattr(measure, "time", times)
    monkeypatch.setitem(loss.CASES, "counted", lambda S, F: lambda: called.append((S, F)))
    found = measure.growth("counted", "S", "loss", "counted", (1, 2), BenchConfig("loss", rounds=rounds), F=3)
    turns = max(rounds, 5)
    a_turn = [(1, 3)] * measure.CALLS + [(2, 3)] * measure.CALLS
    assert called == [(1, 3), (2, 3)] + a_turn * turns
    assert (found.turns, found.calls, found.sizes) == (turns, measure.CALLS, [1, 2])
    assert (found.mib, len(found.seconds)) == ([1.0, 2.0], 2)


def small(monkeypatch):
    monkeypatch.setattr(attention, "SHAPE", {"S": 96, "F": 8})
    monkeypatch.setattr(attention, "GROWTH", {"S": (32, 64), "F": (8, 16)})
    monkeypatch.setattr(loss, "LARGE", {"S": 48, "F": 8, "K": 64})
    monkeypatch.setattr(loss, "FEW_CLASSES", {"S": 64, "F": 8, "K": 4})
    monkeypatch.setattr(loss, "CHUNKS", (16, 32))
    monkeypatch.setattr(block, "SHAPE", {"S": 96, "F": 8})
    # A compiler and fresh processes are measured in earnest only.
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(measure, "rates", lambda: RATES)
    for module in (attention, loss, block):
        monkeypatch.setattr(module, "rates", lambda: RATES)
        monkeypatch.setattr(module, "alone", lambda title, *_, **shape: Peak(title, 1.0, 0.1))
        monkeypatch.setattr(
            module,
            "growth",
            lambda title, over, module, case, sizes, settings, **fixed: Growth(
                title, over, list(sizes), [0.1] * len(sizes), [1.0] * len(sizes), 5
            ),
        )


@pytest.mark.parametrize("what", ["attention", "loss", "block"])
def test_the_command_compares_every_way_and_draws(what, tmp_path, monkeypatch):
    small(monkeypatch)
    assert run(BenchConfig(what, rounds=2, threads=1), tmp_path) == 0
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["command"] == f"bench {what}"
    for compared in record["comparisons"]:
        assert compared["ours"] in compared["seconds"]
        assert len(compared["seconds"]) >= 3
        assert {len(seconds) for seconds in compared["seconds"].values()} == {2}
        assert all(math.isfinite(one) and one > 0 for seconds in compared["seconds"].values() for one in seconds)
    assert (tmp_path / f"{what}.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / f"{what}.svg").read_bytes()


@pytest.mark.parametrize("module", [attention, loss, block])
def test_every_case_gives_finite_outputs(module):
    for name, build in module.CASES.items():
        depth = {"depth": 2} if name == "training" else {}
        keys = {"K": 12} if module is loss else {}
        outputs = build(S=16, F=8, **keys, **depth)()
        assert all(bool(output.isfinite().all()) for output in outputs)


def test_the_document_holds_the_tables_of_its_record():
    text = (ROOT / "docs/performance.md").read_text()
    records = json.loads((ROOT / "docs/performance.json").read_text())
    assert list(records) == ["loss", "attention", "block"]
    for name, record in records.items():
        found = re.search(f"<!-- {name}: begin -->\n\n(.*?)\n<!-- {name}: end -->", text, re.DOTALL)
        assert found[1] == as_markdown(record)
