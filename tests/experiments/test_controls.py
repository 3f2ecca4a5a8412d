import pytest
import torch
from small import images

import xentflow as xf
from xentflow.experiments.controls import CONTROLS, PAPER, Setting, remember, run_controls, run_neighbours, shuffled
from xentflow.training import ClassifierConfig, fit_fast


@pytest.fixture(scope="module")
def case():
    data = images(600)
    fitted = fit_fast(data, 0, ClassifierConfig(epochs=40, batch=100))
    corruption, index = fitted.config.corruption, fitted.validation_index
    Z = corruption.apply(data.images, 0, 0, index)
    setting = Setting(fitted.model, Z, data.labels[index], 12)
    train = fitted.train_index
    memory = remember(corruption.clean(data.images[train]), data.labels[train], data.classes, 5)
    return setting, run_controls(setting, 0), memory


def test_shuffled_labels_are_followed_and_true_ones_forgotten(case):
    setting, controls, _ = case
    followed = controls["shuffled labels"]
    given = shuffled(setting.labels, 0)
    chance = (given == setting.labels).double().mean().item()
    assert followed.agreement[0] < 0.6
    assert followed.agreement[-1] > 0.98
    assert followed.accuracy[-1] == pytest.approx(chance, abs=0.03)
    assert followed.energy_to_labels[-1] > followed.energy_to_labels[0]


def test_shuffled_labels_are_the_same_labels_elsewhere():
    labels = torch.arange(50) % 7
    other = shuffled(labels, 3)
    assert torch.equal(other.sort().values, labels.sort().values)
    assert not torch.equal(other, labels)
    assert torch.equal(other, shuffled(labels, 3))
    assert not torch.equal(other, shuffled(labels, 4))


def test_own_prediction_gains_nothing(case):
    own = case[1]["own prediction"]
    assert set(own.accuracy) == {own.accuracy[0]}
    assert own.energy[-1] < own.energy[0]


def test_uniform_targets_leave_at_least_the_logarithm_of_the_classes(case):
    uniform = case[1]["uniform"]
    assert min(uniform.energy) >= torch.log(torch.tensor(3.0)).item() - 1e-6
    assert uniform.agreement is None


def test_the_certified_step_never_raises_the_energy(case):
    setting, controls, _ = case
    energy = controls["certified step"].energy
    assert list(energy) == sorted(energy, reverse=True)
    assert controls["certified step"].energy_to_labels == pytest.approx(energy)
    unit = setting.run(xf.Given(), setting.labels)
    assert unit.accuracy[-1] >= controls["certified step"].accuracy[-1]


def test_neighbours_are_asked_once_and_never_see_the_labels_judged_by(case):
    setting, _, memory = case
    found, right = run_neighbours(setting, memory)
    blind = Setting(setting.model, setting.Z, torch.zeros_like(setting.labels), setting.passes)
    again, _ = run_neighbours(blind, memory)
    assert found.agreement == again.agreement
    assert found.energy == again.energy
    assert found.agreement[-1] > found.agreement[0]
    assert 0.5 < right < 1
    assert found.accuracy[-1] == pytest.approx(right, abs=0.1)


def test_every_control_is_run_and_says_what_it_sees(case):
    assert {PAPER, "nearest neighbours", *case[1]} == set(CONTROLS)
    assert [name for name, control in CONTROLS.items() if control.uses_labels] == [PAPER, "certified step"]
