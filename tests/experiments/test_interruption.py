"""A run that is killed, wherever that hits it, leaves whole files or none, and the next ends with the same bits."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from safetensors.torch import load_file
from small import config

from xentflow.experiments import reproduce

ARGUMENTS = ["--seeds", "3", "--epochs", "4", "--dataset", "files", "--neighbour_images", "20"]


def start(files, output):
    arguments = ["reproduce", *ARGUMENTS, "--data_dir", str(files), "--output", str(output)]
    return subprocess.Popen(
        [sys.executable, "-m", "xentflow.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def kill_when(run, path):
    """SIGKILL as soon as a file appears, or when the run is over."""
    deadline = time.monotonic() + 60
    while run.poll() is None and not path.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    run.send_signal(signal.SIGKILL)
    run.communicate()


def check_whole(folder: Path):
    for path in folder.rglob("*"):
        if path.is_dir() or path.name.startswith("."):
            continue
        if path.suffix == ".safetensors":
            assert load_file(path)
        elif path.suffix == ".json":
            assert json.loads(path.read_text())["seeds"]
        else:
            assert path.stat().st_size > 0


def test_killed_runs_resume_to_the_same_bits(files, tmp_path):
    whole, output = tmp_path / "whole", tmp_path / "killed"
    assert reproduce.run(config(files, seeds=3), whole) == 0
    for name in ("seeds/seed-0.safetensors", "seeds/seed-2.safetensors", "table.md"):
        kill_when(start(files, output), output / name)
        check_whole(output)
    last = start(files, output)
    said, _ = last.communicate(timeout=60)
    assert last.returncode == 0, said
    assert "seed 0 taken from an earlier run" in said
    names = sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file())
    assert [name for name in names if (whole / name).read_bytes() != (output / name).read_bytes()] == []
