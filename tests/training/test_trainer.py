"""The trainer: AdamW as torch has it, the rate as it is written, and runs that go on to the same bits."""

import math

import pytest
import torch
from test_tasks import pictures
from torch.testing import assert_close

from xentflow.errors import XentflowError
from xentflow.networks import DerivedTransformer, PaperStack, Shape
from xentflow.training.checkpoints import Checkpoints
from xentflow.training.stages import two_stage
from xentflow.training.tasks import Images
from xentflow.training.trainer import Recipe, Trainer

SHAPE = Shape(width=16, depth=2, heads=2, hidden=8)
RECIPE = Recipe(steps=11, batch=10, learning_rate=1e-2)


def task(labels=0):
    test = pictures(30, seed=1)
    if labels:
        order = torch.randperm(30, generator=torch.Generator().manual_seed(labels))
        test = type(test)(test.images, test.labels[order], test.class_names)
    return Images(pictures(), test, patch=3, shift=1)


def trainer(recipe=RECIPE, kind=PaperStack, of=None, **settings):
    of = task() if of is None else of
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Trainer(kind(of.inputs, SHAPE), of, recipe, seed=3, **settings)


def finish(run):
    for _ in run.run():
        pass
    return run


def weights(run):
    return torch.cat([value.detach().flatten() for value in run.network.parameters()])


def test_steps_are_torchs_adamw_with_the_written_rate_and_clipping():
    ours = finish(trainer())
    reference = trainer()
    network, optimiser = reference.network, None
    parameters = list(network.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=1.0, betas=(0.9, 0.98), weight_decay=RECIPE.weight_decay)
    generator = torch.Generator().manual_seed(3)
    step = 0
    while step < RECIPE.steps:
        plan = reference.task.plan(generator, 5, 10)
        for place in range(min(5, RECIPE.steps - step)):
            warm = min(1, (step + 1) / max(1, RECIPE.warm_up * RECIPE.steps))
            optimiser.param_groups[0]["lr"] = (
                RECIPE.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / RECIPE.steps))
            )
            x, y = reference.task.batch({name: rows[place] for name, rows in plan.items()})
            loss = torch.nn.functional.cross_entropy(network(x), y)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            step += 1
    assert_close(weights(ours), weights(reference), rtol=1e-4, atol=1e-6)


def test_training_learns_and_says_how_it_goes():
    run = finish(trainer(Recipe(steps=200, batch=18, learning_rate=1e-2), kind=DerivedTransformer))
    first, last = run.history[0], run.history[-1]
    assert last["step"] == 200
    assert last["loss"] < 0.5 * first["loss"]
    assert last["accuracy"] > 0.8
    assert run.judge("validation").accuracy == last["validation_accuracy"]


@pytest.mark.parametrize("stop", [1, 3, 5, 6, 10])
def test_a_run_resumed_at_any_step_ends_with_the_same_bits(stop, tmp_path):
    whole = finish(trainer())
    first = trainer()
    for _ in first.run():
        if first.step == stop:
            break
    Checkpoints(tmp_path, {"of": "test"}).save(first)
    second = trainer()
    second.network.load_state_dict({name: value + 1 for name, value in second.network.state_dict().items()})
    assert Checkpoints(tmp_path, {"of": "test"}).resume(second)
    assert second.step == stop
    assert torch.equal(weights(finish(second)), weights(whole))
    assert second.history == whole.history


def test_only_the_last_checkpoints_stay_and_a_damaged_one_is_passed_over(tmp_path):
    said = []
    kept = Checkpoints(tmp_path, {"of": "test"}, keep=2, announce=said.append)
    run = trainer()
    for _ in run.run():
        kept.save(run)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000010.safetensors", "step-00000011.safetensors"]
    (tmp_path / names[1]).write_bytes((tmp_path / names[1]).read_bytes()[:-100])
    fresh = trainer()
    assert kept.resume(fresh)
    assert fresh.step == 10
    assert "no record that can be read" in said[0]


def test_what_other_runs_left_in_the_folder_neither_counts_nor_goes(tmp_path):
    Checkpoints(tmp_path, {"rate": 1}).save(finish(trainer()))
    kept = Checkpoints(tmp_path, {"rate": 2}, keep=1, announce=lambda text: None)
    run = trainer()
    assert not kept.resume(run)
    for _ in run.run():
        kept.save(run)
        if run.step == 3:
            break
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["step-00000003", "step-00000011"]
    again = trainer()
    assert Checkpoints(tmp_path, {"rate": 2}, announce=lambda text: None).resume(again)
    assert again.step == 3


