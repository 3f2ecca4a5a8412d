import io
import json
import re

import pytest
from rich.console import Console

from conftest import make_record, write_records
from xentflow import XentflowError
from xentflow.report import as_markdown, print_tables, read
from xentflow.report.tables import tables


def rows(markdown):
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines() if line[:1] == "|"]
    return {name: values for name, *values in cells}


def test_every_number_is_the_records(result):
    shown = rows(as_markdown(result))
    summary = result.record["summary"]

    def cells(control, start, quantity, digits):
        entry = summary[control][start][quantity]
        return [f"{m:.{digits}f} ± {s:.{digits}f}" for m, s in zip(entry["mean"], entry["sd"], strict=True)]

    for start in ("clean", "noisy"):
        assert shown[f"{start}, ours"] == cells("true labels", start, "accuracy", 4)
        assert shown[f"{start}, paper"] == [f"{cell:.4f}" for cell in result.record["paper"]["table_1"][start]]
        for name, control in result.record["controls"].items():
            title = control["title"]
            assert shown[f"{title}: {start}"] == cells(name, start, "energy", 3)
            if name != "true labels":
                assert shown[f"{title}: {start}, with the true labels"] == cells(name, start, "accuracy", 4)
            if name in ("shuffled labels", "nearest neighbours"):
                assert shown[f"{title}: {start}, with C"] == cells(name, start, "agreement", 4)
    assert shown["clean, difference"] == ["+0.0123", "−0.0045", "0.0000", "0.0000", "0.0000", "0.0000"]


def test_it_says_how_near_and_where_labels_entered(result):
    text = as_markdown(result)
    assert "RMSE of the mean to the paper's cells 0.0015, furthest cell 0.0123; single seeds 0.0011 to 0.0029." in text
    assert "Where labels entered: labels went <there>" in text
    assert "2 seeds (3 to 4)" in text
    assert "77 images a seed" in text
    assert "0.8111 of the clean and 0.7222 of the noisy" in text
    assert "The certified step is 0.125" in text


def test_one_seed_has_no_deviation(tmp_path):
    text = as_markdown(read(write_records(tmp_path, make_record([7]))))
    assert "±" not in text
    assert "one seed (7)" in text
    assert "RMSE of this seed to the paper's cells 0.0015, furthest cell 0.0123." in text


def test_another_dataset_is_not_compared_with_the_paper(tmp_path):
    text = as_markdown(read(write_records(tmp_path, make_record([7]) | {"paper": None})))
    assert ", paper" not in text
    assert ", difference" not in text
    assert "RMSE" not in text
    assert "| clean, ours |" in text


def test_more_passes_than_the_papers_leave_its_row_open(tmp_path):
    record = make_record([7])
    for starts in record["summary"].values():
        for quantities in starts.values():
            for entry in quantities.values():
                entry["mean"] += [0.5]
    shown = rows(as_markdown(read(write_records(tmp_path, record))))
    assert shown["clean, paper"][-1] == "–"
    assert shown["clean, difference"][-1] == "–"
    assert shown["pass"] == [str(number) for number in range(7)]


@pytest.mark.parametrize("width", [80, 110])
def test_the_terminal_shows_every_cell(result, width):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_tables(result, console)
    text = console.file.getvalue()
    assert "…" not in text
    flat = re.sub(r"\s+", " ", text)
    for table in tables(result):
        for row in table.rows:
            for cell in row[1:]:
                assert cell.partition(" ± ")[0] in flat
    assert "Where labels entered: labels went <there>" in flat


def test_what_is_no_record_is_refused(tmp_path):
    with pytest.raises(XentflowError, match=r"expected the records of xentflow reproduce, got .*No such file"):
        read(tmp_path)
    folder = write_records(tmp_path, make_record([1]))
    (folder / "result.json").write_text(json.dumps({"command": "verify"}))
    with pytest.raises(XentflowError, match="expected a record of xentflow reproduce, got another's"):
        read(folder)
    write_records(tmp_path, make_record([1]))
    (folder / "weights.safetensors").write_bytes(b"short")
    with pytest.raises(XentflowError, match="expected the records of xentflow reproduce, got"):
        read(folder)
