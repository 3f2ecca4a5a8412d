"""Several processes train as one does on the same batches; one that dies or hangs is said by the others."""

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.testing import assert_close

from processes import spawn
from training import config, write_both_splits
from xentflow.errors import XentflowError
from xentflow.experiments import train
from xentflow.experiments.train import TrainConfig, checkpoint_settings, make_network, make_task, make_trainer, run
from xentflow.networks import DerivedTransformer, Shape
from xentflow.training import parallel
from xentflow.training.checkpoints import Checkpoints
from xentflow.training.parallel import Processes, joined
from xentflow.training.tasks import IGNORED, Recall
from xentflow.training.trainer import Recipe, Trainer

STOP, STEPS = 6, 14
RUNS = {
    "derived": {"network": "derived"},
    "transformer": {"network": "transformer"},
    "paper": {"network": "paper", "optimisation": "two-stage", "tied": True},
    "stopped": {"network": "paper"},
}
KINDS = {"derived": ("ddp", "fully-shard"), "transformer": ("fully-shard",), "paper": ("ddp",)}


def settings(folder, name, **changes):
    return config(folder, **{"steps": STEPS, "batch": 24, "save_every": STOP} | RUNS[name] | changes)


class Uneven(Recall):
    """Recall that asks all of a batch's first half, and of the other one thing, or nothing at every second step."""

    def batch(self, row):
        x, y = super().batch(row)
        places = torch.arange(y.shape[-1]) - 2 * self.pairs
        # The number of a sample is not known to a share of the batch, so it rides along in the plan.
        return x, torch.where(places[None] < row["asked"][:, None], y, IGNORED)

    def plan(self, generator, steps, batch):
        asked = torch.zeros(steps, batch, dtype=torch.int64)
        asked[:, : batch // 2] = self.pairs
        asked[::2, batch // 2] = 1
        return super().plan(generator, steps, batch) | {"asked": asked}

    def steps_per_pass(self, batch):
        return 5

    def held_out(self, part):
        generator = torch.Generator().manual_seed(5)
        rows = super().plan(generator, 1, 7)
        x, y = super().batch({name: some[0] for name, some in rows.items()})
        # The last chunk has one sample, fewer than there are processes.
        yield from zip(x.split(3), y.split(3), strict=True)


def uneven(processes):
    """The curve of a run whose decisions are unevenly spread."""
    task = Uneven(pairs=3, keys=8, values=5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = DerivedTransformer(task.inputs, Shape(width=16, depth=1, heads=2, hidden=8))
    # So short a leash that every gradient is clipped, by the norm of all of it.
    trainer = Trainer(network, task, Recipe(steps=10, batch=8, clip=0.05, learning_rate=1e-2), 0, processes=processes)
    for _ in trainer.run():
        pass
    return trainer.history


def work(rank, size, folder, output):
    """Every run of two processes, and what else they are asked, in one group."""
    found = {}
    for name, kinds in KINDS.items():
        for kind in kinds:
            assert run(settings(folder, name, parallel=kind), output / f"{name} {kind}") == 0
    for kind in ("ddp", "fully-shard"):
        with joined(kind) as processes:
            found[f"uneven {kind}"] = uneven(processes)
    found |= {f"resumed {kind}": resumed(folder, output / f"stopped {kind}", kind) for kind in ("ddp", "fully-shard")}
    try:
        run(settings(folder, "paper", parallel="ddp", batch=27), output / "odd")
    except XentflowError as error:
        found["odd"] = str(error)
    return found


def resumed(folder, output, kind):
    """Whether a run that was stopped, and another that went on from its checkpoint, end with one run's bits."""
    chosen = settings(folder, "stopped", parallel=kind)

    def started(processes):
        task = make_task(chosen)
        trainer = make_trainer(chosen, make_network(chosen, task), task, processes)
        return trainer, Checkpoints(output / "checkpoints", checkpoint_settings(chosen))

    with joined(kind) as processes:
        whole, _ = started(processes)
        for _ in whole.run():
            pass
        first, checkpoints = started(processes)
        for _ in first.run():
            if first.step == STOP:
                break
        checkpoints.save(first)
        second, checkpoints = started(processes)
        assert checkpoints.resume(second)
        assert second.step == STOP
        for _ in second.run():
            pass
        states = [trainer.state()[0] for trainer in (whole, second)]
    same = all(torch.equal(states[0][name], states[1][name]) for name in states[0] if name != "generator")
    return same and whole.history == second.history


def curve(output):
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def largest_difference(ours, theirs, names=("loss", "accuracy", "validation_loss", "validation_accuracy")):
    assert [entry["step"] for entry in ours] == [entry["step"] for entry in theirs]
    return max(abs(a[name] / b[name] - 1) for a, b in zip(ours, theirs, strict=True) for name in names)


def test_two_processes_train_as_one_does(tmp_path):
    folder = write_both_splits(tmp_path / "both")
    alone = {name: tmp_path / name for name in RUNS}
    for name, output in alone.items():
        run(settings(folder, name), output)
    found = spawn(work, 2, tmp_path, folder, tmp_path)
    for name, kinds in KINDS.items():
        for kind in kinds:
            output = tmp_path / f"{name} {kind}"
            assert largest_difference(curve(output), curve(alone[name])) <= 1e-5
            # The transformer's key bias has no gradient but rounding, of which AdamW makes steps of full length.
            if name != "transformer":
                ours, theirs = (load_file(path / "weights.safetensors") for path in (output, alone[name]))
                assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
            record, reference = (json.loads((path / "result.json").read_text()) for path in (output, alone[name]))
            assert (record["processes"], reference["processes"]) == (2, 1)
            assert record["parameters"] == reference["parameters"]
            assert record["test"]["loss"] == pytest.approx(reference["test"]["loss"], rel=1e-5)
            if name == "derived":
                depths = [torch.tensor(each["depth"]["own_energy"]) for each in (record, reference)]
                assert_close(*depths, rtol=1e-4, atol=1e-4)
                assert largest_difference(curve(output), curve(alone[name]), ["energy"]) <= 1e-4
            assert [path.name for path in output.rglob(".*")] == []
    uneven_alone = uneven(Processes())
    for of_rank in found:
        for kind in ("ddp", "fully-shard"):
            assert largest_difference(of_rank[f"uneven {kind}"], uneven_alone) <= 1e-5
            assert of_rank[f"resumed {kind}"]
        assert "batch: expected a multiple of the number of processes, 2, got 27" in of_rank["odd"]
    # One process goes on from what two have saved.
    for kind in ("ddp", "fully-shard"):
        assert run(settings(folder, "stopped"), tmp_path / f"stopped {kind}") == 0
        assert largest_difference(curve(tmp_path / f"stopped {kind}"), curve(alone["stopped"])) <= 1e-5


def lost(rank, size, folder, output, how, kind):
    """A run in which the last process is struck at a step; what the others say."""
    parallel.SILENCE = timedelta(seconds=2)
    chosen = config(folder, steps=10**6, batch=24, network="paper", save_every=10**6, parallel=kind)

    def strike(trainer):
        steps = iter(range(10**6))

        def advance():
            if rank == size - 1 and next(steps) == 12:
                os.kill(os.getpid(), how)
            return taken()

        taken, trainer.advance = trainer.advance, advance
        return trainer

    made = train.make_trainer
    train.make_trainer = lambda *arguments: strike(made(*arguments))
    try:
        run(chosen, output)
    except XentflowError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("how", "kind"), [(signal.SIGKILL, "ddp"), (signal.SIGKILL, "fully-shard"), (signal.SIGSTOP, "ddp")]
)
def test_a_process_that_dies_or_hangs_is_said_by_the_others(how, kind, tmp_path):
    folder = write_both_splits(tmp_path / "both")
    said = spawn(lost, 2, tmp_path, folder, tmp_path / "out", how, kind, timeout=timedelta(seconds=2), dies=(1,))
    assert len(said) == 1
    assert "parallel: expected every process to answer process 0 of 2 within 2 s" in said[0]
    assert "died or hangs" in said[0]


def test_torchrun_starts_the_command(tmp_path):
    command = [
        "train",
        "--task",
        "recall",
        "--steps",
        "2",
        "--batch",
        "4",
        "--parallel",
        "ddp",
        "--output",
        str(tmp_path),
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "xentflow.cli", *command], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "result.json").read_text())["processes"] == 2
    assert done.stdout.count("Done in") == 1


def test_processes_and_the_setting_must_agree(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(XentflowError, match=r"expected a start by torchrun .* got no RANK, WORLD_SIZE"), joined("ddp"):
        pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(XentflowError, match="expected ddp or fully-shard with 2 processes, got none"), joined("none"):
        pass
    assert not dist.is_initialized()


def test_processes_that_never_come_are_said(monkeypatch):
    monkeypatch.setattr(parallel, "SILENCE", timedelta(seconds=1))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(XentflowError, match="to answer a process within 1 s"), joined("ddp"):
        pass


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": "ddp", "compare": True},
        {"parallel": "fully-shard", "compiled": True},
        {"parallel": "fully-shard", "network": "paper", "optimisation": "two-stage", "tied": True},
    ],
)
def test_what_does_not_go_together_is_refused(changes):
    with pytest.raises(XentflowError, match="parallel: expected none"):
        TrainConfig(**changes)


def test_other_errors_are_not_taken_for_a_silence(tmp_path):
    assert spawn(other_error, 1, tmp_path) == ["mat1 and mat2"]


def other_error(rank, size):
    try:
        with joined("ddp"):
            torch.ones(2, 3) @ torch.ones(2, 3)
    except RuntimeError as error:
        return str(error)[:13]