def test_a_run_that_has_diverged_keeps_its_last_good_checkpoint(tmp_path):
    kept = Checkpoints(tmp_path, {"of": "test"})
    run = trainer()
    steps = run.run()
    next(steps)
    kept.save(run)
    next(steps)
    run._sums[0] = math.nan
    with pytest.raises(XentflowError, match="finite loss, got nan after 2 steps"):
        kept.save(run)
    assert [path.stem for path in tmp_path.iterdir()] == ["step-00000001"]


def test_checkpoints_of_other_settings_and_of_other_networks_are_not_used(tmp_path):
    said = []
    run = finish(trainer())
    Checkpoints(tmp_path, {"rate": 1}).save(run)
    assert not Checkpoints(tmp_path, {"rate": 2}, announce=said.append).resume(trainer())
    assert "other settings (rate)" in said[0]
    with pytest.raises(XentflowError, match="another's"):
        Checkpoints(tmp_path, {"rate": 1}).resume(trainer(kind=DerivedTransformer))
    with pytest.raises(XentflowError, match="keep"):
        Checkpoints(tmp_path, {}, keep=0)


def test_no_path_leads_from_test_labels_to_predictions():
    """With other test labels everything but the score is the same bits: training, weights, and what is predicted."""
    runs = [finish(trainer(of=task(labels), kind=DerivedTransformer)) for labels in (0, 1)]
    assert torch.equal(weights(runs[0]), weights(runs[1]))
    assert runs[0].history == runs[1].history
    predictions = []
    for run in runs:
        x, _ = next(run.task.held_out("test"))
        predictions.append(run.network.eval()(x))
    assert torch.equal(*predictions)
    labels = [next(run.task.held_out("test"))[1] for run in runs]
    assert not torch.equal(*labels)


def test_patience_stops_a_run_that_no_longer_gets_better():
    run = finish(trainer(Recipe(steps=400, batch=18, learning_rate=3e-2, patience=3, warm_up=0)))
    losses = [entry["validation_loss"] for entry in run.history]
    assert run.step < 400
    assert losses.index(min(losses)) == len(losses) - 4


def test_a_loss_that_is_no_longer_finite_ends_the_run_with_the_reason():
    run = trainer()
    with torch.no_grad():
        next(run.network.parameters()).fill_(torch.inf)
    with pytest.raises(XentflowError, match="finite"):
        finish(run)


class TestTwoStages:
    def test_theta_descends_at_features_that_are_held(self):
        run = trainer(criterion=two_stage)
        network = run.network
        x, y = next(run.task.held_out("validation"))
        two_stage(network, x, y)[0].backward()
        theta = network.stack.sequence()[0].model.theta
        with torch.no_grad():
            Z = network.stack(network.features(x))
        p = network.read(Z).softmax(-1)
        C = torch.nn.functional.one_hot(y, 3).float()
        assert_close(theta.grad, ((p - C).mT @ Z.squeeze(1)) / len(y))
        assert network.stack.sequence()[0].step.log_step.grad == 0

    def test_layer_wise_reaches_the_steps_too(self):
        run = trainer()
        x, y = next(run.task.held_out("validation"))
        torch.nn.functional.cross_entropy(run.network(x), y).backward()
        assert run.network.stack.sequence()[0].step.log_step.grad.abs() > 0

    def test_alternating_learns(self):
        run = finish(trainer(Recipe(steps=200, batch=18, learning_rate=1e-2), criterion=two_stage))
        assert run.history[-1]["accuracy"] > 0.8

    def test_it_goes_with_one_theta_only(self):
        with pytest.raises(XentflowError, match="two-stage"):
            finish(trainer(kind=DerivedTransformer, criterion=two_stage))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"batch": 0}, "batch"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"clip": 0.0}, "clip"),
        ({"warm_up": 1.0}, "warm_up"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"patience": -1}, "patience"),
    ],
)
def test_bad_recipes_are_refused(settings, message):
    with pytest.raises(XentflowError, match=message):
        Recipe(**settings)
