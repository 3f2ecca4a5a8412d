import json

import pytest

from xentflow import XentflowError, records


def test_a_result_is_written_with_its_seed_versions_and_use_of_labels(tmp_path):
    path = records.write_result(tmp_path / "new", "verify", {"seed": 3}, {"figure": 0.5}, labels="nowhere")
    record = json.loads(path.read_text())
    assert record["config"] == {"seed": 3}
    assert record["figure"] == 0.5
    assert record["labels_used"] == "nowhere"
    assert set(record["versions"]) >= {"python", "torch", "xentflow"}


def test_a_figure_that_json_cannot_hold_leaves_the_old_result(tmp_path):
    records.write_result(tmp_path, "verify", {}, {"figure": 1.0}, labels="nowhere")
    with pytest.raises(ValueError, match="not JSON compliant"):
        records.write_result(tmp_path, "verify", {}, {"figure": float("nan")}, labels="nowhere")
    assert json.loads((tmp_path / "result.json").read_text())["figure"] == 1.0


def test_a_full_disk_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = records.write_whole(tmp_path / "result.json", b"old")

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.os, "fsync", no_space)
    with pytest.raises(XentflowError, match=r"result\.json could not be written: .*No space left.*nothing was changed"):
        records.write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interruption_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = records.write_whole(tmp_path / "result.json", b"old")

    def interrupted(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(records.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        records.write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(XentflowError, match=r"expected a folder that can be written, got .*file/results"):
        records.require_writable(tmp_path / "file" / "results")
